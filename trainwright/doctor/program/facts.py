"""What is known of the objects of a loop and of what it calls between its steps. Steps count from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class StrayScheduler:
    """A scheduler that is stepped and whose optimizer is not. ``shares``: that has parameters of one that steps."""

    kind: str
    calls: int
    since: int
    shares: bool


@dataclass(frozen=True)
class EvaluatedCopy:
    """A module that the loop evaluates, of the shapes of the model that is trained but with weights of its own.

    ``moved``: its weights have changed from one evaluation to another.
    """

    kind: str
    evaluations: int
    first: int
    last: int
    moved: bool


@dataclass(frozen=True)
class ObjectsFacts:
    """Which objects were used together in ``steps`` steps.

    ``scaled_updates`` were made while the loss scale was in the gradients, the first in step ``scaled_since``. Of
    ``scaler_steps`` steps through a scaler ``other_scaler`` were through another one than the loss. ``evaluations``
    are those of the model itself.
    """

    experiment: ClassVar[str] = "objects"
    steps: int
    stray_schedulers: tuple[StrayScheduler, ...] = ()
    scaled_updates: int = 0
    scaled_since: int = 0
    scaler_steps: int = 0
    scaler_updates: int = 0
    other_scaler: int = 0
    copies: tuple[EvaluatedCopy, ...] = ()
    evaluations: int = 0


@dataclass(frozen=True)
class KeptState:
    """A dictionary of ``state_dict()`` that was kept while its tensors changed. ``source`` is the line of the call.

    ``used``: by ``load``, by ``save``, or "" where it was only kept until the end.
    """

    taken: int
    used_at: int
    used: str
    source: str | None


@dataclass(frozen=True)
class KeptFacts:
    """``taken`` dictionaries were handed out. ``changed`` are those that no longer hold what they held then."""

    experiment: ClassVar[str] = "kept"
    taken: int
    changed: tuple[KeptState, ...] = ()


@dataclass(frozen=True)
class UnreadName:
    """An attribute or a key ``name`` of ``owner`` that nothing reads, and the known one that it is nearly."""

    owner: str
    name: str
    known: str
    value: str
    module: str | None = None


@dataclass(frozen=True)
class NamesFacts:
    """``looked_at`` objects have no other attributes that are nearly known ones."""

    experiment: ClassVar[str] = "names"
    looked_at: int
    unread: tuple[UnreadName, ...] = ()


@dataclass(frozen=True)
class OddConstant:
    """A constant of an optimizer, or of the module at the path ``module``, that is not between ``low`` and ``high``."""

    owner: str
    module: str | None
    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ConstantsFacts:
    """The constants of ``looked_at`` objects have values as they should, but for the ``odd`` ones."""

    experiment: ClassVar[str] = "constants"
    looked_at: int
    odd: tuple[OddConstant, ...] = ()


@dataclass(frozen=True)
class ShownWarning:
    """A warning that was shown ``count`` times, first in step ``step``, at ``source``."""

    kind: str
    text: str
    count: int
    step: int
    source: str


@dataclass(frozen=True)
class WarningsFacts:
    """The warnings that were shown while the loop ran."""

    experiment: ClassVar[str] = "warned"
    warnings: tuple[ShownWarning, ...] = ()


@dataclass(frozen=True)
class RateFacts:
    """The rates of a scheduler's optimizer, over ``updates`` updates since its first step.

    In ``off`` of these the rate was not what the scheduler had set; in the last ``off_in_a_row`` without a break,
    with ``seen`` in place of ``said``. ``followed`` are the changes by the scheduler that an update has used. Its
    ``calls`` came after so many updates: ``gaps`` has ``(updates, calls)``.
    """

    kind: str
    updates: int
    calls: int
    off: int
    off_in_a_row: int
    followed: int
    off_since: int
    seen: float
    said: float
    gaps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RatesFacts:
    """Of every scheduler that the loop steps."""

    experiment: ClassVar[str] = "rates"
    schedulers: tuple[RateFacts, ...] = ()
