"""The contract of a step: zero_grad, backward, unscale, clip and step, each once and in an order in which it works."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, Measured, OldCheck, RemedyTrial, Severity, finding, listed
from trainwright.runlog.json_values import Event
from trainwright.runlog.records import Examined, Watched, Where


def kinds(record: Watched, *wanted: str) -> list[Event]:
    """The events of these kinds, in order."""
    return [each for each in record.events if each[0] in wanted]


def has_closure(record: Watched) -> bool:
    """Whether the optimizer called a closure: it then decides itself in which order the events come."""
    return "closure" in str(record.values.get("blind", ""))


def of_step(case: Case, step: int) -> Watched | None:
    """The newest record of a step; None where it has none."""
    return next((record for record in reversed(case.watched) if record.step == step), None)


def missing_zero_grad(case: Case) -> Iterator[Finding]:
    """Gradients are there when a step begins, and no zero_grad() drops them before the update uses them.

    In a GAN the generator's loss leaves gradients in the critic: no fault while the critic's optimizer drops them
    before its own step. Declared gradient accumulation may keep them for its window. A loop that writes the gradients
    of an update by hand needs no zero_grad() for them.
    """
    carried: dict[int, list[Examined]] = {}
    for exam in case.outcomes("contract"):
        record = of_step(case, exam.step)
        if record is None or has_closure(record) or record is case.watched[0]:
            continue
        for number, norm in enumerate(exam.values.get("carried") or ()):
            if norm > 1e-12 * max(record.grad_norm, 1e-30) and _keeps(record, number):
                carried.setdefault(number, []).append(exam)
    declared = case.facts("contract").get("accumulation") or 1
    for number, exams in carried.items():
        if len(exams) < 2 or (declared > 1 and any(kinds(r, "zero_grad") for r in case.watched)):
            continue
        first, last = exams[0], exams[-1]
        several = len(first.values["optimizers"]) > 1
        now = of_step(case, last.step)
        yield finding(
            "opt.missing_zero_grad",
            "critical",
            last.step,
            symptom="the gradients of earlier steps are in this update too"
            + (f", in those of optimizer {number}" if several else ""),
            cause="no zero_grad() comes between two steps, so every backward pass adds to the sum of all before it",
            remedy=f"call zero_grad() of optimizer {number} before backward()"
            if several
            else "call zero_grad() in every step, before backward()",
            sure=0.95,
            stage="backward",
            since_step=first.step,
            evidence=[
                ("norm of gradients left from before the step", last.values["carried"][number], 0.0),
                ("norm of gradients at the step", now.grad_norm if now else None),
            ],
            explains=("opt.lr_too_high", "grad.*", "sched.no_warmup"),
        )


def _keeps(record: Watched, number: int) -> bool:
    """Whether the optimizer steps with gradients that no zero_grad() of its own and no write by hand has dropped."""
    for kind, value in record.events:
        if kind == "step" and value["optimizer"] == number:
            return number not in record.values.get("made_anew", ())
        if kind == "zero_grad" and value in (number, -1):
            return False
    return False


def zero_grad_before_step(case: Case) -> Iterator[Finding]:
    """Gradients were dropped between the last backward pass and the step, so the step found none."""
    bad = [record for record in case.watched if not has_closure(record) and _dropped_before_step(record)]
    if not bad or 2 * len(bad) < len(case.watched):
        return
    yield finding(
        "opt.zero_grad_before_step",
        "critical",
        bad[-1].step,
        symptom="the optimizer finds no gradients and changes nothing",
        cause="zero_grad() is called after backward() and before step()",
        remedy="move zero_grad() before backward(), or behind step()",
        sure=0.98,
        stage="update",
        since_step=bad[0].step,
        evidence=[
            ("order", " ".join(str(each[0]) for each in kinds(bad[-1], "backward", "zero_grad", "step"))),
            ("parameters with a gradient at the step", str(bad[-1].values.get("grads"))),
        ],
        explains=("opt.*", "grad.*", "model.*", "loss.*", "init.*"),
    )


def _dropped_before_step(record: Watched) -> bool:
    numbers = {value["optimizer"] for _, value in kinds(record, "step")}
    owners: tuple[int, ...] = (-1, *numbers) if len(numbers) == 1 else ()
    had_backward = dropped = False
    for kind, value in record.events:
        if kind == "backward":
            had_backward, dropped = True, False
        elif kind == "zero_grad" and had_backward and value in owners:
            dropped = True
        elif kind == "step":
            found = record.values.get("grads") or [1, 1]
            return dropped and (found[0] == 0 or record.grad_norm == 0.0)
    return False


def step_never_called(case: Case) -> Iterator[Finding]:
    """Backward passes ran, no optimizer stepped (given to the watch or not), and no weight changed."""
    facts, unfinished = case.facts("contract"), case.facts("unfinished")
    backwards = facts.get("backwards", 0)
    if case.watched or not case.finished or (unfinished.get("error") and backwards < 8):
        return
    if backwards < 3 or facts.get("moved") or facts.get("steps_heard"):
        return
    yield finding(
        "opt.step_never_called",
        "critical",
        1,
        symptom="no weight changes",
        cause=f"{backwards} backward passes, and not one call of an optimizer's step()",
        remedy="call optimizer.step() after backward()",
        sure=0.98,
        stage="update",
        evidence=[("backward passes", backwards), ("steps", 0, backwards)],
        explains=("*",),
    )


def one_never_steps(case: Case) -> Iterator[Finding]:
    """One of several optimizers never steps though its parameters get gradients.

    Optimizers may take long turns, so this is reported only at the end of a run of 20 steps or more.
    """
    optimizers = case.facts("contract").get("optimizers") or []
    if len(optimizers) < 2 or not case.watched or not (case.finished and len(case.watched) >= 20):
        return
    stepped = {value["optimizer"] for record in case.watched for _, value in kinds(record, "step", "scaler_skipped")
               if isinstance(value, dict)}  # fmt: skip
    for number, optimizer in enumerate(optimizers):
        if number in stepped or not any(group["with_grad"] for group in optimizer["groups"]):
            continue
        yield finding(
            "opt.step_never_called",
            "warning",
            case.last_step,
            symptom=f"the parameters of optimizer {number} get gradients and never change",
            cause="its step() was never called",
            remedy=f"call step() of optimizer {number}",
            sure=0.8,
            stage="update",
        )


def double_owned(case: Case) -> Iterator[Finding]:
    """The same gradients are applied twice. An optimizer that calls another one inside its step (SAM) is no fault."""
    exam = case.newest("contract")
    if exam is None:
        return
    if exam.values["doubles"] >= min(2, max(1, len(case.watched))):
        yield finding(
            "opt.double_owned",
            "critical",
            exam.step,
            symptom="weights are updated twice with the gradients of one backward pass",
            cause="two optimizers hold the same parameters and both step",
            remedy="give every parameter to one optimizer",
            sure=0.97,
            stage="update",
            evidence=[("steps on gradients that another optimizer had applied", exam.values["doubles"], 0)],
            trial=RemedyTrial("one_owner"),
            explains=("opt.lr_too_high", "opt.stepped_twice"),
        )
    if exam.values["again"] >= 2:
        yield finding(
            "opt.stepped_twice",
            "critical",
            exam.step,
            symptom="weights are updated twice with the gradients of one backward pass",
            cause="an optimizer steps twice for each backward pass",
            remedy="call step() once, through the scaler if there is one",
            sure=0.95,
            stage="update",
            evidence=[("steps without a backward pass since the one before", exam.values["again"], 0)],
            explains=("opt.lr_too_high",),
        )


def clip_before_unscale(case: Case) -> Iterator[Finding]:
    """Gradients were clipped while they still had the loss scale in them, at a threshold without it."""
    exam = case.newest("contract")
    if exam is None or not exam.values.get("scaled_clip"):
        return
    at, norm, scale = exam.values["scaled_clip"]
    if scale < 64 or at > 0.02 * scale:  # the threshold was multiplied by the scale, which is right
        return
    true = None if norm is None or not math.isfinite(norm) else norm / scale
    yield finding(
        "grad.clip_before_unscale",
        "critical",
        exam.step,
        symptom=f"gradients are clipped to {at:g} while they are {scale:g} times too large, then divided by {scale:g}",
        cause="clip is called before scaler.unscale_(optimizer)",
        remedy="call scaler.unscale_(optimizer) right before the clip",
        sure=0.97,
        stage="clip",
        evidence=[
            ("norm before the clip", norm, true),
            ("loss scale", scale),
            ("clips like this", f"{exam.values['scaled_clips']} of {exam.values['clips']}"),
        ],
        explains=("opt.lr_too_low", "grad.clip_always_active", "grad.vanish*"),
    )


def clip_no_effect(case: Case) -> Iterator[Finding]:
    """Every clip comes after its gradients were applied, or before they are there; and they exceed the threshold."""
    idle: list[tuple[Watched, float]] = []
    for record in case.watched:
        clips = [value for _, value in kinds(record, "clip")]
        if not clips:
            continue
        if has_closure(record) or _clips_in_time(record) or not all(clip["parameters"] for clip in clips):
            return
        idle.append((record, min(clip["at"] for clip in clips)))
    over = [(record, at) for record, at in idle if record.grad_norm > 1.01 * at]
    if not over:
        return
    record, at = over[-1]
    yield finding(
        "grad.clip_no_effect",
        "warning",
        record.step,
        symptom=f"updates are made with gradients of norm {record.grad_norm:.3g}, though they are clipped at {at:g}",
        cause="the clip comes after step(), or before backward(): it changes gradients that no update uses",
        remedy="clip between backward() and step()",
        sure=0.95,
        stage="clip",
        since_step=over[0][0].step,
        evidence=[
            ("order", " ".join(str(each[0]) for each in kinds(record, "backward", "clip", "step", "zero_grad"))),
            ("norm at the step", record.grad_norm, at),
        ],
    )


def _clips_in_time(record: Watched) -> bool:
    """Whether a clip comes between a backward pass and the step, with gradients to change."""
    clipped = had_backward = False
    for kind, value in record.events:
        if kind == "backward":
            had_backward, clipped = True, False
        elif kind == "clip":
            found = value["norm"] is None or value["norm"] > 0 or record.grad_norm == 0.0 or value["parameters"] == 0
            clipped = clipped or (had_backward and found) or not math.isfinite(value["at"])
        elif kind in ("step", "scaler_skipped"):
            if clipped:
                return True
            had_backward = False
    return clipped


def clip_empty_iterable(case: Case) -> Iterator[Finding]:
    """A clip got no parameters at all: an iterator that was used up before."""
    empty = [
        (record, clip)
        for record in case.watched
        for _, clip in kinds(record, "clip")
        if clip["parameters"] == 0 and (record.values.get("grads") or [1])[0]
    ]
    if empty:
        record, clip = empty[-1]
        yield finding(
            "grad.clip_empty_iterable",
            "warning",
            record.step,
            symptom="clipping reports a norm of 0 and changes nothing",
            cause="it gets no parameters: an iterator (filter, map, parameters()) can be walked only once",
            remedy="make a list of the parameters, or call model.parameters() again for the clip",
            sure=0.98,
            stage="clip",
            since_step=empty[0][0].step,
            evidence=[("parameters given", 0), ("norm at the step", record.grad_norm, clip["at"])],
        )


def owners(case: Case) -> Iterator[Finding]:
    """Parameters get gradients, no optimizer holds them, and nothing else changes them.

    An optimizer that holds tensors which are not in the model was made for others: for a copy or an earlier model.
    Where they were trained before, it is an info: nobody has to freeze them.
    """
    exam = case.newest("contract")
    if exam is None or not exam.values.get("missing") or not case.watched:
        return
    names, share = exam.values["missing"], exam.values["missing_share"]
    stale = sum(optimizer["stale"] for optimizer in exam.values["optimizers"])
    owned = sum(optimizer["parameters"] for optimizer in exam.values["optimizers"])
    severity: Severity = "critical" if share > 0.3 and stale else "warning"
    if not stale and (share == 1.0 or exam.values.get("missing_were_trained")):
        severity = "info"  # what the model is given is trained, or a head on it
    evidence: list[Measured] = [
        ("parameters with a gradient that no optimizer has", len(names), 0),
        ("their share of the weights", share),
        ("tensors of the optimizer that are not in the model", stale, 0),
    ]
    if stale:
        yield finding(
            "opt.stale_params",
            severity,
            exam.step,
            symptom=f"{len(names)} parameters get gradients and do not change",
            cause=f"{stale} of the optimizer's {owned} tensors are not in the model: it was made before the model was "
            "copied, rebuilt or changed",
            remedy="make the optimizer from model.parameters() once the model is final",
            sure=0.97,
            stage="update",
            evidence=evidence,
            trial=RemedyTrial("with_optimizer", {"names": names}),
            explains=("opt.params_missing", "opt.lr_too_low", "opt.zero_grad_before_step"),
        )
    else:
        yield finding(
            "opt.params_missing",
            severity,
            exam.step,
            symptom=f"{len(names)} parameters get gradients and do not change: {listed(names, 4)}",
            cause="no optimizer holds them",
            remedy="give them to the optimizer, or set requires_grad to False if they are not to be trained",
            sure=0.95,
            stage="update",
            where=Where(module=names[0].rpartition(".")[0]),
            evidence=evidence,
            trial=RemedyTrial("with_optimizer", {"names": names}),
            explains=("opt.lr_too_low",),
        )


def zero_lr_group(case: Case) -> Iterator[Finding]:
    """A parameter group with gradients keeps a learning rate of 0 while another group's is above 0.

    A schedule that may still raise it has a base (``initial_lr``) above 0: that is no fault before the end.
    """
    exams = case.outcomes("contract")[-2:]
    if len(exams) < 2 or not case.watched:
        return
    for number, optimizer in enumerate(exams[-1].values["optimizers"]):
        alive = [group for group in optimizer["groups"] if group.get("lr", 1.0) != 0.0]
        for place, group in enumerate(optimizer["groups"]):
            before = exams[0].values["optimizers"][number]["groups"]
            still = place < len(before) and before[place].get("lr") == 0.0
            if group.get("lr") != 0.0 or not still or not group["with_grad"] or not alive:
                continue
            if group.get("initial_lr", 0.0) > 0.0 and not (case.finished and len(case.watched) > 50):
                continue
            yield finding(
                "opt.zero_lr_group",
                "warning",
                exams[-1].step,
                symptom=f"{group['parameters']} parameters get gradients and do not change",
                cause=f"their group, number {place}, has a learning rate of 0",
                remedy="give the group a learning rate, or set requires_grad to False if it is not to be trained",
                sure=0.95,
                stage="update",
                since_step=exams[0].step,
                evidence=[(f"lr of group {place}", 0.0, alive[0].get("lr"))],
                trial=RemedyTrial("group_lr", {"optimizer": number, "group": place, "lr": alive[0].get("lr")}),
            )


NAMES: tuple[OldCheck, ...] = (
    missing_zero_grad,
    zero_grad_before_step,
    step_never_called,
    one_never_steps,
    double_owned,
    clip_before_unscale,
    clip_no_effect,
    clip_empty_iterable,
    owners,
    zero_lr_group,
)
