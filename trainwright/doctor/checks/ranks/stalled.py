from collections.abc import Sequence

from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import RanksFacts, RankStatus, in_ranks


@check(stage="input")
def stalled(run: RunContext, facts: RanksFacts) -> Results:
    """A rank hangs or does not report, and the others wait for it.

    How it is detected: each rank reports many times a second. One makes no progress for longer than `patience_s` (60 s
    by default), or sends no report for 15 s. The finding is critical if it sends none or a process has ended, else a
    warning. If torch's flight recorder is on (`TORCH_FR_BUFFER_SIZE=2000`, the default of
    `trainwright train RECIPE -- ...`), the finding contains the last collective of each rank, and the first one in
    which the ranks differ. With NCCL, it contains the missing ranks and the different counts of collectives that NCCL's
    RAS service reports.

    Usual cause: that rank does something that the others do not (reads, evaluates, saves), hangs, or has ended.

    Looks like: ranks.uneven_steps, where the loop of that rank has ended.

    Fix: read `stack-rank-*.txt` in the run folder. Do long work on one rank outside of the loop, or raise the timeout:
    `init_process_group(timeout=timedelta(hours=1))`.
    """
    statuses = facts.statuses
    still = [each for each in statuses if each.stalled and not each.ended]
    silent = [each for each in statuses if each.silent_s and not each.ended]
    if not silent and (not still or any(each.ended == "finished" for each in statuses)):
        return  # no rank waits, or they wait for one that has ended: ranks.uneven_steps
    late = silent or _last_of(statuses)
    first = late[0] if late else still[0]
    place = f"in step {first.begun} ({first.phase}){f' at {first.where}' if first.where else ''}"
    if silent:
        symptom = f"{in_ranks([each.rank for each in late])} did not report for {first.silent_s:.0f} s, {place}"
    elif late:
        symptom = f"{in_ranks([each.rank for each in late])} made no progress for {first.still_s:.0f} s, {place}"
    else:
        symptom = f"no rank made progress for {first.still_s:.0f} s, {place}"
    reported = [line for each in statuses for line in each.nccl]
    started = {f"rank {each.rank}": each.recorded[-1].what for each in still if each.recorded}
    disputed = _disputed(still)
    yield run.finding(
        max(1, first.begun),
        symptom=symptom,
        cause="" if late else "the ranks wait in collectives that do not match, or all wait for something else",
        severity="critical" if silent or any(each.ended for each in statuses) else None,
        sure=0.9 if late else 0.7,
        where=Where(rank=first.rank if late else None),
        evidence=[
            ("ranks that wait", [each.rank for each in still if each not in late], []),
            ("collectives begun by each rank", [each.collectives for each in statuses]),
            *([("last collective of each stalled rank", started)] if started else []),
            *([("collective in which the ranks differ", disputed, {})] if disputed else []),
            *([("report of NCCL (RAS)", reported, [])] if reported else []),
        ],
    )


_DIFFERENT_SHAPES = ("all_to_all", "alltoall", "scatter", "gather")
"""Collectives whose inputs may have other shapes on each rank."""


def _disputed(statuses: Sequence[RankStatus]) -> dict[str, str]:
    """Returns what each rank has called instead of the first collective that has not completed on a rank of its group.

    Returns {} if all ranks of the group have called the same, or have not recorded it.
    """
    pending = sorted((x.group, x.number) for s in statuses for x in s.recorded if not x.is_done and x.number)
    for group, number in pending:
        called: dict[str, str] = {}
        for each in statuses:
            numbers = {x.number: x.what for x in each.recorded if x.group == group}
            if number in numbers:
                called[f"rank {each.rank}"] = numbers[number]
            elif numbers and max(numbers) < number:
                called[f"rank {each.rank}"] = "not begun"
        kinds = {name if (name := what.split()[0]).startswith(_DIFFERENT_SHAPES) else what for what in called.values()}
        if len(kinds) > 1:
            return {"collective": f"{number} of {group}", **called}
    return {}


def _last_of(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Returns the stalled ranks that are behind others; none if all are equally far."""
    place = {each.rank: (each.collectives, each.begun) for each in statuses if each.ended != "finished"}
    furthest = max(place.values(), default=(0, 0))
    return [each for each in statuses if each.stalled and not each.ended and place[each.rank] < furthest]
