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
    """Calls between two updates."""

    calls: int  # Calls of ``scheduler.step``
    backwards: int  # Backward passes
    in_a_row: int  # The most consecutive calls of ``scheduler.step``


@dataclass(frozen=True)
class PlateauMetric:
    """A metric passed to ReduceLROnPlateau, the mean training loss since the last metric, and the learning rate."""

    value: float
    loss: float
    lr: float


@dataclass
class SchedulerFacts:
    """A scheduler of a watched optimizer, or one that is stepped although its optimizer never is."""

    parts: tuple[PartFacts, ...] = ()  # The scheduler itself, then the schedulers inside it
    since: int = 0  # Step of its first call
    calls: int = 0  # Number of calls
    windows: tuple[Window, ...] = ()  # The last 8 intervals between updates, without the first one
    metrics: tuple[PlateauMetric, ...] = ()  # Metrics passed to it
    repeated: int = 0  # Calls without an update since the previous call
    advanced: int = 0  # Calls with at least one update since the previous call
    advanced_once: int = 0  # Calls with exactly one update since the previous call
    is_stray: bool = False  # Its optimizer never stepped
    shares: bool = False  # That optimizer holds parameters of the watched models

    @property
    def kind(self) -> str:
        """Its class in torch."""
        return self.parts[0].kind


@dataclass
class LearningRateFacts:
    """The highest learning rate of all groups in each step."""

    experiment: ClassVar[str] = "schedule"
    steps: int = 0  # Steps so far
    epochs: int = 0  # Passes over the loader
    length: int | None = None  # Batches of the loader; None if unknown
    lrs: tuple[tuple[float, ...], ...] = ()  # (step, learning rate) of the last 64 changes
    peak: float = 0.0  # Highest learning rate so far
    zero_steps: int = 0  # Number of steps with a learning rate of 0
    exhausted: int | None = None  # The step since which the learning rate has been below a thousandth of its peak
    climbed: tuple[float, ...] = ()  # First rise after the end of a cosine: step, rate before, rate after
    base: float = 0.0  # The highest ``initial_lr``; 0 without a scheduler
    schedulers: tuple[SchedulerFacts, ...] = ()
