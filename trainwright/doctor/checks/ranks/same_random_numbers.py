"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import in_ranks


@check(stage="forward", severity="warning", needs=RanksFacts)
def same_random_numbers(run: RunContext) -> Iterator[Result]:
    """The ranks draw the same random numbers in their forward passes, so dropout and noise average out less.

    How it is detected: the forward pass draws, and the generators are in the same state before it, in two compared
    steps and in half of all.

    Exceptions: ranks that hold parts of the model, or divide the same samples among them.

    Usual cause: every rank was seeded with the same number.

    Fix: `torch.manual_seed(seed + rank)` after the model was made; seed NumPy and the workers in the same way.

    Sources: VeOmni #143.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    alike = facts.coincidence("random numbers")
    if alike is None or not alike.is_no_chance:
        return
    yield run.finding(
        max(1, facts.newest),
        symptom=f"{in_ranks(alike.ranks)} draw the same random numbers in the forward pass (dropout, noise)",
        cause="every rank was seeded with the same number, and draws in step with the others",
        remedy="after the model was made, seed each rank with seed + rank (not under tensor parallelism)",
        sure=0.85,
        stage="forward",
        since_step=alike.since,
        evidence=[("steps with the same state of the generators", alike.same, 0)],
    )
