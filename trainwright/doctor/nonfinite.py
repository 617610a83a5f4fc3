"""Findings from the trace of a non-finite step, for the checks of non-finite values. Each covers some mechanisms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from trainwright.doctor.check import NotApplicable, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.precision import FirstNonfinite, SeenNonfinite, TraceFacts
from trainwright.doctor.finding import Finding, Measured, RemedyTrial, Stage, in_words
from trainwright.runs.records import Examined, Where

CONSEQUENCES = ("precision.nonfinite_step", "resources.not_reproducible")
"""Findings that follow from any operation that makes a step non-finite."""
MAX_IDS = 16  # A finding lists the sample ids of all equal traces, or only of the first one if there are more
DIVERGED_LOSS_RATIO = 10.0
"""If the loss exceeds the lowest one by this factor, the run has diverged and the operation is not the root cause."""

traced_check = partial(check, stage="forward", severity="critical", confidence=0.97, explains=CONSEQUENCES)


@dataclass(frozen=True)
class Mechanism:
    """A mechanism by which an operation becomes non-finite. ``cause`` is formatted with the values of the trace.

    ``guard`` names the trial that applies the remedy to the operation itself. ``fix`` replaces the fix in the docstring
    of the check.
    """

    cause: str
    guard: str | None = None
    fix: str = ""


Traced = tuple[int, TraceFacts, FirstNonfinite]


def traces(run: RunContext) -> list[Traced]:
    """Returns the first non-finite value of each traced step, unless an earlier step has made it."""
    found: list[Traced] = []
    for step, trace in run.every(TraceFacts):
        first = trace.first
        if first is None or (first.kind in ("weight", "buffer", "state", "gradient") and found):
            continue
        if first.reached == "buffer" and is_harmless(run, step, trace) and all(map(math.isfinite, trace.losses)):
            continue  # the step itself was finite: see model.running_statistics_nonfinite
        found.append((step, trace, first))
    return found


def traced_by(run: RunContext, mechanisms: Mapping[str, Mechanism]) -> Iterator[Result]:
    """Yields the finding of the first step whose operation became non-finite by one of these mechanisms."""
    if run.was_tried(TraceFacts) and (why := run.not_measured(TraceFacts)) is not None:
        yield NotApplicable(why)
    found = next((each for each in traces(run) if each[2].kind == "op" and each[2].what in mechanisms), None)
    if found is not None:
        yield finding_of(run, found, mechanisms[found[2].what])


def finding_of(run: RunContext, traced: Traced, mechanism: Mechanism) -> Finding:
    """Returns the finding of one trace: its origin, its samples, and its effect on the step."""
    step, trace, first = traced
    same = [each for _, _, each in traces(run) if _place(each) == _place(first)]
    ids = sorted({i for each in same for i in each.ids})
    ids = ids if len(ids) <= MAX_IDS else list(first.ids)
    harmless = is_harmless(run, step, trace)
    symptom = f"NaN or infinite values in step {step}"
    alone = "one sample" if len(first.rows or ()) == 1 else f"each of {len(first.rows or ())} samples"
    was_diverging = first.kind == "op" and _was_diverging(run, step)
    cause = cause_of(first, mechanism) + (f"; {alone} of the batch causes it alone" if first.rows else "")
    remedy, trial = mechanism.fix, trial_of(trace, first, mechanism)
    if grew := was_diverging and first.what == "overflow":  # the weights have grown
        trial, lr = None, max(each.lr for each in run.steps)
        cause = (
            f"the loss rose far above its lowest value in the steps before, at a learning rate of {lr:g}; then {cause}"
        )
        remedy = (
            f"a learning rate of {lr / 10:g} or less, or gradient clipping; if the loss rises then too, clamp the input"
        )
    elif harmless:
        symptom = f"the loss of step {step} is not finite, but its gradients are: only the reported loss is affected"
    return run.finding(
        step,
        symptom=symptom + (f" (and in {len(same) - 1} later ones)" if len(same) > 1 else ""),
        cause=cause,
        remedy=remedy,
        severity="warning" if harmless and not grew else None,
        sure=0.7 if first.kind == "constant" or was_diverging else None,
        stage=_stage(first),
        where=where_of(trace, first, ids),
        evidence=_evidence(first),
        trial=trial,
    )


def traced_at(run: RunContext, step: int) -> TraceFacts | str | None:
    """Returns the trace of a step; the reason if it could not be replayed; None if that was not tried."""
    outcomes = [e for e in run.records if isinstance(e, Examined) and e.experiment == TraceFacts.experiment]
    tried = next((each for each in reversed(outcomes) if each.step == step), None)
    if tried is None or "blind" not in tried.values:
        return next((trace for at, trace in run.every(TraceFacts) if at == step), None)
    return str(tried.values["blind"])


def skipped_by_scaler(run: RunContext, step: int) -> bool:
    """Returns True if the loss was finite, but a gradient scaler skipped the update to search for its scale."""
    seen = next((each for each in run.steps if each.step == step), None)
    return seen is not None and math.isfinite(seen.loss) and any(kind == "scaler_skipped" for kind, _ in seen.events)


def cause_of(first: FirstNonfinite, mechanism: Mechanism) -> str:
    """Returns the cause as text."""
    place = "" if first.phase == "update" else f" in {in_words(first.module)}"
    highest = max((each.max for each in first.inputs), default=0.0)
    lowest = min((each.min for each in first.inputs), default=0.0)
    ranges = {"highest": highest, "lowest": lowest, "largest": max(highest, -lowest)}
    return mechanism.cause.format(**vars(first), place=place, **ranges)


def where_of(trace: TraceFacts, first: FirstNonfinite, ids: list[int]) -> Where:
    """Returns module, operation, dtype, micro-batch, samples and source line."""
    came_in = first.kind in ("input", "target")
    module = first.module
    if first.kind in ("weight", "buffer") and first.name:
        module = first.name.rpartition(".")[0]
    return Where(
        module=None if came_in else module,
        op=first.op if first.kind == "op" else None,
        dtype=first.dtype,
        micro_batch=first.micro_batch if trace.micro_batches > 1 else None,
        sample_ids=tuple(ids),
        source=None if came_in else first.source,
    )


def trial_of(trace: TraceFacts, first: FirstNonfinite, mechanism: Mechanism) -> RemedyTrial | None:
    """Returns the trial: at the operation; else in float32 if that is finite; else without the samples."""
    if mechanism.guard is not None:
        return RemedyTrial(mechanism.guard, {"op": first.op} if mechanism.guard == "guarded" else {})
    return RemedyTrial("in_fp32") if trace.fp32_finite else without_samples(trace, first)


def without_samples(trace: TraceFacts, first: FirstNonfinite) -> RemedyTrial | None:
    """Returns the trial of the step without the samples that cause it."""
    micro = first.micro_batch if trace.micro_batches > 1 else None
    return RemedyTrial("without_these_samples", {"rows": first.rows, "micro": micro}) if first.rows else None


def is_harmless(run: RunContext, step: int, trace: TraceFacts) -> bool:
    """Returns True if only the loss was not finite: all gradients were finite, in the step itself and in its replay."""
    live = next((seen for at, seen in run.every(SeenNonfinite) if at == step), None)
    first = trace.first
    return first is not None and first.phase != "update" and not trace.gradients and not (live and live.num_gradients)


def _place(first: FirstNonfinite) -> tuple[object, ...]:
    is_op = first.kind == "op"
    return (first.kind, first.what, first.module, first.op, first.reached) if is_op else (first.kind,)


def _was_diverging(run: RunContext, step: int) -> bool:
    losses = [abs(each.loss) for each in run.steps if each.step < step and math.isfinite(each.loss)]
    return len(losses) > 1 and max(losses[-3:]) > DIVERGED_LOSS_RATIO * min(losses[:-1])


def _stage(first: FirstNonfinite) -> Stage:
    if first.kind in ("input", "target"):
        return "input" if first.kind == "input" else "label"
    if first.phase != "forward":
        return "backward" if first.phase == "backward" else "update"
    return "forward" if first.module is not None else "loss"


def _evidence(first: FirstNonfinite) -> Iterator[Measured]:
    for number, seen in enumerate(first.inputs):
        counts = (("zeros", seen.zeros), ("nan", seen.nan), ("inf", seen.inf))
        text = f"{seen.dtype} {list(seen.shape)} in {seen.min:.4g}..{seen.max:.4g}"
        yield f"input {number} of {first.op}", text + "".join(f", {count} {name}" for name, count in counts if count)
    yield f"output of {first.kernel}", f"{first.output.nan} nan, {first.output.inf} inf", "none"
