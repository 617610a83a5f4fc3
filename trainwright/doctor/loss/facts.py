"""What was measured where a loss is computed, on the arguments of the function that compares with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ComparedFacts:
    """One call of a loss function. Its value, and what it would be of other predictions.

    ``blank``: of outputs that are 0 (probabilities: all the same). ``constant``: of the best prediction that is the
    same for all ``targets``. ``bound`` is the function that bounds the prediction, and ``outside`` the share of targets
    that it cannot reach. ``smoothed``: where targets are smoothed, the lowest value there is, and that of equal shares.
    ``swapped``: the target has a graph and the prediction has none. ``itself``: both have the same values.
    """

    op: str
    module: str | None
    value: float
    blank: float
    constant: float
    targets: int
    bound: str = ""
    outside: float = 0.0
    swapped: bool = False
    itself: bool = False
    smoothed: tuple[float, float] = (0.0, 0.0)
    bounded: tuple[float, float] = (0.0, 0.0)
    mass: float = -1.0


@dataclass(frozen=True)
class SummedTerm:
    """A term of the loss that is a sum over so many targets, beside one that is a mean."""

    op: str
    targets: int


@dataclass(frozen=True)
class ComparisonsFacts:
    """Of every call in one step. ``added``: the function that an output plus targets goes into."""

    experiment: ClassVar[str] = "comparisons"
    calls: tuple[ComparedFacts, ...] = ()
    summed: SummedTerm | None = None
    added: str = ""


@dataclass(frozen=True)
class Learned:
    """One call of a loss function in several steps, with the weights of the last. Means of its values.

    ``gained`` is the share of the loss of the best constant prediction that it lies below that; ``told`` that by which
    it rises with shuffled targets. ``error`` is the standard error of the less certain of the two, ``told_error`` of
    the latter. A step has ``targets`` of it, of ``classes`` (0: no classes).
    """

    op: str
    module: str | None
    value: float
    constant: float
    shuffled: float
    gained: float
    told: float
    error: float
    told_error: float = 0.0
    targets: int = 0
    classes: int = 0


@dataclass(frozen=True)
class LearnedFacts:
    """Of the calls whose targets vary, in ``steps`` steps.

    ``drawn``: the step draws samples of the model's own, as a policy does.
    """

    experiment: ClassVar[str] = "learned"
    steps: int
    calls: tuple[Learned, ...] = ()
    drawn: bool = False


@dataclass(frozen=True)
class TowardsFacts:
    """The loss of a step, and what it is when every prediction moves a little towards its target.

    ``rivals``: there are several models or optimizers, of which one may want the other's loss to rise.
    """

    experiment: ClassVar[str] = "towards_targets"
    before: float
    after: float
    ops: tuple[str, ...] = ()
    rivals: bool = False


@dataclass(frozen=True)
class TermRatio:
    """A term of the loss, and its value for the batch twice over that of the batch."""

    name: str
    weight: float
    ratio: float


@dataclass(frozen=True)
class CutFacts:
    """The loss of the batch twice in place of once, in eval mode: 1 for a mean over samples, 2 for a sum.

    ``divides``: the loop divides by the number of samples, which stays that of one batch here.
    """

    experiment: ClassVar[str] = "batch_twice"
    ratio: float
    terms: tuple[TermRatio, ...] = ()
    divides: bool = False


@dataclass(frozen=True)
class CountedFacts:
    """Of ``rows`` in the batch of a step, those for whose outputs the loss has no gradient but 0.

    ``are_samples``: a loader says that rows are samples. ``total`` is the sum of the first input.
    """

    experiment: ClassVar[str] = "rows_that_count"
    rows: int
    idle: tuple[int, ...] = ()
    are_samples: bool = True
    total: float = 0.0
