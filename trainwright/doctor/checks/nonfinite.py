"""Numbers that are no numbers: what the replay of the step says was the first to break them, and in which samples.

Every such step is run again op by op (experiment "trace"), so a finding names the op that did harm and not one that
its outcome went through. A gradient scaler that skips while it looks for its scale is healthy: run without the scale,
that step is finite. Where a step cannot be run again, only what was seen live is said, and what would tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.checks.mechanisms import Mechanism, mechanism_of
from trainwright.doctor.finding import ExperimentRequest, Finding, check, finding
from trainwright.runlog.records import Examined, Where
from trainwright.runlog.records import Watched as Step

COLLAPSED = 20
"""Skips in a row after which a gradient scaler will not find a scale: it has gone down by a million."""
MOST_IDS = 16


@check
def nonfinite_step(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One finding for each mechanism, at the step where it was first: steps on broken weights are its consequences."""
    known: dict[str, Finding] = {}
    for exam in case.exams("trace"):
        first = exam.values.get("first")
        if not first or (first["kind"] in ("weight", "buffer", "state", "gradient") and known):
            continue
        if first["reached"] == "buffer" and _is_harmless(case, exam, first) and _is_finite(exam):
            continue  # the step was in order: see poisoned_statistics
        mechanism = mechanism_of(first)
        if mechanism.code not in known:
            known[mechanism.code] = _found(case, exam, first, mechanism)
            if mechanism.code.startswith(("num.", "prec.")) and first.get("empty") is not None:
                known.setdefault("data.empty_sample", _empty_sample(exam, first, mechanism))
    yield from known.values()


def _found(case: Case, exam: Examined, first: dict[str, Any], mechanism: Mechanism) -> Finding:
    is_harmless = _is_harmless(case, exam, first)
    same = [e for e in case.exams("trace") if _is_same(e.values.get("first"), first)]
    sure = 0.97 if first["kind"] != "constant" else 0.7
    ids = sorted({i for e in same for i in e.values["first"]["ids"]})
    ids = ids if len(ids) <= MOST_IDS else first["ids"]
    told = f"step {exam.step} is not finite"
    if is_harmless:
        told = f"the loss of step {exam.step} is not finite, its gradients are: only the loss that is told is spoilt"
    return finding(
        mechanism.code,
        "warning" if is_harmless else "critical",
        exam.step,
        symptom=told + (f" (so were {len(same) - 1} later ones)" if len(same) > 1 else ""),
        cause=mechanism.cause(first) + _in_which(first, len(ids)),
        remedy=mechanism.remedy,
        sure=0.7 if first["kind"] == "op" and _was_diverging(case, exam.step) else sure,
        stage=mechanism.stage(first),
        where=_where(exam, first, ids),
        evidence=_evidence(exam, first),
        trial=mechanism.trial(exam, first),
        explains=("num.nonfinite", "hw.*", *mechanism.brings),
    )


def _is_same(one: dict[str, Any] | None, other: dict[str, Any]) -> bool:
    if not one or mechanism_of(one).code != mechanism_of(other).code:
        return False
    return one["kind"] == other["kind"] != "op" or all(one[key] == other[key] for key in ("module", "op", "reached"))


def _was_diverging(case: Case, step: int) -> bool:
    """Whether the losses right before were far above those at first: then the op is only where it ended."""
    losses = [abs(each.loss) for each in case.watched if each.step < step and math.isfinite(each.loss)]
    return len(losses) > 1 and max(losses[-3:]) > 10 * min(losses[:-1])


def _is_harmless(case: Case, exam: Examined, first: dict[str, Any]) -> bool:
    """The loss alone is spoilt: every gradient of the step was finite, live and on the replay."""
    live = next((e.values for e in case.exams("nonfinite") if e.step == exam.step), {})
    return first["phase"] != "update" and not exam.values["gradients"] and not live.get("num_gradients")


def _is_finite(exam: Examined) -> bool:
    return all(math.isfinite(each) for each in exam.values["losses"])


def _where(exam: Examined, first: dict[str, Any], ids: list[int]) -> Where:
    came_in = first["kind"] in ("input", "target")
    module = first["module"]
    if first["kind"] in ("weight", "buffer") and first["name"]:
        module = first["name"].rpartition(".")[0]
    return Where(
        module=None if came_in else module,
        op=first["op"] if first["kind"] == "op" else None,
        dtype=first["dtype"],
        micro_batch=first["micro_batch"] if exam.values["micro_batches"] > 1 else None,
        sample_ids=tuple(ids),
        source=None if came_in else first["source"],
    )


def _in_which(first: dict[str, Any], num_ids: int) -> str:
    if num_ids == 1:
        return "; without that one sample the step is finite"
    num_rows = len(first.get("rows") or ())
    many = f"{num_rows} samples of the batch each do it alone"
    return "; one sample of the batch does it alone" if num_rows == 1 else f"; {many}" if num_rows else ""


