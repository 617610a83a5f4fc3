"""How fast a run reads its data, as measured, and the advice that follows from the measurement."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.plan.explain import human_seconds
from trainwright.plan.make import Note

LESS = 0.8
"""Reading time / waiting time, below which reading without workers is clearly faster than waiting for them."""


@dataclass(frozen=True)
class ReadingPace:
    """Seconds of a step that concern its data, means over ``steps`` steps.

    ``wait_s`` is how long a step waits for its batch. ``read_s`` is how long the processes that read take for it, all
    of them together: what the training process would take to read it alone. ``start_s`` is the time until the first
    batch came.
    """

    workers: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    start_s: float = 0.0
    steps: int = 0

    @property
    def workers_cost_more(self) -> bool:
        """Whether a step waits longer for the workers than the training process would read itself."""
        return self.workers > 0 and 0.0 < self.read_s < LESS * self.wait_s

    def advice(self) -> str:
        """What to do where a step waits too long. Nothing is recommended that was not measured."""
        if self.workers_cost_more:
            times = f"reading a batch takes {human_seconds(self.read_s)}, its way from a worker the rest"
            return f"data.workers: 0 ({times})"
        return "`trainwright profile` measures whether more or fewer data.workers help"

    def notes(self) -> tuple[Note, ...]:
        """What was measured of the workers, for the plan."""
        if not self.workers or not self.steps:
            return ()
        seen = (
            f"a step waits {human_seconds(self.wait_s)} for its batch, which takes {human_seconds(self.read_s)} to read"
        )
        seen += f"; the first one came after {human_seconds(self.start_s)}"
        faster = "; data.workers: 0 is faster" if self.workers_cost_more else ""
        return (Note("workers", str(self.workers), f"measured in the dry run: {seen}{faster}"),)
