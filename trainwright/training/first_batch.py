"""Tries the first batch in each precision that a recipe leaves open, and times the one that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import World
from trainwright.distributed.memory import rlimits
from trainwright.engine.dry_run import DryRun, Mode, dry_run
from trainwright.engine.loss import Loss
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.plan.make import RunFacts, candidates, choose_mode
from trainwright.training.alike import first_of


def try_batch(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    precision_of: Callable[[PrecisionName], Precision],
    facts: RunFacts,
    asked: str | None,
    world: World,
) -> DryRun:
    """Runs ``batch`` in each mode that the run may have. ``asked`` is the precision of the recipe.

    Precisions are compared by one thread each, numbers of threads in the first precision, and the mode that is chosen
    is timed as well. Of ranks that compute together (``world``) the first one chooses the modes.
    """
    names = candidates(asked, facts.device, facts.low_precision)
    if rlimits():  # oneDNN compiles bf16 code for each shape; where it gets no memory for that, the process dies
        names = names[:1]
    tried = [(names[0], count) for count in facts.threads]
    tried += [(name, 1) for name in (names if len(names) > 1 else ()) if (name, 1) not in tried]

    def run(modes: list[tuple[PrecisionName, int]]) -> DryRun:
        made = [Mode(precision_of(name), count) for name, count in modes]
        return dry_run(state, batch, loss, modes=made, world=world)

    seen = run(first_of(world, tried))
    chosen = first_of(world, choose_mode(asked, facts, seen.seconds, seen.thread_s))
    if chosen in seen.seconds:
        return seen
    return replace(seen, seconds={**seen.seconds, **run([chosen]).seconds})
