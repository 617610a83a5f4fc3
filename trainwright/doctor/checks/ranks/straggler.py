import statistics

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.ranks import RanksFacts, in_ranks, one_rank


@check(stage="loop", confidence=0.85)
def straggler(run: RunContext, facts: RanksFacts) -> Results:
    """One rank is slower than the others in every compared step, and they wait for it.

    How it is detected: the step time of a rank is measured without the backward pass and without calls in which ranks
    wait. In three consecutive windows of 4 to 16 steps, it is at least 1.5 times that of the median rank, and longer by
    at least 5 ms and a fifth of a step.

    Usual cause: its machine, its data or its part of the work is slower.

    Fix: compare clock rates, temperature, data loading and other processes with those of the other ranks; divide the
    work by sequence length.

    Sources: Llama 3, section 3.3.4.
    """
    pace, own_s = facts.pace, dict(zip(facts.present, facts.pace.own_s)) if facts.pace else {}
    if pace is None or not pace.behind or not own_s.keys() > set(pace.behind):
        return
    own = statistics.median(own_s[rank] for rank in pace.behind)
    usual = statistics.median(each for rank, each in own_s.items() if rank not in pace.behind)
    hosts = {each.rank: each.host for each in facts.statuses}
    theirs, others = ({hosts.get(r, "") for r in own_s if (r in pace.behind) is slow} for slow in (True, False))
    machine = f" (machine {theirs.pop()})" if len(theirs) == 1 and not theirs & (others | {""}) else ""
    yield run.finding(
        max(1, facts.newest),
        symptom=f"all ranks wait for {in_ranks(pace.behind)}{machine}: its own work takes {1000 * own:.1f} ms a "
        f"step, that of others {1000 * usual:.1f} ms",
        since_step=pace.since,
        where=one_rank(pace.behind),
        evidence=[
            ("seconds a step without waiting, by rank", [round(each, 6) for each in pace.own_s]),
            ("fraction of a step that others wait", round((own - usual) / pace.step_s, 3), 0),
        ],
    )
