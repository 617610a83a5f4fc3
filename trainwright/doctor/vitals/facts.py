"""What is measured of the vital signs: which tensors move, and how far; the noise; what is written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MOST_NAMES = 32
"""Tensors that are listed of each kind; of more, only the number."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The root mean square of a weight over the last looks: at ``since`` and now. ``usual`` is that of a fresh one."""

    name: str
    since: int
    before: float
    now: float
    usual: float
    steady: bool


@dataclass(frozen=True, kw_only=True)
class VitalsFacts:
    """The weights at a look, compared with those at the begin.

    ``updates`` were made at a rate above 0, of ``steps``. ``tensors`` can be trained and belong to an optimizer with
    such a rate, ``moved`` of them have changed, ``only_decayed`` of these without any gradient but 0 at a look;
    ``still`` are names of those that did not move, or only so. ``has_gradient``: some tensor had another gradient than
    0. ``stands_since`` is the last step after which anything had changed. ``frozen_moved`` cannot be trained,
    belong to an optimizer and changed all the same, of ``frozen``. ``lowest_rate`` is below 0 where an update was made
    at such a learning rate, the lowest in step ``lowest_at``. ``at_0_since`` is the step since which the rates of all
    groups are 0 (0: they are not), ``rate_before_0`` the highest in the step before, ``highest_rate`` in any.
    ``frozen_still`` matrices cannot be trained and never moved. ``unchanged`` are those of the trainable ones that have
    not changed since the look after step ``since``, or have a gradient of zeros. ``worked_on``: weights that were
    written to so often before the first step that they were trained.
    """

    experiment: ClassVar[str] = "vitals"
    steps: int
    updates: int
    tensors: int = 0
    moved: int = 0
    only_decayed: int = 0
    still: tuple[str, ...] = ()
    num_still: int = 0
    has_gradient: bool = False
    stands_since: int = 0
    frozen: int = 0
    frozen_moved: tuple[str, ...] = ()
    frozen_still: int = 0
    worked_on: tuple[str, ...] = ()
    since: int = 0
    unchanged: tuple[str, ...] = ()
    drifts: tuple[Drift, ...] = ()
    lowest_rate: float = 0.0
    lowest_at: int = 0
    at_0_since: int = 0
    rate_before_0: float = 0.0
    highest_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SteadyFacts:
    """What only the loop itself shows, over ``steps``.

    ``draws``: random numbers are drawn while a step runs. ``repeats`` of the steps began in a random state in which an
    earlier one began, the first in step ``since_repeat`` (that of ``repeats_step``). ``written`` steps changed what
    the model was given, in place: ``written_views`` of these a part of a larger tensor. ``changed`` of the parts of a
    tensor that came again had other values, the first in step ``since_changed``. ``came_again`` is how many did.
    """

    experiment: ClassVar[str] = "steadiness"
    steps: int
    draws: bool = False
    repeats: int = 0
    since_repeat: int = 0
    repeats_step: int = 0
    written: int = 0
    written_views: int = 0
    since_written: int = 0
    came_again: int = 0
    changed: int = 0
    since_changed: int = 0


@dataclass(frozen=True, kw_only=True)
class StillTensor:
    """A trainable tensor that got no gradient but 0 in a step. ``effect``: how far the loss changes where it changes,
    relative to the loss; 0: the loss does not depend on it. ``reached``: it got a gradient, of 0. ``cancels``: it is a
    bias beside a weight that learns; the loss is made of differences or slopes of what both give.
    """

    name: str
    effect: float
    reached: bool
    cancels: bool = False


@dataclass(frozen=True, kw_only=True)
class StillnessFacts:
    """Whether the loss of a step depends on what gets no gradient in it."""

    experiment: ClassVar[str] = "stillness"
    tensors: tuple[StillTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OtherRatesFacts:
    """Losses of updates on one batch alone, by a factor of the learning rate."""

    experiment: ClassVar[str] = "other_rates"
    factors: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    lr: float


@dataclass(frozen=True)
class ReachFacts:
    """The mean loss of the last batches with the weights ``before`` step ``since``, with those of step ``until``
    (``now``), and ``beyond`` these: three times as far in the same direction.

    ``surely``: there it is lower than at first by more than 1.5 times as much as now, by two standard errors.
    ``updates`` are those that the optimizer counts in its life (0: it does not).
    ``endless``: it is a difference of outputs, which becomes as many times as large as these do.
    """

    experiment: ClassVar[str] = "reach"
    since: int
    until: int
    before: float
    now: float
    beyond: float
    surely: bool
    updates: int = 0
    endless: bool = False


@dataclass(frozen=True)
class HigherRatesFacts:
    """The last steps once more, from step ``since`` on, with rates of other sizes; and what that does to the batches
    that followed: their mean loss ``before`` these steps and after them, with the rates ``as_it_was``, ``thrice`` and
    ``tenfold``.

    ``fell``: surely. ``surely``: the tenfold rate took off more than twice as much, and the threefold one more than
    one and a half times as much. ``nearly_as``: these took off more than five and more than two times as much, nearly
    as they are larger. ``updates`` are those that the optimizer counts in its life (0: it does not).
    ``drawn``: the step draws samples of the model's own.
    """

    experiment: ClassVar[str] = "higher_rates"
    since: int
    until: int
    before: float
    as_it_was: float
    thrice: float
    tenfold: float
    fell: bool
    surely: bool
    updates: int = 0
    drawn: bool = False
    nearly_as: bool = False
