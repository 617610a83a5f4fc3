"""Decides when something is due: every number of steps, seconds of training, or fraction of the run."""

from __future__ import annotations

from trainwright.checkpoint.train_state import TrainState


class Every:
    """Is due when a run crosses a multiple of ``steps``, ``seconds`` or ``fraction``. Exactly one must be given.

    A resumed run is therefore due at the same points as an uninterrupted run. ``since`` is the state at the resume.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        fraction: float | None = None,
        since: TrainState | None = None,
    ) -> None:
        assert sum(each is not None for each in (steps, seconds, fraction)) == 1
        self.steps = steps
        self.seconds = seconds
        self.fraction = fraction
        self._passed = 0 if since is None or steps is not None else self._boundaries(since)

    def due(self, state: TrainState) -> bool:
        """Return True if a multiple was crossed since the last call. Needs no host sync."""
        if self.steps is not None:
            return state.step % self.steps == 0
        before, self._passed = self._passed, self._boundaries(state)
        return self._passed > before

    def _boundaries(self, state: TrainState) -> int:
        if self.seconds is not None:
            return int(state.elapsed_s / self.seconds)
        return int(state.fraction / (self.fraction or 1.0))
