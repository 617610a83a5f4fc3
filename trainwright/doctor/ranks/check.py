"""Names of the known causes that break the laws; and all checks of the family, pure functions of a Case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, finding, listed
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.ranks import laws
from trainwright.doctor.ranks.facts import RanksFacts
from trainwright.doctor.ranks.laws import in_ranks, since
from trainwright.runlog.records import Where

_DRIFT = ("dist.replicas_diverged", "dist.gradients_differ")


def bypassed(facts: RanksFacts) -> Iterator[Finding]:
    """The wrapped module was called, and not DistributedDataParallel around it."""
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    if differing is None or exchange is None or exchange.wrapped_calls or not facts.is_wrapped:
        return
    yield finding(
        "dist.ddp_bypassed",
        "critical",
        max(1, facts.newest),
        symptom=f"gradients differ between the ranks, {since(differing)}: no forward call went through "
        "DistributedDataParallel",
        cause="the loop calls the module inside (ddp.module(x)), so no gradient is exchanged",
        remedy="call the DistributedDataParallel object itself: ddp(x)",
        sure=0.95,
        stage="forward",
        since_step=differing.step,
        evidence=[("forward calls of the model in that step, through the wrapper", 0, exchange.calls)],
        explains=_DRIFT,
    )


def no_sync_at_the_boundary(facts: RanksFacts) -> Iterator[Finding]:
    """The last micro-batch of a step was inside of no_sync as well."""
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    if differing is None or exchange is None or not exchange.wrapped_calls or exchange.last_synced:
        return
    yield finding(
        "dist.no_sync_at_boundary",
        "critical",
        max(1, facts.newest),
        symptom=f"gradients differ between the ranks, {since(differing)}: the last forward call was inside no_sync()",
        cause="the exchange happens in the backward pass of a forward call outside of no_sync(), and there is none",
        remedy="leave no_sync() for the forward and backward pass of the last micro-batch of each step",
        sure=0.95,
        stage="backward",
        since_step=differing.step,
        evidence=[("forward calls outside of no_sync in that step", exchange.synced_calls, 1)],
        explains=_DRIFT,
    )


def stale_buckets(facts: RanksFacts) -> Iterator[Finding]:
    """DistributedDataParallel was called as it should be, and its hooks are on parameters that are no longer used."""
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    found = differing is not None and exchange is not None and exchange.last_synced and not facts.missing
    found = found and not facts.are_changed_apart
    if not found and not _all_unused(facts):
        return
    yield finding(
        "dist.stale_buckets",
        "critical",
        max(1, facts.newest),
        symptom="the model is called through DistributedDataParallel, and its gradients are not exchanged",
        cause="parameters were moved or replaced after DistributedDataParallel was made (.to(), .half(), tying): "
        "its hooks and buckets belong to the old ones",
        remedy="move and change the model first, then wrap it",
        sure=0.85,
        stage="backward",
        since_step=differing.step if differing else None,
        evidence=[("gradients differ since step", differing.step if differing else None)],
        explains=(*_DRIFT, "dist.unused_params"),
    )


def _all_unused(facts: RanksFacts) -> bool:
    """Whether DistributedDataParallel misses the gradients of the same parameters on every rank, and they have some."""
    lists = {each.unused for each in facts.statuses}
    return len(facts.statuses) > 1 and len(lists) == 1 and lists != {()} and not facts.missing


def unused_parameters(facts: RanksFacts) -> Iterator[Finding]:
    """Parameters took part in the loss on some ranks alone."""
    guilty = [(each.rank, each.unused) for each in facts.statuses if each.unused]
    if not guilty and facts.missing and facts.missing_on is not None:
        guilty = [(facts.missing_on, facts.missing)]
    if not guilty:
        return
    rank, names = guilty[0]
    yield finding(
        "dist.unused_params",
        "critical",
        max(1, facts.newest),
        symptom=f"on rank {rank} {len(names)} parameters have no gradient: {listed(names)}",
        cause="the loss of this rank does not depend on them, so their exchange never begins, and the others wait",
        remedy="use them on every rank (add 0 * output.sum() to the loss), or DistributedDataParallel("
        "find_unused_parameters=True)",
        sure=0.95,
        stage="backward",
        where=Where(rank=rank, module=names[0].rpartition(".")[0]),
        evidence=[("parameters without a gradient", list(names[:16]), [])],
        explains=(*_DRIFT, "dist.rank_stalled", "dist.uneven_steps"),
    )


def uneven_steps(facts: RanksFacts) -> Iterator[Finding]:
    """A rank ended its loop while another was in a further step."""
    for early in facts.ended_early[:1]:
        longest = max(each.begun for each in facts.statuses)
        yield finding(
            "dist.uneven_steps",
            "critical",
            max(1, longest),
            symptom=f"rank {early.rank} ended after {early.step} steps, and others wait for it in step {longest}",
            cause="it had fewer batches than the others",
            remedy="give every rank as many batches (drop_last=True, a DistributedSampler), or train inside of "
            "torch.distributed.algorithms.Join",
            sure=0.95,
            stage="input",
            since_step=longest,
            where=Where(rank=early.rank),
            evidence=[("steps by rank", [each.step for each in facts.statuses])],
            explains=("dist.rank_stalled", *_DRIFT),
        )


def sum_not_mean(facts: RanksFacts) -> Iterator[Finding]:
    """Gradients are summed over the ranks, of losses that are means, and never divided by their number."""
    if facts.summed_since is None:
        return
    yield finding(
        "dist.sum_not_mean",
        "warning",
        max(1, facts.newest),
        symptom=f"the gradients are sums over {facts.size} ranks, of losses that are means over a batch",
        cause=f"all_reduce adds up, and nothing divides by {facts.size}: the step is {facts.size} times as long",
        remedy="divide each gradient by the number of ranks, or use ReduceOp.AVG",
        sure=0.9,
        stage="backward",
        since_step=facts.summed_since,
        evidence=[("gradient at the update / result of the all_reduce", 1.0, 1.0 / facts.size)],
    )


def averaged_twice(facts: RanksFacts) -> Iterator[Finding]:
    """Losses are divided by the number of ranks, and the exchange takes the mean once more."""
    if facts.shrunk_since is None:
        return
    yield finding(
        "dist.averaged_twice",
        "warning",
        max(1, facts.newest),
        symptom=f"the loss is divided by {facts.size}, and DistributedDataParallel divides by {facts.size} again",
        cause=f"it takes the mean of the gradients by itself: the step is {facts.size} times too short",
        remedy="leave the division by the number of ranks out of the loss",
        sure=0.8,
        stage="backward",
        since_step=facts.shrunk_since,
        evidence=[("gradient at the update / mean over the ranks", 1.0 / facts.size, 1.0)],
    )


def silent_corruption(facts: RanksFacts) -> Iterator[Finding]:
    """The weights of one rank changed without an update, or came out otherwise from the same gradients."""
    differing = facts.disagreement("weights")
    changed = [(each.rank, change) for each in facts.statuses for change in each.changes]
    ranks = {rank for rank, _ in changed}
    alone = changed if len(ranks) == 1 and len(facts.statuses) > 1 else []
    if differing is None or differing.agreed < 0 or facts.writers:
        return
    gradients = facts.disagreement("gradients")
    if gradients is not None and gradients.step <= differing.step:
        return
    if facts.disagreement("hyperparameters") is not None or facts.disagreement("micro_batches") is not None:
        return
    guilty = [alone[0][0]] if alone else list(differing.ranks)
    is_flip = differing.one_bit or any(change.one_bit for _, change in alone)
    moments = facts.disagreement("moments")
    has_other_moments = not alone and moments is not None and moments.step <= differing.step
    if has_other_moments or not (guilty or is_flip):
        return
    at = alone[0][1] if alone else None
    name = at.parameter if at else next(iter(differing.names), "a weight")
    yield finding(
        "hw.silent_corruption",
        "critical",
        max(1, facts.newest),
        symptom=f"{name} of {in_ranks(guilty) if guilty else 'a rank'} changed by itself"
        + (f" after the update of step {at.step}" if at else f" between steps {differing.agreed} and {differing.step}")
        + (", by one bit" if is_flip else ""),
        cause="all ranks made the same updates from the same gradients: a memory or a processor has changed a number"
        if is_flip
        else "all ranks made the same updates from the same gradients: the machine computes wrongly, or the code of "
        "this rank writes to its weights",
        remedy="take weights and optimizer state of another rank or the last checkpoint; test that machine and its GPU "
        "(dcgmi diag -r 3), and leave it out",
        sure=0.95 if is_flip else 0.6,
        stage="update",
        since_step=at.step if at else differing.step,
        where=Where(rank=guilty[0] if len(guilty) == 1 else None, module=name.rpartition(".")[0]),
        evidence=[("one bit differs", is_flip, False)],
        explains=_DRIFT,
    )


def _over_facts(rule: Callable[[RanksFacts], Iterator[Finding]]) -> OldCheck:
    """Makes a check of a rule about the newest facts."""

    def check(case: Case) -> Iterator[Finding | ExperimentRequest]:
        facts = case.newest(RanksFacts)
        if facts is not None:
            yield from rule(facts)

    check.__name__ = rule.__name__
    return check


def _law(rule: Callable[[RanksFacts], Iterator[Finding]]) -> Law:
    """Makes a law of a rule about the newest facts, which yields what breaks it."""

    def judge(case: Case) -> Iterator[Verdict]:
        facts = case.newest(RanksFacts)
        if facts is None:
            yield NotApplicable("one process")
            return
        broken: list[Verdict] = [*rule(facts)]
        yield from broken or [Holds(f"{len(facts.present)} ranks, up to step {max(0, facts.newest)}")]

    return Law(f"ranks.{rule.__name__}", judge)


LAWS: tuple[Law, ...] = (
    _law(laws.replicas_agree),
    _law(laws.gradients_agree),
    _law(laws.ranks_do_the_same),
    _law(laws.data_are_disjoint),
    _law(laws.random_numbers_differ),
    _law(laws.losses_are_finite_on_every_rank),
    _law(laws.every_rank_arrives),
    _law(laws.ranks_keep_pace),
)
NAMES: tuple[OldCheck, ...] = (
    _over_facts(bypassed),
    _over_facts(no_sync_at_the_boundary),
    _over_facts(stale_buckets),
    _over_facts(unused_parameters),
    _over_facts(uneven_steps),
    _over_facts(sum_not_mean),
    _over_facts(averaged_twice),
    _over_facts(silent_corruption),
)
