"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import ranks_of


@check(
    stage="backward",
    severity="critical",
    confidence=0.85,
    needs=RanksFacts,
    explains=("ranks.replicas_diverged", "ranks.gradients_differ", "ranks.unused_parameters"),
)
def stale_buckets(run: RunContext) -> Iterator[Result]:
    """Parameters were replaced after DistributedDataParallel was made, and it exchanges the old ones.

    How it is detected: gradients differ between the ranks although the wrapper was called and synchronised; or it
    misses the gradients of the same parameters on every rank.

    Usual cause: `.to()`, `.half()`, a new head or tied weights after wrapping.

    Looks like: ranks.unused_parameters, where one rank alone has no gradients.

    Fix: move, cast and change the model first, then wrap it.

    Sources: pytorch/pytorch #104336.
    """
    facts = ranks_of(run)
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    unused = {each.unused for each in facts.statuses}
    misses_same = len(facts.statuses) > 1 and len(unused) == 1 and unused != {()} and not facts.missing
    not_exchanged = differing is not None and exchange is not None and exchange.last_synced and not facts.missing
    if misses_same or (not_exchanged and not facts.are_changed_apart):
        yield run.finding(
            max(1, facts.newest),
            symptom="the model is called through DistributedDataParallel, and its gradients are not exchanged",
            since_step=differing.step if differing else None,
            evidence=[("gradients differ since step", differing.step if differing else None)],
        )
