"""Measured speed of reading data, and the advice that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.plan.explain import human_seconds
from trainwright.plan.make import Note

WORKERS_SLOWER_RATIO = 0.8
"""Reading time / waiting time. Below this ratio, reading without workers is clearly faster than waiting for them."""


@dataclass(frozen=True)
class ReadingPace:
    """Seconds per step spent on data, averaged over ``steps`` steps.

    ``wait_s`` is the time that a step waits for its batch. ``read_s`` is the reading time summed over the reading
    processes, which is about what the training process alone would need. ``start_s`` is the time until the first batch.
    """

    workers: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    start_s: float = 0.0
    steps: int = 0

    @property
    def workers_cost_more(self) -> bool:
        """True if a step waits longer for the workers than the training process would need to read."""
        return self.workers > 0 and 0.0 < self.read_s < WORKERS_SLOWER_RATIO * self.wait_s

    def advice(self) -> str:
        """Return advice for steps that wait too long. Only measured settings are recommended."""
        if self.workers_cost_more:
            times = f"reading a batch takes {human_seconds(self.read_s)}, its transfer from a worker the rest"
            return f"data.workers: 0 ({times})"
        return "`trainwright profile` measures whether more or fewer data.workers help"

    def notes(self) -> tuple[Note, ...]:
        """Return the measurement of the workers, for the plan."""
        if not self.workers or not self.steps:
            return ()
        seen = (
            f"a step waits {human_seconds(self.wait_s)} for its batch, which takes {human_seconds(self.read_s)} to read"
        )
        seen += f"; the first one came after {human_seconds(self.start_s)}"
        faster = "; data.workers: 0 is faster" if self.workers_cost_more else ""
        return (Note("workers", str(self.workers), f"measured in the dry run: {seen}{faster}"),)
