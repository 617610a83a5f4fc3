"""Learning rates over the steps, and the schedulers that write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PartFacts:
    """The attributes of a scheduler, or of one within it, as torch names them."""

    kind: str
    last_epoch: int = 0
    T_max: float | None = None
    total_steps: float | None = None
    total_iters: float | None = None
    step_size: float | None = None
    gamma: float | None = None
    mode: str = ""
    milestones: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """Between two updates: calls of ``scheduler.step``, backward passes, and the most scheduler calls in a row."""

    calls: int
    backwards: int
    in_a_row: int


@dataclass(frozen=True)
class PlateauMetric:
    """A value that a plateau schedule was given; the mean training loss since the last, and the learning rate."""

    value: float
    loss: float
    lr: float


@dataclass(frozen=True)
class SchedulerFacts:
    """A scheduler of a watched optimizer, or one that is stepped while its optimizer is not.

    Attributes:
        windows: The last 8, without the first one.
        repeated: Calls without an update since the call before; ``advanced``: calls with one or more.
        advanced_once: Calls with exactly one.
        is_stray: Its optimizer never stepped. ``shares``: that one holds parameters of the watched models.
    """

    parts: tuple[PartFacts, ...]
    since: int
    calls: int
    windows: tuple[Window, ...] = ()
    metrics: tuple[PlateauMetric, ...] = ()
    repeated: int = 0
    advanced: int = 0
    advanced_once: int = 0
    is_stray: bool = False
    shares: bool = False

    @property
    def kind(self) -> str:
        """The class of torch that it is of."""
        return self.parts[0].kind


@dataclass(frozen=True)
class LearningRateFacts:
    """The highest learning rate of all groups in each step.

    Attributes:
        epochs, length: Passes over the loader, and its number of batches.
        lrs: (step, rate) of the last 64 changes.
        exhausted: The step since which it has been below a thousandth of its peak.
        base: The highest ``initial_lr``; 0 where no scheduler is attached.
    """

    experiment: ClassVar[str] = "schedule"
    steps: int
    epochs: int
    length: int | None
    lrs: tuple[tuple[float, ...], ...]
    peak: float
    zero_steps: int
    exhausted: int | None
    base: float
    schedulers: tuple[SchedulerFacts, ...]
