"""The contract of a step: zero_grad, backward, unscale, clip, step, each once and in an order that has an effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, RemedyTrial, check, finding
from trainwright.runlog.records import Examined, Watched, Where

LoopEvent = Sequence[Any]


def kinds(record: Watched, *wanted: str) -> list[LoopEvent]:
    """The events of these kinds, in order."""
    return [each for each in record.events if each[0] in wanted]


def has_closure(record: Watched) -> bool:
    """The optimizer called the loop back: what lies between its events is its own affair."""
    return "closure" in str(record.values.get("blind", ""))


def of_step(case: Case, step: int) -> Watched | None:
    return next((record for record in reversed(case.watched) if record.step == step), None)


@check
def missing_zero_grad(case: Case) -> Iterator[Finding]:
    """Old gradients are there when a step begins, and nobody drops them before they are in the update.

    In a GAN the generator's loss leaves gradients in the critic; that is no fault while the critic's optimizer drops
    them before its own step. A declared accumulation may keep them for its window.
    """
    kept: dict[int, list[Examined]] = {}
    for exam in case.exams("contract"):
        record = of_step(case, exam.step)
        if record is None or has_closure(record) or record is case.watched[0]:
            continue
        for number, norm in enumerate(exam.values.get("carried") or ()):
            if norm > 1e-12 * max(record.grad_norm, 1e-30) and _keeps(record, number):
                kept.setdefault(number, []).append(exam)
    declared = case.about("contract").get("accumulation") or 1
    for number, exams in kept.items():
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
            cause="nothing drops the gradients between two steps, so every backward pass adds to the sum of all before",
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
    """Whether the optimizer steps, and nobody drops its gradients between the begin of the record and that."""
    for kind, value in record.events:
        if kind == "step" and value["optimizer"] == number:
            return True
        if kind == "zero_grad" and value in (number, -1):
            return False
    return False


@check
def zero_grad_before_step(case: Case) -> Iterator[Finding]:
    """Between the last backward pass and the step the gradients were dropped, so that the step found none."""
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


@check
def step_never_called(case: Case) -> Iterator[Finding]:
    """Backward passes and no step by any optimizer, named or not, while the weights stay what they were."""
    seen, unfinished = case.about("contract"), case.about("unfinished")
    backwards = seen.get("backwards", 0)
    if case.watched or not case.finished or (unfinished.get("error") and backwards < 8):
        return
    if backwards < 3 or seen.get("moved") or seen.get("steps_heard"):
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


@check
def one_never_steps(case: Case) -> Iterator[Finding]:
    """One of several optimizers never steps, though its parameters get gradients; a turn may be long, so late."""
    about = case.about("contract").get("optimizers") or []
    if len(about) < 2 or not case.watched or not (case.finished and len(case.watched) >= 20):
        return
    stepped = {value["optimizer"] for record in case.watched for _, value in kinds(record, "step", "scaler_skipped")
               if isinstance(value, dict)}  # fmt: skip
    for number, optimizer in enumerate(about):
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


@check
def double_owned(case: Case) -> Iterator[Finding]:
    """The same gradients are applied twice. An optimizer that calls another inside its step (SAM) does not count."""
    seen = case.exam("contract")
    if seen is None:
        return
    if seen.values["doubles"] >= min(2, max(1, len(case.watched))):
        yield finding(
            "opt.double_owned",
            "critical",
            seen.step,
            symptom="weights are updated twice with the gradients of one backward pass",
            cause="two optimizers hold the same parameters and both step",
            remedy="give every parameter to one optimizer",
            sure=0.97,
            stage="update",
            evidence=[("steps on gradients that another optimizer had applied", seen.values["doubles"], 0)],
            trial=RemedyTrial("one_owner"),
            explains=("opt.lr_too_high", "opt.stepped_twice"),
        )
    if seen.values["again"] >= 2:
        yield finding(
            "opt.stepped_twice",
            "critical",
            seen.step,
            symptom="weights are updated twice with the gradients of one backward pass",
            cause="an optimizer steps twice for each backward pass",
            remedy="call step() once, through the scaler if there is one",
            sure=0.95,
            stage="update",
            evidence=[("steps without a backward pass since the one before", seen.values["again"], 0)],
            explains=("opt.lr_too_high",),
        )


@check
def clip_before_unscale(case: Case) -> Iterator[Finding]:
    """Clipped while the gradients still had the loss scale in them, at a threshold that does not have it."""
    seen = case.exam("contract")
    if seen is None or not seen.values.get("scaled_clip"):
        return
    at, norm, scale = seen.values["scaled_clip"]
    if scale < 64 or at > 0.02 * scale:  # a threshold times the scale is right
        return
    true = None if norm is None or not math.isfinite(norm) else norm / scale
    yield finding(
        "grad.clip_before_unscale",
        "critical",
        seen.step,
        symptom=f"gradients are clipped to {at:g} while they are {scale:g} times too large, then divided by {scale:g}",
        cause="clip is called before scaler.unscale_(optimizer)",
        remedy="call scaler.unscale_(optimizer) right before the clip",
        sure=0.97,
        stage="clip",
        evidence=[("norm that the clip saw", norm, true), ("loss scale", scale), ("clips like this", _scaled(seen))],
        explains=("opt.lr_too_low", "grad.clip_always_active", "grad.vanish*"),
    )


def _scaled(seen: Examined) -> str:
    return f"{seen.values['scaled_clips']} of {seen.values['clips']}"


@check
def clip_no_effect(case: Case) -> Iterator[Finding]:
    """Every clip comes when its gradients are already applied, or not there yet; and they are above the threshold."""
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
        cause="the clip comes behind step(), or before backward(): it changes gradients that nobody uses",
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
    """Whether a clip lies after a backward pass and right before a step, with gradients to change."""
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


@check
def clip_empty_iterable(case: Case) -> Iterator[Finding]:
    """A clip of no parameters at all: an iterator that was used up before."""
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
            symptom="clipping says a norm of 0 and changes nothing",
            cause="it is given no parameters: an iterator (filter, map, parameters()) can be walked only once",
            remedy="make a list of the parameters, or call model.parameters() again for the clip",
            sure=0.98,
            stage="clip",
            since_step=empty[0][0].step,
            evidence=[("parameters given", 0), ("norm at the step", record.grad_norm, clip["at"])],
        )


@check
def owners(case: Case) -> Iterator[Finding]:
    """Parameters that get gradients, that no optimizer has, and that nothing else moves either.

    When an optimizer holds as good as none of the model's, it was made for other tensors: a copy, an earlier model.
    """
    seen = case.exam("contract")
    if seen is None or not seen.values.get("missing") or not case.watched:
        return
    missing, share = seen.values["missing"], seen.values["missing_share"]
    stale = sum(optimizer["stale"] for optimizer in seen.values["optimizers"])
    owned = sum(optimizer["parameters"] for optimizer in seen.values["optimizers"])
    severity: Any = "critical" if share > 0.3 else "warning"
    evidence = [
        ("parameters with a gradient that no optimizer has", len(missing), 0),
        ("their share of the weights", share),
        ("tensors of the optimizer that are not in the model", stale, 0),
    ]
    if stale:
        yield finding(
            "opt.stale_params",
            severity,
            seen.step,
            symptom=f"{len(missing)} parameters get gradients and do not change",
            cause=f"{stale} of the optimizer's {owned} tensors are not in the model: it was made before the model was "
            "copied, rebuilt or changed",
            remedy="make the optimizer after the model is what it will be, from model.parameters()",
            sure=0.97,
            stage="update",
            evidence=evidence,
            trial=RemedyTrial("with_optimizer", {"names": missing}),
            explains=("opt.params_missing", "opt.lr_too_low", "opt.zero_grad_before_step"),
        )
    else:
        yield finding(
            "opt.params_missing",
            severity,
            seen.step,
            symptom=f"{len(missing)} parameters get gradients and do not change: {_some(missing)}",
            cause="no optimizer has them",
            remedy="give them to the optimizer, or set requires_grad to False if they are to stay",
            sure=0.95,
            stage="update",
            where=Where(module=missing[0].rpartition(".")[0] or None),
            evidence=evidence,
            trial=RemedyTrial("with_optimizer", {"names": missing}),
            explains=("opt.lr_too_low",),
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@check
def zero_lr_group(case: Case) -> Iterator[Finding]:
    """A group with gradients has a learning rate of 0 in step after step, while another has not.

    A schedule that may still raise it has a base (``initial_lr``) above 0: then it is no fault before the end.
    """
    exams = case.exams("contract")[-2:]
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
                remedy="give the group a learning rate, or set requires_grad to False if it is to stay",
                sure=0.95,
                stage="update",
                since_step=exams[0].step,
                evidence=[(f"lr of group {place}", 0.0, alive[0].get("lr"))],
                trial=RemedyTrial("group_lr", {"optimizer": number, "group": place, "lr": alive[0].get("lr")}),
            )
