from collections import Counter
from collections.abc import Sequence

from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import ProgramDifference, RanksFacts


@check(stage="loop")
def programs_differ(run: RunContext, facts: RanksFacts) -> Results:
    """The ranks do not run the same program: modes, precision, loss or operations on the gradients differ.

    How it is detected: each rank describes its modes, precision, loss and operations on the gradients as text. The
    texts differ in at least two compared steps.

    Exceptions: models that are divided among the ranks (pipeline stages).

    Usual cause: a branch of the loop depends on the rank: `if rank == 0: evaluate()` leaves the model in eval mode.

    Fix: let every rank take the same branch: decide on rank 0 and use `dist.broadcast`, or use values that are the same
    on all ranks.
    """
    differing = [each for each in facts.programs if each.is_no_chance]
    if not differing:
        return
    first = min(differing, key=lambda each: each.since)
    said = "; ".join(f"rank {rank}: {words}" for rank, words in list(zip(facts.present, first.words))[:4])
    changes = any(each.what == "changes of the gradients" for each in differing)
    yield run.finding(
        max(1, facts.newest),
        symptom=f"the ranks differ in their {first.what}: {said}",
        severity="critical" if changes else None,
        since_step=first.since,
        where=Where(rank=_unlike(facts.present, first)),
        evidence=[(each.what, list(each.words[:8])) for each in differing],
        explains=("ranks.gradients_differ", "ranks.replicas_diverged") if changes else (),
    )


def _unlike(present: Sequence[int], differing: ProgramDifference) -> int | None:
    """Returns the one rank that differs from the majority; of two ranks, that with fewer modules in train mode."""
    counts = Counter(differing.words)
    rare = [rank for rank, words in zip(present, differing.words) if counts[words] == 1]
    if len(rare) == 2 and differing.what == "modes":
        rare = [min(zip(present, differing.words), key=lambda each: int(each[1].split()[0]))[0]]
    return rare[0] if len(rare) == 1 else None
