"""What was measured of the function that the models compute. Deviations are in standard deviations of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Deviation:
    """How far outputs changed that must not change. More than ``limit`` is more than rounding.

    ``module`` is the first one whose output changed though its input had not; None where that is not known.
    """

    amount: float
    limit: float
    module: str | None = None

    @property
    def is_real(self) -> bool:
        return self.amount > self.limit


@dataclass(frozen=True)
class FunctionFacts:
    """Of one step, its forward pass in eval mode run again with one thing changed. None: could not be measured.

    ``noise``: other random numbers. ``carried``: a second call after the first. ``written``: buffers that a pass
    writes to. ``neighbours``: another sample in the batch, ``related`` says why samples may depend on each other.
    ``alone``: two samples without the others. ``padding``: a row without its padding, ``pad`` says what declares it.
    ``future``: later positions, where the target is the next one.
    """

    experiment: ClassVar[str] = "function"
    size: int = 0
    noise: Deviation | None = None
    carried: Deviation | None = None
    written: tuple[str, ...] = ()
    neighbours: Deviation | None = None
    related: str = ""
    alone: Deviation | None = None
    padding: Deviation | None = None
    pad: str = ""
    future: Deviation | None = None


@dataclass(frozen=True)
class InputsFacts:
    """Of the first ``tensors`` inputs that vary from sample to sample those without an effect on any output, by place.

    ``columns`` of the first one that vary; ``idle_columns`` are those of them without an effect.
    """

    experiment: ClassVar[str] = "idle_inputs"
    tensors: int
    columns: int = 0
    idle: tuple[int, ...] = ()
    idle_columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class GapFacts:
    """The loss of one batch, with the same weights, in train mode and in eval mode.

    ``module`` is the one that, put into train mode alone, takes most of the difference away; ``without`` is the loss
    then.
    """

    experiment: ClassVar[str] = "evaluated"
    train: float
    eval: float
    module: str | None = None
    without: float | None = None


@dataclass(frozen=True)
class TiesFacts:
    """Weights that two modules shared when the watch began: ``broken`` do so no longer, as (one, other).

    ``split`` are two parameters over the same memory: each has a gradient and moments of its own.
    """

    experiment: ClassVar[str] = "ties"
    tied: int
    broken: tuple[tuple[str, ...], ...] = ()
    split: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class OddFactor:
    """A number far from 1 that what weights have made is multiplied by, in a ``module`` (None: behind the models)."""

    module: str | None
    factor: float
    line: str | None = None


@dataclass(frozen=True)
class FactorsFacts:
    """Those of a step. Sizes of tensors, and their roots, are none."""

    experiment: ClassVar[str] = "factors"
    odd: tuple[OddFactor, ...] = ()


@dataclass(frozen=True)
class WithoutFactorFacts:
    """The mean loss of the last batches up to step ``until``, ``before`` the steps since ``since`` and ``after`` these;
    and the same ``without`` the factor. ``surely``: without it the loss is lower in the end.
    """

    experiment: ClassVar[str] = "without_factors"
    since: int
    until: int
    module: str | None
    factor: float
    line: str | None
    before: float
    after: float
    before_without: float
    after_without: float
    surely: bool


@dataclass(frozen=True)
class WithoutCutFacts:
    """The same of data that the function ``op`` rounds or cuts off in a ``module``, with the data whole. ``op`` is
    None where nothing is cut.
    """

    experiment: ClassVar[str] = "without_cuts"
    since: int
    until: int
    module: str | None = None
    op: str | None = None
    line: str | None = None
    before: float = 0.0
    after: float = 0.0
    before_without: float = 0.0
    after_without: float = 0.0
    surely: bool = False


@dataclass(frozen=True)
class WithoutPolesFacts:
    """The same of a divisor that weights make and that has both signs: ``nearest`` to 0 of its elements, relative to
    their root mean square. Without: each is away from 0 by that. ``line`` is None where there is no such divisor.
    """

    experiment: ClassVar[str] = "without_poles"
    since: int
    until: int
    module: str | None = None
    line: str | None = None
    nearest: float = 0.0
    before: float = 0.0
    after: float = 0.0
    before_without: float = 0.0
    after_without: float = 0.0
    surely: bool = False


@dataclass(frozen=True)
class WithoutOutliersFacts:
    """The same of the tensor ``name``, whose largest weight is so many ``times`` the median of those other than 0.
    Without: none is more than ten times that. None: there is no such tensor.
    """

    experiment: ClassVar[str] = "without_outliers"
    since: int
    until: int
    name: str | None = None
    times: float = 0.0
    before: float = 0.0
    after: float = 0.0
    before_without: float = 0.0
    after_without: float = 0.0
    surely: bool = False


class WithAndWithout(Protocol):
    """What the first steps come to as they were, and without something."""

    @property
    def before(self) -> float: ...
    @property
    def after(self) -> float: ...
    @property
    def before_without(self) -> float: ...
    @property
    def after_without(self) -> float: ...
    @property
    def surely(self) -> bool: ...
