"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts


def _all_unused(facts: RanksFacts) -> bool:
    """Whether DistributedDataParallel misses the gradients of the same parameters on every rank, and they have some."""
    lists = {each.unused for each in facts.statuses}
    return len(facts.statuses) > 1 and len(lists) == 1 and lists != {()} and not facts.missing


@check(stage="backward", severity="critical", needs=RanksFacts)
def stale_buckets(run: RunContext) -> Iterator[Result]:
    """Parameters were replaced after DistributedDataParallel was made, and it exchanges the old ones.

    How it is detected: gradients differ between the ranks although the wrapper was called and synchronised; or it
    misses the gradients of the same parameters on every rank.

    Usual cause: `.to()`, `.half()`, a new head or tied weights after wrapping.

    Looks like: ranks.unused_parameters, where one rank alone has no gradients.

    Fix: move, cast and change the model first, then wrap it.

    Sources: pytorch #104336.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    found = differing is not None and exchange is not None and exchange.last_synced and not facts.missing
    found = found and not facts.are_changed_apart
    if not found and not _all_unused(facts):
        return
    yield run.finding(
        max(1, facts.newest),
        symptom="the model is called through DistributedDataParallel, and its gradients are not exchanged",
        cause="parameters were moved or replaced after DistributedDataParallel was made (.to(), .half(), tying): "
        "its hooks and buckets belong to the old ones",
        remedy="move and change the model first, then wrap it",
        sure=0.85,
        stage="backward",
        since_step=differing.step if differing else None,
        evidence=[("gradients differ since step", differing.step if differing else None)],
        explains=("ranks.replicas_diverged", "ranks.gradients_differ", "ranks.unused_parameters"),
    )
