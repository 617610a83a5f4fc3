"""Checks of the laws of ``laws.md``: what every correct step of several ranks obeys. Each yields what is broken."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from trainwright.doctor.finding import Finding, finding, listed
from trainwright.doctor.ranks.facts import Disagreement, ProgramDifference, RanksFacts, RankStatus
from trainwright.runlog.records import Where


def in_ranks(numbers: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2 and 5 more``."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed([str(each) for each in numbers], 6)}"


def since(differing: Disagreement) -> str:
    """Since when the ranks differ."""
    if differing.agreed < 0:
        return "from the begin" if differing.step == 0 else f"in step {differing.step}, the first that was compared"
    return f"in step {differing.step}; after step {differing.agreed} they were still the same"


def _one(ranks: Sequence[int]) -> Where:
    return Where(rank=ranks[0] if len(ranks) == 1 else None)


def replicas_agree(facts: RanksFacts) -> Iterator[Finding]:
    """Weights, moments, buffers, hyperparameters and the number of micro-batches are the same on every replica."""
    order = ("hyperparameters", "micro_batches", "buffers", "moments", "weights")
    broken = [each for each in facts.disagreements if each.what in order]
    if not broken:
        return
    first = min(broken, key=lambda each: (each.step, order.index(each.what)))
    if facts.writers and first.what in ("moments", "weights"):
        yield _written_to(facts, first)
        return
    names = f" ({listed(first.names)})" if first.names else ""
    at_begin = first.what in ("weights", "buffers") and first.agreed < 0 and first.step == 0
    has_other_gradients = at_begin or first.what == "micro_batches"
    who = f": {in_ranks(first.ranks)} differ from the others" if first.ranks else ""
    yield finding(
        "dist.replicas_diverged",
        "critical",
        max(1, facts.newest),
        symptom=f"the ranks do not have the same {first.what.replace('_', '-')}{names}, {since(first)}{who}",
        cause="each rank made its own weights, and nothing gave all of them those of one"
        if at_begin
        else f"every rank makes the same updates only from the same {first.what.replace('_', '-')}",
        remedy="wrap the model in DistributedDataParallel, or broadcast weights and buffers of rank 0 before training"
        if at_begin
        else "see which finding explains it; then restore all ranks from one checkpoint",
        sure=0.95 if facts.is_wrapped or at_begin else 0.8,
        stage="buffers" if not at_begin else "input",
        since_step=max(1, first.step),
        where=_one(first.ranks),
        evidence=[
            (f"{each.what}: first step that differs", each.step, None if each.agreed < 0 else f"same in {each.agreed}")
            for each in broken
        ],
        explains=("dist.gradients_differ",) if has_other_gradients else (),
    )


def _written_to(facts: RanksFacts, first: Disagreement) -> Finding:
    """The code of one rank has written to its weights outside of an update."""
    ranks = sorted(facts.writers)
    return finding(
        "dist.replicas_diverged",
        "critical",
        max(1, facts.newest),
        symptom=f"the weights of {in_ranks(ranks)} changed after the update of step {facts.writers[ranks[0]]}, and "
        "those of the others did not",
        cause="the code of this rank alone writes to its weights: a checkpoint that is loaded, averaged weights that "
        "are put in their place, a reset",
        remedy="let every rank do the same, or broadcast weights and optimizer state of rank 0 afterwards",
        sure=0.9,
        stage="input",
        since_step=facts.writers[ranks[0]],
        where=_one(ranks),
        evidence=[("parameters that differ", list(first.names), [])],
        explains=("dist.gradients_differ",),
    )


def ranks_do_the_same(facts: RanksFacts) -> Iterator[Finding]:
    """Every replica runs the same program: modes, precision, loss, changes of the gradients."""
    differing = [each for each in facts.programs if each.is_no_chance]
    if not differing:
        return
    first = min(differing, key=lambda each: each.since)
    said = "; ".join(f"rank {rank}: {words}" for rank, words in list(zip(facts.present, first.words))[:4])
    changes = any(each.what == "changes of the gradients" for each in differing)
    yield finding(
        "dist.programs_differ",
        "critical" if changes else "warning",
        max(1, facts.newest),
        symptom=f"the ranks differ in their {first.what}: {said}",
        cause="a branch of the loop depends on the rank, or on what one rank alone has seen or was given",
        remedy="let every rank take the same branch: decide on one rank and broadcast, or decide by numbers that are "
        "the same on all",
        sure=0.9,
        stage="loop",
        since_step=first.since,
        where=Where(rank=_unlike(facts.present, first)),
        evidence=[(each.what, list(each.words[:8])) for each in differing],
        explains=("dist.gradients_differ", "dist.replicas_diverged") if changes else (),
    )


def _unlike(present: Sequence[int], differing: ProgramDifference) -> int | None:
    """The one rank that does not do what most do; of two, the one that has fewer modules in training mode."""
    counts = Counter(differing.words)
    rare = [rank for rank, words in zip(present, differing.words) if counts[words] == 1]
    if len(rare) == 2 and differing.what == "modes":
        rare = [min(zip(present, differing.words), key=lambda each: int(each[1].split()[0]))[0]]
    return rare[0] if len(rare) == 1 else None


def gradients_agree(facts: RanksFacts) -> Iterator[Finding]:
    """At the update every replica has the same gradients: the reduction of those of all."""
    differing = facts.disagreement("gradients")
    if differing is None:
        yield from _same_factor(facts)
        return
    is_late = facts.are_changed_apart
    yield finding(
        "dist.gradients_differ",
        "critical",
        max(1, facts.newest),
        symptom=f"the ranks update with different gradients, {since(differing)}",
        cause="they were the same after the exchange: what changes them before the update (clipping, unscaling, hooks) "
        "is not the same on all ranks"
        if is_late
        else "the gradients of this step were not combined over the ranks",
        remedy="do the same with the gradients on every rank"
        if is_late
        else "call the model through DistributedDataParallel, or all-reduce every gradient and divide by the ranks",
        sure=0.9,
        stage="backward",
        since_step=differing.step,
        where=_one(differing.ranks),
        evidence=[("parameters whose gradients differ", list(differing.names), [])],
        explains=("dist.replicas_diverged",),
    )


def _same_factor(facts: RanksFacts) -> Iterator[Finding]:
    """Of ranks that hold parts of the gradients: what all parts are multiplied by is one number."""
    if facts.factors_since is None:
        return
    numbers = ", ".join(f"{each:.3g}" for each in facts.factors[:8])
    yield finding(
        "dist.gradients_differ",
        "critical",
        max(1, facts.newest),
        symptom=f"each rank multiplies its part of the gradients by another number before the update: {numbers}",
        cause="the norm that clips, or the scale, is that of the part of one rank and not of all parts",
        remedy="use torch.nn.utils.clip_grad_norm_ on the sharded parameters, or sum the squared norms over the ranks",
        sure=0.9,
        stage="backward",
        since_step=facts.factors_since,
        evidence=[("factor by rank", [round(each, 6) for each in facts.factors])],
    )


def data_are_disjoint(facts: RanksFacts) -> Iterator[Finding]:
    """In a step every rank trains on samples of its own."""
    alike = facts.coincidence("samples")
    if alike is None or not alike.is_no_chance:
        return
    yield finding(
        "dist.identical_batches",
        "warning",
        max(1, facts.newest),
        symptom=f"{in_ranks(alike.ranks)} train on the same samples: in {alike.same} of {alike.compared} steps",
        cause="each rank reads the whole dataset in the same order, so the work of all but one is wasted",
        remedy="give the loader a DistributedSampler (and call its set_epoch), or another share to each rank",
        sure=0.9,
        stage="input",
        since_step=alike.since,
        evidence=[("steps with equal batches", alike.same, 0)],
        explains=("dist.same_rng",),
    )


def random_numbers_differ(facts: RanksFacts) -> Iterator[Finding]:
    """Where the model draws random numbers, every rank draws others."""
    alike = facts.coincidence("random numbers")
    if alike is None or not alike.is_no_chance:
        return
    yield finding(
        "dist.same_rng",
        "warning",
        max(1, facts.newest),
        symptom=f"{in_ranks(alike.ranks)} draw the same random numbers in the forward pass (dropout, noise)",
        cause="every rank was seeded with the same number, and draws in step with the others",
        remedy="after the model was made, seed each rank with seed + rank (not under tensor parallelism)",
        sure=0.85,
        stage="forward",
        since_step=alike.since,
        evidence=[("steps with the same state of the generators", alike.same, 0)],
    )


def losses_are_finite_on_every_rank(facts: RanksFacts) -> Iterator[Finding]:
    """What is not finite is so on one rank first, before the reduction brings it to all."""
    for status in facts.guilty_of_nonfinite[:1]:
        found = status.nonfinite
        assert found is not None
        own = f"; others had a finite loss of their own in step {found.step}"
        yield finding(
            "dist.nonfinite_on_rank",
            "critical",
            found.step,
            symptom=f"the loss of rank {status.rank} was {found.own_loss:g} before any exchange{own}",
            cause=f"what rank {status.rank} computed is not finite, and the reduction brings it to all ranks"
            + ("" if found.inputs_finite else ": its inputs are not finite"),
            remedy=f"look at the findings of rank {status.rank} in its own run folder; leave such an update out on "
            "all ranks at once",
            sure=0.95,
            stage="forward" if found.inputs_finite else "input",
            since_step=found.step,
            where=Where(rank=status.rank, sample_ids=found.samples[:64]),
            evidence=[("own loss of the rank", found.own_loss), ("its inputs are finite", found.inputs_finite, True)],
            explains=("num.nonfinite", "dist.replicas_diverged", "dist.gradients_differ"),
        )


def every_rank_arrives(facts: RanksFacts) -> Iterator[Finding]:
    """Every rank comes to every exchange, within the bound that was set."""
    stalled = [each for each in facts.statuses if each.stalled and not each.ended]
    silent = [each for each in facts.statuses if each.silent_s and not each.ended]
    if not stalled and not silent:
        return
    late = silent or _last_of(facts.statuses)
    if not silent and any(each.ended == "finished" for each in facts.statuses):
        return  # they wait for one that has ended, which has a name of its own; or they do what comes after
    numbers = [each.rank for each in late]
    first = late[0] if late else stalled[0]
    waiting = [each.rank for each in stalled if each not in late]
    what = f"nothing was heard of it for {first.silent_s:.0f} s" if silent else f"it stands for {first.still_s:.0f} s"
    where = f" at {first.where}" if first.where else ""
    yield finding(
        "dist.rank_stalled",
        "critical" if silent or any(each.ended for each in facts.statuses) else "warning",
        max(1, first.begun),
        symptom=f"{in_ranks(numbers)} did not arrive: {what}{where}, in step {first.begun} ({first.phase})"
        if late
        else f"no rank goes on: all stand since {first.still_s:.0f} s, in step {first.begun} ({first.phase}){where}",
        cause="the process is gone, or stopped, or its machine is"
        if silent
        else "it does something that the others do not (reads, writes, waits, computes), or hangs"
        if late
        else "the ranks wait for each other in exchanges that do not belong together, or all for something else",
        remedy="see stack-rank-*.txt in the run folder: there each stalled rank has written where it stands",
        sure=0.9 if late else 0.7,
        stage="input",
        where=Where(rank=first.rank if late else None, source=None),
        evidence=[
            ("ranks that wait", waiting, []),
            ("exchanges begun by each rank", [each.collectives for each in facts.statuses]),
        ],
    )


def _last_of(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """The stalled ranks that are behind others; none where all are as far."""
    place = {each.rank: (each.collectives, each.begun) for each in statuses if each.ended != "finished"}
    behind = [each for each in statuses if not each.ended and place[each.rank] < max(place.values())]
    return [each for each in behind if each.stalled]


def ranks_keep_pace(facts: RanksFacts) -> Iterator[Finding]:
    """No rank makes the others wait for a large part of every step."""
    pace = facts.pace
    own_s = dict(zip(facts.present, pace.own_s)) if pace is not None else {}
    if pace is None or not pace.behind or not own_s.keys() > set(pace.behind):
        return
    own = statistics.median(own_s[rank] for rank in pace.behind)
    usual = statistics.median(each for rank, each in own_s.items() if rank not in pace.behind)
    yield finding(
        "perf.straggler",
        "warning",
        max(1, facts.newest),
        symptom=f"all ranks wait for {in_ranks(pace.behind)}{_machine_of(facts, pace.behind)}: by itself it takes "
        f"{1000 * own:.1f} ms a step, others {1000 * usual:.1f} ms",
        cause="its machine, its data or its share of the work is slower",
        remedy="compare its machine and its data loading with those of the others; share the work evenly",
        sure=0.85,
        stage="loop",
        since_step=pace.since,
        where=_one(pace.behind),
        evidence=[
            ("seconds a step by itself, by rank", [round(each, 6) for each in pace.own_s]),
            ("share of a step that others wait", round((own - usual) / pace.step_s, 3), 0),
        ],
    )


def _machine_of(facts: RanksFacts, ranks: Sequence[int]) -> str:
    """The machine, where these are all of its ranks, and there are others."""
    hosts = {each.rank: each.host for each in facts.statuses}
    theirs = {hosts.get(rank, "") for rank in ranks}
    others = {host for rank, host in hosts.items() if rank not in ranks}
    return f" (machine {theirs.pop()})" if len(theirs) == 1 and others and not theirs & (others | {""}) else ""