def _evidence(exam: Examined, first: dict[str, Any]) -> list[tuple[Any, ...]]:
    told: list[tuple[Any, ...]] = []
    for number, held in enumerate(first["forward_inputs"]):
        seen = f"{held['dtype']} {held['shape']} in {held['min']:.4g}..{held['max']:.4g}"
        seen += "".join(f", {held[key]} {key}" for key in ("zeros", "nan", "inf") if held[key])
        told.append((f"input {number} of {first['op']}", seen))
    out = first["output"]
    told.append((f"outcome of {first['kernel']}", f"{out['nan']} nan, {out['inf']} inf", "none"))
    if "fp32" in exam.values:
        losses = ", ".join(f"{x:.4g}" for x in exam.values["fp32"]["losses"])
        told.append(("loss of the same step in fp32", losses or str(exam.values["fp32"]["error"])))
    return told


def _empty_sample(exam: Examined, first: dict[str, Any], mechanism: Mechanism) -> Finding:
    return finding(
        "data.empty_sample",
        "critical",
        exam.step,
        symptom=f"a sample of step {exam.step} has nothing in it",
        cause=f"its input is {first['empty']:g} from end to end, so what is counted or attended to in it is empty: "
        f"{mechanism.code} in {first['op']}",
        remedy="filter empty samples out, or clamp the count",
        sure=0.84,
        stage="input",
        where=_where(exam, first, first["ids"][:MOST_IDS]),
        evidence=[("the value of every element", first["empty"])],
        trial=mechanism.without_samples(exam, first),
    )


