"""The laws of ``laws.md``, judged by the newest facts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding, listed
from trainwright.doctor.law import Holds, Judge, Law, NotApplicable, Verdict
from trainwright.doctor.resume.facts import LoadFacts, MomentsFacts, ResumeFacts, ScheduleFacts

ABOVE, BELOW = 2.0, -4.0
"""log10 of squared gradient over second moment: see ``laws.md``."""
LEAST_UPDATES = 8
"""Updates after which it is known whether a schedule is stepped once an update."""


def counts_agree(facts: ResumeFacts) -> Iterator[Finding]:
    """Moments and schedule have seen the same updates."""
    for optimizer in facts.optimizers:
        for schedule in facts.schedules:
            if _counts_updates(schedule) and (found := _apart(optimizer, schedule)) is not None:
                yield found


def _counts_updates(schedule: ScheduleFacts) -> bool:
    return schedule.updates >= LEAST_UPDATES and abs(schedule.calls - schedule.updates) <= 1


def _apart(optimizer: MomentsFacts, schedule: ScheduleFacts) -> Finding | None:
    begins_anew = optimizer.most_steps > 1 and schedule.before <= 1
    lost_moments = schedule.before > 1 and not optimizer.with_state and optimizer.kind != "SGD"
    if not begins_anew and not lost_moments:
        return None
    moments = f"{optimizer.kind} has moments of {optimizer.most_steps} updates"
    return finding(
        "law.resume.counts_agree",
        "warning",
        1,
        symptom=f"{moments}, and its schedule has seen none: it begins anew"
        if begins_anew
        else f"the schedule has seen {schedule.before} updates, and {optimizer.kind} has no moments",
        cause="the state of the one was loaded and that of the other was not",
        remedy="save and load optimizer.state_dict() and scheduler.state_dict() together, after both are made",
        sure=0.8,
        stage="update",
        since_step=1,
        evidence=[("updates that the schedule has seen", schedule.before, optimizer.most_steps)],
    )


def moments_belong_to_weights(facts: ResumeFacts) -> Iterator[Finding]:
    """Moments have the shape of their weight and the size of its gradient."""
    for optimizer in facts.optimizers:
        middle = statistics.median(optimizer.fits) if optimizer.fits else 0.0
        is_misshapen = bool(optimizer.misshapen)
        if not is_misshapen and BELOW <= middle <= ABOVE:
            continue
        yield finding(
            "law.resume.moments_belong_to_weights",
            "critical" if is_misshapen else "warning",
            1,
            symptom=f"moments of {listed(optimizer.misshapen)} have another shape than the weight"
            if is_misshapen
            else f"squared gradients are 10^{middle:+.1f} times the second moments that {optimizer.kind} goes on with",
            cause="the state that was loaded is of parameters in another order, or of another model"
            if is_misshapen
            else "the state that was loaded is of another model, or the loss has another scale than when it was saved",
            remedy="make the model and the parameter groups as they were when the state was saved, then load it",
            sure=0.95 if is_misshapen else 0.75,
            stage="update",
            since_step=1,
            evidence=[
                ("log10 of squared gradient over second moment, median", round(middle, 2), f"{BELOW} to {ABOVE}")
            ],
        )


def what_is_loaded_has_a_place(facts: ResumeFacts) -> Iterator[Finding]:
    """No tensor of a loaded state is left out because of its name."""
    for load in facts.loads:
        if load.prefix is None and 2 * len(load.missing) < load.tensors:
            continue
        yield finding(
            "law.resume.what_is_loaded_has_a_place",
            "critical" if len(load.missing) == load.tensors else "warning",
            max(1, load.step),
            symptom=f"{len(load.missing)} of {load.tensors} tensors of the model were not in the state that was loaded"
            + (f", and {len(load.unexpected)} of the state had no place" if load.unexpected else ""),
            cause=_why(load),
            remedy=f"add or take off {load.prefix!r} in the names" if load.prefix else "load with strict=True",
            sure=0.95 if load.prefix is not None else 0.8,
            stage="input",
            since_step=max(1, load.step),
            evidence=[("missing", list(load.missing[:4])), ("without a place", list(load.unexpected[:4]))],
        )


def _why(load: LoadFacts) -> str:
    if load.prefix is not None:
        return f"the names differ by {load.prefix!r}, and strict=False hides it: these weights stay as they were"
    return "the state is of another model, and strict=False hides it: these weights stay as they were"


def _judge(rule: Callable[[ResumeFacts], Iterator[Finding]], subject: Callable[[ResumeFacts], str]) -> Judge:
    """Judges the newest facts by ``rule``; ``subject`` says of what it speaks, "" where that is nothing."""

    def judge(case: Case) -> Iterator[Verdict]:
        facts = case.newest(ResumeFacts)
        if facts is None:
            return
        broken: list[Verdict] = [*rule(facts)]
        about = subject(facts)
        yield from broken or [Holds(about) if about else NotApplicable("nothing was loaded, as far as was seen")]

    return judge


def _counters(facts: ResumeFacts) -> str:
    compared = [each for each in facts.schedules if _counts_updates(each)]
    return f"{len(compared)} schedules beside {len(facts.optimizers)} optimizers" if compared else ""


def _moments(facts: ResumeFacts) -> str:
    steps = max((each.most_steps for each in facts.optimizers), default=0)
    return f"moments of {steps} updates" if steps else ""


def _loads(facts: ResumeFacts) -> str:
    return f"{len(facts.loads)} states that were loaded" if facts.loads else ""


LAWS: tuple[Law, ...] = (
    Law("resume.counts_agree", _judge(counts_agree, _counters)),
    Law("resume.moments_belong_to_weights", _judge(moments_belong_to_weights, _moments)),
    Law(
        "resume.what_is_loaded_has_a_place",
        _judge(what_is_loaded_has_a_place, _loads),
        named_by=("checkpoint.loaded_weights_overwritten",),
    ),
)
