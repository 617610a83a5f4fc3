"""Does a dry run of the first batch in each precision and number of threads that the recipe leaves open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import World
from trainwright.distributed.group import from_first_rank
from trainwright.distributed.memory import rlimits
from trainwright.engine.dry_run import DryRun, Mode, dry_run
from trainwright.engine.loss import Loss
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.plan.make import RunFacts, candidates, choose_mode


def try_batch(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    precision_of: Callable[[PrecisionName], Precision],
    facts: RunFacts,
    asked: str | None,
    world: World,
) -> DryRun:
    """Run ``batch`` in each candidate mode (precision and number of threads) and return the measurements.

    Precisions are compared with one thread each. Numbers of threads are compared in the first precision. The chosen
    combination is then timed as well. If several ranks compute together (``world``), the first rank chooses the modes.

    Args:
        state: The state of the run. It is unchanged afterwards.
        batch: The batch of one step.
        loss: The loss function.
        precision_of: Makes the precision of a name on the device of this rank.
        facts: Facts about model, data and machine that the plan is made from.
        asked: The precision in the recipe; None if it is not set.
        world: The ranks that compute together.
    """
    names = candidates(asked, facts.device, facts.low_precision)
    if rlimits():  # oneDNN compiles bf16 code for each shape and kills the process if it cannot allocate memory for it
        names = names[:1]
    tried = [(names[0], count) for count in facts.threads]
    tried += [(name, 1) for name in (names if len(names) > 1 else ()) if (name, 1) not in tried]

    def run(modes: list[tuple[PrecisionName, int]]) -> DryRun:
        made = [Mode(precision_of(name), count) for name, count in modes]
        return dry_run(state, batch, loss, modes=made, world=world)

    seen = run(from_first_rank(world, tried))
    chosen = from_first_rank(world, choose_mode(asked, facts, seen.seconds, seen.thread_s))
    if chosen in seen.seconds:
        return seen
    return replace(seen, seconds={**seen.seconds, **run([chosen]).seconds})
