"""See the function."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import in_ranks, one_rank


def _machine_of(facts: RanksFacts, ranks: Sequence[int]) -> str:
    """The machine, where these are all of its ranks, and there are others."""
    hosts = {each.rank: each.host for each in facts.statuses}
    theirs = {hosts.get(rank, "") for rank in ranks}
    others = {host for rank, host in hosts.items() if rank not in ranks}
    return f" (machine {theirs.pop()})" if len(theirs) == 1 and others and not theirs & (others | {""}) else ""


@check(stage="loop", severity="warning", needs=RanksFacts)
def straggler(run: RunContext) -> Iterator[Result]:
    """The same rank takes longest by itself in every compared step, and the others wait for it.

    How it is detected: the time of a step without the backward pass and calls in which ranks wait: 1.5 times that of
    the median rank, a fifth of a step and 5 ms more, in three rows of 4 to 32 steps.

    Usual cause: its machine, its data or its part of the work is slower.

    Fix: compare clocks, temperature, data loading and other programs with those of the others; share the work by
    length.

    Sources: Llama 3, section 3.3.4.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    pace = facts.pace
    own_s = dict(zip(facts.present, pace.own_s)) if pace is not None else {}
    if pace is None or not pace.behind or not own_s.keys() > set(pace.behind):
        return
    own = statistics.median(own_s[rank] for rank in pace.behind)
    usual = statistics.median(each for rank, each in own_s.items() if rank not in pace.behind)
    yield run.finding(
        max(1, facts.newest),
        symptom=f"all ranks wait for {in_ranks(pace.behind)}{_machine_of(facts, pace.behind)}: by itself it takes "
        f"{1000 * own:.1f} ms a step, others {1000 * usual:.1f} ms",
        cause="its machine, its data or its share of the work is slower",
        remedy="compare its machine and its data loading with those of the others; share the work evenly",
        sure=0.85,
        stage="loop",
        since_step=pace.since,
        where=one_rank(pace.behind),
        evidence=[
            ("seconds a step by itself, by rank", [round(each, 6) for each in pace.own_s]),
            ("share of a step that others wait", round((own - usual) / pace.step_s, 3), 0),
        ],
    )
