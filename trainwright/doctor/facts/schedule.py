"""Measurements of learning rates and schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PartFacts:
    """Attributes of a scheduler, or of one inside a SequentialLR or ChainedScheduler, with torch's names."""

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
    """Calls between two updates.

    Attributes:
        calls: Calls of ``scheduler.step``.
        backwards: Backward passes.
        in_a_row: The most consecutive calls of ``scheduler.step``.
    """

    calls: int
    backwards: int
    in_a_row: int


@dataclass(frozen=True)
class PlateauMetric:
    """A metric passed to ReduceLROnPlateau, the mean training loss since the previous one, and the learning rate."""

    value: float
    loss: float
    lr: float


@dataclass(frozen=True)
class SchedulerFacts:
    """A scheduler of a watched optimizer, or one that is stepped although its optimizer never is.

    Attributes:
        parts: The scheduler itself, then the schedulers inside it.
        since: Step of its first call.
        calls: Number of calls.
        windows: The last 8 intervals between updates, without the first one.
        metrics: Metrics passed to it.
        repeated: Calls without an update since the previous call.
        advanced: Calls with at least one update since the previous call.
        advanced_once: Calls with exactly one.
        is_stray: Its optimizer never stepped.
        shares: That optimizer holds parameters of the watched models.
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
        """Its class in torch."""
        return self.parts[0].kind


@dataclass(frozen=True)
class LearningRateFacts:
    """The highest learning rate of all groups in each step.

    Attributes:
        steps: Steps so far.
        epochs: Passes over the loader.
        length: Batches of the loader; None if unknown.
        lrs: (step, learning rate) of the last 64 changes.
        peak: Highest learning rate so far.
        zero_steps: Number of steps with a learning rate of 0.
        exhausted: The step since which the learning rate has been below a thousandth of its peak.
        base: The highest ``initial_lr``; 0 without a scheduler.
        schedulers: The schedulers.
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
