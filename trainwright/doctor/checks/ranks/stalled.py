"""See the function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts, RankStatus
from trainwright.doctor.shared_ranks import in_ranks
from trainwright.runlog.records import Where


def _last_of(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """The stalled ranks that are behind others; none where all are as far."""
    place = {each.rank: (each.collectives, each.begun) for each in statuses if each.ended != "finished"}
    behind = [each for each in statuses if not each.ended and place[each.rank] < max(place.values())]
    return [each for each in behind if each.stalled]


@check(stage="input", severity="warning", needs=RanksFacts)
def stalled(run: RunContext) -> Iterator[Result]:
    """A rank makes no progress, or is not heard of, and the others wait for it.

    How it is detected: each rank reports every second; one stands for longer than `patience_s`, or is silent for 15 s.
    It is a warning while the process lives.

    Usual cause: it does something that the others do not (reads, evaluates, saves), hangs, or its process is gone.

    Looks like: ranks.uneven_steps, where its loop is over.

    Fix: read `stack-rank-*.txt` in the run folder; do long work on one rank outside of the loop, or raise the timeout
    of the process group.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
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
    yield run.finding(
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
        severity="critical" if silent or any(each.ended for each in facts.statuses) else None,
        sure=0.9 if late else 0.7,
        stage="input",
        where=Where(rank=first.rank if late else None, source=None),
        evidence=[
            ("ranks that wait", waiting, []),
            ("exchanges begun by each rank", [each.collectives for each in facts.statuses]),
        ],
    )
