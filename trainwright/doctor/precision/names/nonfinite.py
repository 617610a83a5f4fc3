"""Checks of steps that are not finite: which operation made the first NaN or infinity, and in which samples.

Every such step is replayed op by op (experiment "trace"), so a finding names the op where it began and not one that
passed it on. A gradient scaler that skips while it searches for its scale is healthy: without the scale the step is
finite. Where a step cannot be replayed, the finding has only what was seen live, and what would tell more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, Measured, OldCheck, finding
from trainwright.doctor.precision.names.mechanisms import Mechanism, mechanism_of
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where
from trainwright.runlog.records import Watched as Step

COLLAPSED = 20
"""Skips in a row after which a gradient scaler will not find a scale: it has been divided by a million (2**20)."""
MOST_IDS = 16


def nonfinite_step(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One finding for each mechanism, at its first step: later steps on non-finite weights are its consequences."""
    known: dict[str, Finding] = {}
    for exam in case.outcomes("trace"):
        first = exam.values.get("first")
        if not first or (first["kind"] in ("weight", "buffer", "state", "gradient") and known):
            continue
        if first["reached"] == "buffer" and _is_harmless(case, exam, first) and _is_finite(exam):
            continue  # the step itself was finite: see poisoned_statistics
        mechanism = mechanism_of(first)
        if mechanism.code not in known:
            known[mechanism.code] = _found(case, exam, first, mechanism)
            if mechanism.code.startswith(("num.", "prec.")) and first.get("empty") is not None:
                known.setdefault("data.empty_sample", _empty_sample(exam, first, mechanism))
    yield from known.values()


def _found(case: Case, exam: Examined, first: Facts, mechanism: Mechanism) -> Finding:
    is_harmless = _is_harmless(case, exam, first)
    same = [e for e in case.outcomes("trace") if _is_same(e.values.get("first"), first)]
    sure = 0.97 if first["kind"] != "constant" else 0.7
    ids = sorted({i for e in same for i in e.values["first"]["ids"]})
    ids = ids if len(ids) <= MOST_IDS else first["ids"]
    symptom = f"step {exam.step} is not finite"
    if is_harmless:
        symptom = f"the loss of step {exam.step} is not finite, its gradients are: only the reported loss is affected"
    return finding(
        mechanism.code,
        "warning" if is_harmless else "critical",
        exam.step,
        symptom=symptom + (f" (so were {len(same) - 1} later ones)" if len(same) > 1 else ""),
        cause=mechanism.cause(first) + _in_which(first, len(ids)),
        remedy=mechanism.remedy,
        sure=0.7 if first["kind"] == "op" and _was_diverging(case, exam.step) else sure,
        stage=mechanism.stage(first),
        where=_where(exam, first, ids),
        evidence=_evidence(exam, first),
        trial=mechanism.trial(exam, first),
        explains=("num.nonfinite", "hw.*", *mechanism.brings),
    )


def _is_same(one: Facts | None, other: Facts) -> bool:
    if not one or mechanism_of(one).code != mechanism_of(other).code:
        return False
    return one["kind"] == other["kind"] != "op" or all(one[key] == other[key] for key in ("module", "op", "reached"))


def _was_diverging(case: Case, step: int) -> bool:
    """Whether the losses right before were far above the lowest: then divergence is the cause, not the op."""
    losses = [abs(each.loss) for each in case.watched if each.step < step and math.isfinite(each.loss)]
    return len(losses) > 1 and max(losses[-3:]) > 10 * min(losses[:-1])


def _is_harmless(case: Case, exam: Examined, first: Facts) -> bool:
    """Whether every gradient of the step was finite, live and on the replay, and only the loss was not."""
    live = next((e.values for e in case.outcomes("nonfinite") if e.step == exam.step), {})
    return first["phase"] != "update" and not exam.values["gradients"] and not live.get("num_gradients")


def _is_finite(exam: Examined) -> bool:
    return all(math.isfinite(each) for each in exam.values["losses"])


def _where(exam: Examined, first: Facts, ids: list[int]) -> Where:
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


def _in_which(first: Facts, num_ids: int) -> str:
    if num_ids == 1:
        return "; without that one sample the step is finite"
    num_rows = len(first.get("rows") or ())
    many = f"each of {num_rows} samples of the batch causes it alone"
    return "; one sample of the batch causes it alone" if num_rows == 1 else f"; {many}" if num_rows else ""


def _evidence(exam: Examined, first: Facts) -> list[Measured]:
    rows: list[Measured] = []
    for number, held in enumerate(first["forward_inputs"]):
        value = f"{held['dtype']} {held['shape']} in {held['min']:.4g}..{held['max']:.4g}"
        value += "".join(f", {held[key]} {key}" for key in ("zeros", "nan", "inf") if held[key])
        rows.append((f"input {number} of {first['op']}", value))
    out = first["output"]
    rows.append((f"output of {first['kernel']}", f"{out['nan']} nan, {out['inf']} inf", "none"))
    if "fp32" in exam.values:
        losses = ", ".join(f"{x:.4g}" for x in exam.values["fp32"]["losses"])
        rows.append(("loss of the same step in fp32", losses or str(exam.values["fp32"]["error"])))
    return rows


