"""When: an object apart from what is done. Due every so many steps, seconds of training or shares of the run."""

from __future__ import annotations

from trainwright.state.train_state import TrainState


class Every:
    """True once for each boundary of ``steps``, ``seconds`` or ``fraction`` that a run passes; one is given.

    Boundaries lie at whole multiples, so a resumed run keeps the rhythm of the first.
    """

    def __init__(
        self, *, steps: int | None = None, seconds: float | None = None, fraction: float | None = None
    ) -> None:
        assert sum(each is not None for each in (steps, seconds, fraction)) == 1
        self.steps, self.seconds, self.fraction = steps, seconds, fraction
        self._passed: int | None = None

    def due(self, state: TrainState) -> bool:
        """Whether a boundary was passed since the last call. Costs no host sync."""
        if self.steps is not None:
            return state.step % self.steps == 0
        at = state.elapsed_s / self.seconds if self.seconds is not None else state.fraction / (self.fraction or 1.0)
        passed, before = int(at), self._passed
        if before is None:  # a resumed run does not do again what it did before
            before = 0 if state.step <= 1 else passed
        self._passed = passed
        return passed > before
