"""Judges of the laws of ``laws.md``: pure functions of a Case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.call_lines import calls_at
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding, listed
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.program.discarded import dropped_by_all
from trainwright.doctor.program.facts import (
    EvaluatedCopy,
    KeptFacts,
    NamesFacts,
    ObjectsFacts,
    RateFacts,
    RatesFacts,
    WarningsFacts,
)
from trainwright.doctor.program.grammar import LETTERS, RULES, Rule, spelled, word
from trainwright.doctor.program.warned import meaning_of
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Watched, Where

TWICE = 2
"""How often a call must come out of order: once may be a way to begin."""


def calls_come_in_order(case: Case) -> Iterator[Verdict]:
    """Every step is a word of the grammar."""
    steps = [each for each in case.watched if "closure" not in str(each.values.get("blind", ""))]
    numbers = sorted({v["optimizer"] for each in steps for k, v in each.events if k == "step" and isinstance(v, dict)})
    if len(steps) < TWICE or not numbers:
        return
    for number in numbers:
        words = [(step, word(step, number)) for step in steps]
        for rule in RULES:
            if rule.alone and len(numbers) > 1:
                continue
            wrong = [(step, letters) for step, letters in words if rule.wrong.search(letters)]
            is_usual = 2 * sum(rule.needs in letters for _, letters in words) >= len(words) - len(wrong)
            if len(wrong) >= TWICE and is_usual and any(rule.needs in letters for _, letters in words):
                yield _out_of_order(case, rule, wrong, len(words))
                return
        if (kept := _kept_gradients(case, words)) is not None:
            yield kept
            return
    if (dropped := dropped_by_all(case, steps, numbers)) is not None:
        yield dropped
        return
    yield Holds(f"{len(steps)} steps: {spelled(word(steps[-1], numbers[-1]))}")


def _out_of_order(case: Case, rule: Rule, wrong: Sequence[tuple[Watched, str]], steps: int) -> Finding:
    last, letters = wrong[-1]
    return finding(
        "law.program.calls_come_in_order",
        rule.severity,
        last.step,
        symptom=rule.symptom,
        cause=rule.cause,
        remedy=rule.remedy,
        sure=0.9,
        stage=rule.stage,
        since_step=wrong[0][0].step,
        where=Where(source=_line_in(case, last.step, rule, letters)),
        evidence=[
            ("calls of such a step", spelled(letters)),
            ("recorded steps like this", len(wrong), f"0 of {steps}"),
        ],
    )


def _line_in(case: Case, step: int, rule: Rule, letters: str) -> str | None:
    """The line of the call that breaks the rule: of several of its kind the last one in the part that is wrong."""
    match, letter = rule.wrong.search(letters), LETTERS[rule.call]
    lines = [line for kind, line in calls_at(case, step) if kind == rule.call]
    if match is None or len(lines) != letters.count(letter):
        return _line_of(case, step, rule.call)
    return lines[letters[: match.end()].count(letter) - 1]


def _kept_gradients(case: Case, words: Sequence[tuple[Watched, str]]) -> Finding | None:
    """Some steps begin with zero_grad(), others with the gradients that the update before them has used."""
    dropped = [step for step, letters in words if "z" in letters]
    kept = [(step, letters) for step, letters in words[1:] if "z" not in letters and _carries(step)]
    if not dropped or len(kept) < TWICE or not all("s" in letters for _, letters in kept):
        return None
    last, letters = kept[-1]
    return finding(
        "law.program.calls_come_in_order",
        "warning",
        last.step,
        symptom="some updates are made with gradients that the update before them has used already",
        cause="zero_grad() is called in some steps and step() in all",
        remedy="call step() and zero_grad() equally often: both after each window of micro-batches, or in every step",
        sure=0.85,
        stage="backward",
        since_step=kept[0][0].step,
        where=Where(source=_line_of(case, dropped[-1].step, "zero_grad")),
        evidence=[
            ("calls of such a step", spelled(letters)),
            ("steps with zero_grad(), and without", [len(dropped), len(kept)]),
        ],
    )


def _carries(step: Watched) -> bool:
    """Whether gradients were there before the first backward pass of the step."""
    first = next((value for kind, value in step.events if kind == "backward"), None)
    return isinstance(first, dict) and bool(first.get("carried"))


def _line_of(case: Case, step: int, kind: str) -> str | None:
    lines = {line for each, line in calls_at(case, step) if each == kind}
    return lines.pop() if len(lines) == 1 else None


def objects_belong_together(case: Case) -> Iterator[Verdict]:
    """Scheduler, scaler and evaluated model are those of the optimizer that steps and of the model that it trains."""
    facts = case.newest(ObjectsFacts)
    if facts is None:
        return
    broken: list[Verdict] = [*_strays(case, facts), *_scaling(case, facts), *_stale_copies(case, facts)]
    yield from broken[:1] or [Holds(f"{facts.steps} steps")]


def _strays(case: Case, facts: ObjectsFacts) -> Iterator[Finding]:
    for stray in facts.stray_schedulers:
        yield finding(
            "law.program.objects_belong_together",
            "warning",
            case.last_step,
            symptom=f"{stray.kind} was stepped {stray.calls} times, and the optimizer that it was made for never",
            cause="the scheduler was made with another optimizer than the one that updates the weights"
            + (": an earlier one, of the same parameters" if stray.shares else ""),
            remedy="make the scheduler with the optimizer that steps",
            sure=0.95 if stray.shares else 0.8,
            since_step=stray.since,
            where=Where(source=_line_of(case, case.last_step, "schedule")),
            evidence=[("steps of the scheduler's optimizer", 0, facts.steps)],
        )


def _scaling(case: Case, facts: ObjectsFacts) -> Iterator[Finding]:
    if facts.scaled_updates >= TWICE:
        yield finding(
            "law.program.objects_belong_together",
            "critical",
            case.last_step,
            symptom=f"{facts.scaled_updates} updates were made with the loss scale still in the gradients",
            cause="the loss goes through scaler.scale(), and optimizer.step() is called without the scaler",
            remedy="scaler.step(optimizer), or scaler.unscale_(optimizer) before optimizer.step()",
            sure=0.95,
            stage="update",
            since_step=facts.scaled_since,
            where=Where(source=_line_of(case, case.last_step, "step")),
            evidence=[("updates with scaled gradients", facts.scaled_updates, 0)],
        )
    if facts.other_scaler >= TWICE:
        yield finding(
            "law.program.objects_belong_together",
            "critical",
            case.last_step,
            symptom="the loss is scaled by one scaler and the gradients are unscaled by another",
            cause="there are two scalers, each with a scale of its own",
            remedy="use one scaler for scale, unscale_, step and update",
            sure=0.95,
            stage="update",
            evidence=[("steps through another scaler", facts.other_scaler, 0)],
        )
    if facts.scaler_steps >= 4 and not facts.scaler_updates:
        yield finding(
            "law.program.objects_belong_together",
            "warning",
            case.last_step,
            symptom=f"the scaler has stepped {facts.scaler_steps} times and was never updated",
            cause="scaler.update() is not called: the scale never falls after an overflow, and never grows",
            remedy="call scaler.update() once after scaler.step(optimizer)",
            sure=0.9,
            stage="update",
            evidence=[("scaler.update()", 0, facts.scaler_steps)],
        )


def _stale_copies(case: Case, facts: ObjectsFacts) -> Iterator[Finding]:
    stale = [each for each in facts.copies if not each.moved and each.evaluations >= TWICE]
    if not stale or facts.evaluations or any(each.moved for each in facts.copies):
        return  # the model itself is evaluated too, or an average of it: the copy is there to compare
    copy: EvaluatedCopy = stale[0]
    yield finding(
        "law.program.objects_belong_together",
        "warning",
        case.last_step,
        symptom=f"{copy.evaluations} evaluations are of a {copy.kind} whose weights never change, while training "
        "changes those of the model",
        cause="what is evaluated is a copy from before the training, and neither the model nor an average of it",
        remedy="evaluate the model that the optimizer updates, or copy its weights before each evaluation",
        sure=0.9,
        since_step=copy.first,
        evidence=[("evaluations of the trained model", 0, copy.evaluations)],
    )


def modes_come_back(case: Case) -> Iterator[Verdict]:
    """A module that leaves train mode is back when training goes on; an evaluation has one mode each time."""
    facts: Facts = case.facts("modes")
    if not facts.get("depends"):
        if facts:
            yield NotApplicable("no module behaves differently in eval mode")
        return
    left = [each for each in facts["eval"] if each["left"] and each["depends"] and each["trained"]]
    gone = [each for each in left if not each["norm"]]
    if gone or (left and len(left) < facts["norms"]):
        rows = gone or left
        names = [row["module"] for row in rows]
        yield finding(
            "law.program.modes_come_back",
            "warning",
            case.last_step,
            symptom=f"{listed(names)} left train mode in step {rows[0]['since']} and did not come back",
            cause="a part was set to eval mode on the way, and train() was not called for it afterwards",
            remedy="call model.train() before training goes on; freeze a part on purpose before the first step",
            sure=0.8,
            stage="forward",
            since_step=rows[0]["since"],
            where=Where(module=names[0], source=rows[0].get("source")),
            evidence=[("modules in eval mode that were in train mode", names[:16], [])],
        )
        return
    in_train, in_eval = facts["evaluated_in_train"], facts["evaluated_in_eval"]
    if in_train and in_eval and in_train[0] > in_eval[0] and 4 * len(in_train) <= facts["steps"]:
        yield finding(
            "law.program.modes_come_back",
            "warning",
            case.last_step,
            symptom=f"the model was evaluated in eval mode before step {in_eval[0]} and in train mode before step "
            f"{in_train[0]}",
            cause="eval() is called before some evaluations and not before others",
            remedy="call model.eval() before every evaluation, model.train() after it",
            sure=0.7,
            since_step=in_train[0],
            evidence=[("evaluations in train mode, before steps", in_train, [])],
        )
        return
    yield Holds(f"{facts['depends']} modules in {facts['steps']} steps")


def kept_states_are_copies(case: Case) -> Iterator[Verdict]:
    """A state that is kept, and used later, holds the values that it had when it was taken."""
    facts = case.newest(KeptFacts)
    if facts is None or not facts.taken:
        if facts is not None:
            yield NotApplicable("no state_dict() was called on a watched model")
        return
    if not facts.changed:
        yield Holds(f"{facts.taken} dictionaries of state_dict()")
        return
    kept = facts.changed[0]
    uses = {"load": "loaded back", "save": "saved", "": "still kept at the end"}
    yield finding(
        "law.program.kept_states_are_copies",
        "warning",
        case.last_step,
        symptom=f"the state that was taken after step {kept.taken} is {uses[kept.used]} after step {kept.used_at}, "
        "with the weights of then",
        cause="state_dict() gives references to the live tensors: every update changes what was kept",
        remedy="copy.deepcopy(model.state_dict()), or {k: v.clone() for k, v in model.state_dict().items()}",
        sure=0.95 if kept.used == "load" else 0.85 if kept.used else 0.6,
        since_step=kept.taken,
        where=Where(source=kept.source),
        evidence=[("updates since it was taken", kept.used_at - kept.taken, 0)],
    )


def names_are_read(case: Case) -> Iterator[Verdict]:
    """What is set on optimizers, groups, modules, parameters and settings is something that is read."""
    facts = case.newest(NamesFacts)
    if facts is None:
        return
    if not facts.unread:
        yield Holds(f"the attributes of {facts.looked_at} objects")
        return
    first = facts.unread[0]
    yield finding(
        "law.program.names_are_read",
        "warning",
        case.last_step,
        symptom=f"{first.name} = {first.value} was set on {first.owner}, and nothing reads it",
        cause=f"its name is nearly that of {first.known}, which is what is read",
        remedy=f"set {first.known}",
        sure=0.9,
        where=Where(module=first.module),
        evidence=[(f"set on {each.owner}", each.name, each.known) for each in facts.unread[:8]],
    )


def warnings_are_heeded(case: Case) -> Iterator[Verdict]:
    """What torch, numpy and others warn of does not happen."""
    facts = case.newest(WarningsFacts)
    if facts is None:
        return
    known = [(each, meaning) for each in facts.warnings if (meaning := meaning_of(each)) is not None]
    known.sort(key=lambda pair: ("critical", "warning", "info").index(pair[1].severity))
    if not known:
        yield Holds(
            f"{len(facts.warnings)} warnings, none of them about the training" if facts.warnings else "none came"
        )
        return
    shown, meaning = known[0]
    yield finding(
        "law.program.warnings_are_heeded",
        meaning.severity,
        max(1, shown.step),
        symptom=f"{shown.kind} in step {max(1, shown.step)}: {shown.text}",
        cause=meaning.cause,
        remedy=meaning.remedy,
        sure=0.8,
        since_step=max(1, shown.step),
        where=Where(source=shown.source),
        evidence=[(f"{each.kind} at {each.source}", each.text, None) for each, _ in known[:8]],
    )


def schedule_is_followed(case: Case) -> Iterator[Verdict]:
    """Every update has the rate that the scheduler has set, and the scheduler counts in one unit."""
    facts = case.newest(RatesFacts)
    if facts is None:
        return
    if not facts.schedulers:
        yield NotApplicable("no scheduler is stepped")
        return
    judges = (_overruled, _two_units, _each_twice)
    broken = [found for each in facts.schedulers for judge in judges for found in judge(case, each)]
    yield broken[0] if broken else Holds(f"{sum(each.updates for each in facts.schedulers)} updates")


def _overruled(case: Case, rate: RateFacts) -> Iterator[Finding]:
    if rate.calls < TWICE or rate.off < 4:
        return
    goes_on = rate.off_in_a_row >= 4 or not rate.followed
    yield finding(
        "law.program.schedule_is_followed",
        "warning" if goes_on else "info",
        case.last_step,
        symptom=f"{rate.off} of {rate.updates} updates had another learning rate than {rate.kind} had set: "
        f"{rate.seen:.4g} in place of {rate.said:.4g}",
        cause="something else writes to the learning rate after the scheduler: the loop, or another scheduler",
        remedy="let one of them set the rate; to combine schedules use ChainedScheduler or SequentialLR",
        sure=0.85,
        since_step=rate.off_since,
        evidence=[("learning rate of the last such update", rate.seen, rate.said)],
    )


def _two_units(case: Case, rate: RateFacts) -> Iterator[Finding]:
    gaps = dict(rate.gaps)
    often, twice = gaps.get(1, 0), gaps.get(0, 0)
    if often < 8 or not TWICE <= twice <= often / 2:
        return
    yield finding(
        "law.program.schedule_is_followed",
        "warning",
        case.last_step,
        symptom=f"{rate.kind} is stepped after each update, and {twice} times once more",
        cause="scheduler.step() is called in two places: for each step and for each epoch",
        remedy="call it in one of them, in the unit that the schedule counts in",
        sure=0.85,
        evidence=[("calls that no update came before", twice, 0), ("calls after one update", often)],
    )


def _each_twice(case: Case, rate: RateFacts) -> Iterator[Finding]:
    """As often without an update since the call before as with some, and not all at the begin."""
    twice, others = dict(rate.gaps).get(0, 0), sum(count for updates, count in rate.gaps if updates > 0)
    if others < 3 or abs(twice - others) > 1:
        return
    yield finding(
        "law.program.schedule_is_followed",
        "warning",
        case.last_step,
        symptom=f"{rate.kind} is stepped twice in a row, {twice} times",
        cause="scheduler.step() stands there twice, or in a function that is called twice: the schedule runs at double "
        "speed, and a plateau is one after half of its patience",
        remedy="call scheduler.step() once for each epoch or update",
        sure=0.8,
        evidence=[("calls that no update came before", twice, 0), ("calls after updates", others)],
    )