def _empty_sample(exam: Examined, first: Facts, mechanism: Mechanism) -> Finding:
    return finding(
        "data.empty_sample",
        "critical",
        exam.step,
        symptom=f"a sample of step {exam.step} is empty",
        cause=f"every element of its input is {first['empty']:g}, so nothing in it is counted or attended to: "
        f"{mechanism.code} in {first['op']}",
        remedy="filter empty samples out, or clamp the count",
        sure=0.84,
        stage="input",
        where=_where(exam, first, first["ids"][:MOST_IDS]),
        evidence=[("the value of every element", first["empty"])],
        trial=mechanism.without_samples(exam, first),
    )


def poisoned_statistics(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Running statistics are not finite: a forward pass in training mode updates them even if its step is skipped."""
    for exam in case.outcomes("nonfinite"):
        if not (poisoned := exam.values.get("poisoned")):
            continue
        first: Facts = {}
        for traced in (e for e in case.outcomes("trace") if e.step == exam.step):
            first = traced.values.get("first") or {}
        by = first.get("kind") == "input" and "non-finite values in the input"
        yield finding(
            "model.bn_stats_poisoned",
            "critical",
            exam.step,
            symptom=f"running statistics of {', '.join(poisoned[:4])} are not finite since step {exam.step}",
            cause="a forward pass in training mode updated them, though no update of the weights followed"
            + (f": {by}" if by else "")
            + "; training does not read them, and every evaluation from now on is NaN",
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


def clip_spreads_nan(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Some gradients were not finite before the clip, all of them after it: it scales all by a norm that is NaN."""
    for exam in case.outcomes("nonfinite"):
        live = exam.values
        if not live.get("num_gradients") or live.get("num_after_clip") is None:
            continue
        if not 0 < live["num_gradients"] < live["num_after_clip"]:
            continue
        traced = next((e.values for e in case.outcomes("trace") if e.step == exam.step), {})
        names = live["gradients"]
        came = "the other finding tells its origin"
        if not traced.get("first"):
            came = "the replay of the step is finite, so the loop (or a hook) wrote it after the backward pass"
            came = came if "blind" not in traced else "its origin is not known: the step cannot be replayed"
        yield finding(
            "grad.clip_spreads_nan",
            "critical",
            exam.step,
            symptom=f"clipping made {live['num_after_clip']} gradients non-finite in step {exam.step}",
            cause=f"before it that of {', '.join(names[:3])} was not finite, and so the total norm; {came}",
            remedy="find the code that writes it; clip_grad_norm_(error_if_nonfinite=True), or skip the step",
            sure=0.9 if not traced.get("first") else 0.8,
            stage="clip",
            where=Where(module=names[0].rpartition(".")[0], dtype=live.get("dtype")),
            evidence=[
                ("non-finite gradients before clipping", live["num_gradients"], 0),
                ("non-finite gradients after clipping", live["num_after_clip"], 0),
            ],
            explains=("num.nonfinite", "hw.*"),
        )
        return


def scaler_collapse(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The scaler skips again and again. Two in a row suffice where the replay shows that no scale helps."""
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
    """The trace of an op that is not finite at any scale, in all traced steps and at least two; None otherwise."""
    exams = [e for e in case.outcomes("trace") if e.step in steps]
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
    cause = "the gradients are not finite at any loss scale, so the scaler halves it again and again"
    mechanism = mechanism_of(first) if first else None
    return finding(
        "prec.scaler_collapse",
        "critical" if skips >= COLLAPSED else "warning",
        run[-1].step,
        symptom=f"the gradient scaler skipped {skips} updates in a row; nothing is trained",
        cause=cause + (f": {mechanism.cause(first)}" if mechanism else ""),
        remedy=mechanism.remedy if mechanism else "find the op that overflows; use bfloat16, which needs no scaler",
        sure=0.9,
        stage="update",
        where=_where(root, first, []) if root else Where(),
        evidence=[("skips in a row", skips, "a few at the start"), ("loss scale", scales[-1] if scales else None)],
        trial=mechanism.trial(root, first) if mechanism and root else None,
    )


def unexplained(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A step was not finite, and the replay cannot tell why: it is not possible, or it is finite."""
    for exam in case.outcomes("nonfinite"):
        live = exam.values
        traced = next((e.values for e in case.outcomes("trace") if e.step == exam.step), None)
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
    """Whether the loss was finite and the scaler skipped, as it does while it searches for its scale."""
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
        cause="the input of the model is not finite",
        remedy="drop or impute such samples where the data is read",
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


def _cannot_tell(exam: Examined, traced: Facts) -> Finding:
    names = exam.values["gradients"]
    blind = traced.get("blind")
    cause, advice = f"cannot tell: {blind}", "give the watch every model that the loss depends on (loss=...)"
    if not blind:
        cause = "the replay of the step is finite: something wrote to the gradients after backward, or was random"
        cause += f"; not finite were the gradients of {', '.join(names[:3])}" if names else ""
        advice = "look for code that writes to gradients after the backward pass, and for unseeded randomness"
    return finding(
        "num.nonfinite",
        "critical",
        exam.step,
        symptom=f"step {exam.step} is not finite",
        cause=cause,
        remedy=f"to find out: {advice}; torch.autograd.set_detect_anomaly(True) names the op at some cost",
        sure=0.5,
        stage="backward",
        where=Where(module=names[0].rpartition(".")[0] if len(names) == 1 else None),
        evidence=[("non-finite gradients", exam.values["num_gradients"], 0)],
    )


NAMES: tuple[OldCheck, ...] = (
    nonfinite_step,
    poisoned_statistics,
    clip_spreads_nan,
    scaler_collapse,
    unexplained,
)
