"""Saves a state that is divided among ranks: the first rank decides when, and writes the parts of all."""

from __future__ import annotations

from trainwright.checkpoint.checkpoint import take_part
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.periodic import NEVER, Saver


class SavingTogether:
    """A Saver for each rank. ``first`` is the Saver of the first rank, which writes; the others have none.

    ``stages`` are the pipeline stages of the first rank, if this rank has one of them.

    There is no save after an exception, because ranks without the exception would not take part.
    """

    def __init__(self, world: World, first: Saver = NEVER, stages: World = SOLO) -> None:
        self._world = world
        self._first = first
        self._stages = stages
        self._saved = -1, False

    def due(self, state: TrainState) -> bool:
        """Return True if a save is due. Costs an exchange of eight bytes."""
        mine = self._first.due(state)
        return self._world.least(int(not mine)) == 0

    def __call__(self, state: TrainState) -> None:
        if self._saved == (state.step, state.ema.is_complete):
            return
        self._saved = state.step, state.ema.is_complete
        if self._world.rank == 0:
            self._first(state)
        else:
            take_part(state, self._stages)

    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None:
        self._first.__exit__(*error)