@check
def poisoned_statistics(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A forward pass in training mode writes the running statistics whatever becomes of its loss."""
    for exam in case.exams("nonfinite"):
        if not (poisoned := exam.values.get("poisoned")):
            continue
        first: dict[str, Any] = {}
        for traced in (e for e in case.exams("trace") if e.step == exam.step):
            first = traced.values.get("first") or {}
        by = first.get("kind") == "input" and "non-finite values in the input"
        yield finding(
            "model.bn_stats_poisoned",
            "critical",
            exam.step,
            symptom=f"running statistics of {', '.join(poisoned[:4])} are not finite since step {exam.step}",
            cause="a batch went through in training mode and moved them, though no update was made with it"
            + (f": {by}" if by else "")
            + "; training does not read them, every evaluation from now on is NaN",
            remedy="skip the batch before the forward pass (look at the input, not at the loss); reset the statistics",
            sure=0.99,
            stage="buffers",
            where=Where(
                module=poisoned[0],
                dtype=first.get("dtype", "float32"),
                sample_ids=tuple(first.get("ids", ())),
            ),
            evidence=[("modules with non-finite statistics", len(poisoned), 0)],
            trial=None if not first.get("rows") else Mechanism.without_samples_of_buffers(first),
            explains=("num.nonfinite",),
        )
        return


@check
def clip_spreads_nan(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Some gradients were non-finite before the clip, all after it: the norm is NaN, and everything is scaled by it."""
    for exam in case.exams("nonfinite"):
        live = exam.values
        if not live.get("num_gradients") or live.get("num_after_clip") is None:
            continue
        if not 0 < live["num_gradients"] < live["num_after_clip"]:
            continue
        traced = next((e.values for e in case.exams("trace") if e.step == exam.step), {})
        names = live["gradients"]
        came = "its origin is the finding beside this one"
        if not traced.get("first"):
            came = "the step is finite when it is run again, so the loop (or a hook) wrote it after the backward pass"
            came = came if "blind" not in traced else "where it comes from cannot be told: the step cannot be run again"
        yield finding(
            "grad.clip_spreads_nan",
            "critical",
            exam.step,
            symptom=f"clipping made {live['num_after_clip']} gradients non-finite in step {exam.step}",
            cause=f"before it that of {', '.join(names[:3])} was so, and with it the total norm; {came}",
            remedy="find what writes it; clip_grad_norm_(error_if_nonfinite=True), or skip the step",
            sure=0.9 if not traced.get("first") else 0.8,
            stage="clip",
            where=Where(module=names[0].rpartition(".")[0], dtype=live.get("dtype")),
            evidence=[
                ("non-finite gradients before clipping", live["num_gradients"], 0),
                ("and after", live["num_after_clip"], 0),
            ],
            explains=("num.nonfinite", "hw.*"),
        )
        return


@check
def scaler_collapse(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Skips that do not end. Two in a row are enough where the replay shows that no scale makes the step finite."""
    run: list[Step] = []
    for step in case.watched:
        if not any(kind == "scaler_skipped" for kind, _ in step.events):
            run = []
            continue
        run = [*run, step] if run and step.step == run[-1].step + 1 else [step]
        root = _root_without_scale(case, {each.step for each in run})
        if len(run) >= COLLAPSED or (len(run) >= 2 and root is not None):
            yield _collapse(case, run, root)
            return


def _root_without_scale(case: Case, steps: set[int]) -> Examined | None:
    """An op that breaks the steps whatever the scale, seen in two of them at least."""
    exams = [e for e in case.exams("trace") if e.step in steps]
    ops = [e for e in exams if (e.values.get("first") or {}).get("kind") == "op"]
    return ops[0] if len(ops) >= 2 and len(ops) == len(exams) else None


def _collapse(case: Case, run: list[Step], root: Examined | None) -> Finding:
    skips, end = len(run), {each.step for each in run}
    for step in case.watched:
        if step.step == max(end) + 1 and any(kind == "scaler_skipped" for kind, _ in step.events):
            end.add(step.step)
            skips += 1
    scales = [v for s in case.watched if s.step <= max(end) for k, v in s.events if k == "scaler_update" and v]
    first = (root.values["first"] if root else None) or {}
    cause = "the gradients are not finite at any loss scale, so the scaler halves it without end"
    mechanism = mechanism_of(first) if first else None
    return finding(
        "prec.scaler_collapse",
        "critical" if skips >= COLLAPSED else "warning",
        run[-1].step,
        symptom=f"{skips} updates in a row were skipped by the gradient scaler; no step is taken",
        cause=cause + (f": {mechanism.cause(first)}" if mechanism else ""),
        remedy=mechanism.remedy if mechanism else "find the op that overflows; use bfloat16, which needs no scaler",
        sure=0.9,
        stage="update",
        where=_where(root, first, []) if root else Where(),
        evidence=[("skips in a row", skips, "a few at the start"), ("loss scale", scales[-1] if scales else None)],
        trial=mechanism.trial(root, first) if mechanism and root else None,
    )


@check
def unexplained(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Non-finite as it ran, and the replay cannot say why: it is blind, or it comes out finite."""
    for exam in case.exams("nonfinite"):
        live = exam.values
        traced = next((e.values for e in case.exams("trace") if e.step == exam.step), None)
        if "inputs" not in live or traced is None or traced.get("first") or traced.get("finite_without_scale"):
            continue
        if _is_skip_of_scaler(case, exam.step):
            continue
        if live["inputs"]:
            yield _nonfinite_input(exam)
        elif not live["num_gradients"] and all(math.isfinite(x) for x in traced.get("losses", (math.nan,))):
            yield _norm_overflows(exam)
        else:
            yield _cannot_tell(exam, traced)
        return


def _is_skip_of_scaler(case: Case, step: int) -> bool:
    """The loss was finite and the scaler skipped: what it does while it looks for its scale."""
    watched = next((each for each in case.watched if each.step == step), None)
    return watched is not None and math.isfinite(watched.loss) and _has(watched, "scaler_skipped")


def _has(step: Step, kind: str) -> bool:
    return any(each[0] == kind for each in step.events)


def _nonfinite_input(exam: Examined) -> Finding:
    inputs = exam.values["inputs"]
    ids = tuple(i for each in inputs for i in each["ids"])[:MOST_IDS]
    return finding(
        "data.nonfinite_input",
        "critical",
        exam.step,
        symptom=f"step {exam.step} is not finite",
        cause="what the model was given is not finite before its first op",
        remedy="drop or impute these samples where the data is read",
        sure=0.95,
        stage="input",
        where=Where(dtype=inputs[0]["dtype"], sample_ids=ids),
        evidence=[("non-finite values in the input", sum(each["nan"] + each["inf"] for each in inputs), 0)],
    )


def _norm_overflows(exam: Examined) -> Finding:
    return finding(
        "num.overflow",
        "critical",
        exam.step,
        symptom=f"the gradient norm of step {exam.step} is not finite",
        cause="every gradient is finite, but they are so large that the sum of their squares is not",
        remedy="see why the gradients grow: the learning rate, the initialisation, or the scale of the data",
        sure=0.6,
        stage="backward",
        evidence=[("non-finite gradients", 0, 0)],
    )


def _cannot_tell(exam: Examined, traced: dict[str, Any]) -> Finding:
    names = exam.values["gradients"]
    blind = traced.get("blind")
    told, tell = f"cannot tell: {blind}", "give the watch every model that the loss is made of (loss=...)"
    if not blind:
        told = "run again, the step is finite: something wrote to the gradients after the backward pass, or was random"
        told += f"; not finite were those of {', '.join(names[:3])}" if names else ""
        tell = "look for code that writes to gradients after the backward pass, and for unseeded randomness"
    return finding(
        "num.nonfinite",
        "critical",
        exam.step,
        symptom=f"step {exam.step} is not finite",
        cause=told,
        remedy=f"what would tell: {tell}; torch.autograd.set_detect_anomaly(True) names the op at some cost",
        sure=0.5,
        stage="backward",
        where=Where(module=names[0].rpartition(".")[0] if len(names) == 1 else None),
        evidence=[("non-finite gradients", exam.values["num_gradients"], 0)],
    )
