import math

from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.precision import SeenNonfinite, TraceFacts
from trainwright.doctor.nonfinite import Mechanism, finding_of, skipped_by_scaler, traced_at, traces


@check(names_cause=False, stage="backward", severity="critical", confidence=0.5)
def nonfinite_step(run: RunContext) -> Results:
    """A loss, a gradient or an update is NaN or infinite, and no operation of the step explains it.

    How it is detected: the step is replayed operation by operation. The replay is finite or not possible, an operation
    writes a non-finite value, or a weight or state was not finite before the step.

    Usual cause: code that writes to weights or gradients outside of the backward pass, or random numbers that differ in
    the replay.

    Looks like: the other checks of steps that are not finite, each of which names an operation.

    Fix: go back to a checkpoint whose weights are finite. Run once with `torch.autograd.set_detect_anomaly(True)`,
    which names the backward operation. Search for code that writes to gradients, and for unseeded random numbers.
    """
    for found in traces(run):
        first = found[2]
        if first.kind == "op" and first.what in ("nan_written", "inf_written"):
            yield finding_of(
                run,
                found,
                Mechanism(
                    "{op}{place} writes a value that is not finite", fix="correct the value that this line writes"
                ),
            )
            return
        if first.kind not in ("op", "input", "target") and not (
            first.kind == "buffer" and ".running_" in f".{first.name}"
        ):
            fix = "find the code that last wrote it"
            yield finding_of(run, found, Mechanism("{kind} {name} was {what} before the step", fix=fix))
            return
    for step, seen in run.every(SeenNonfinite):
        trace = traced_at(run, step)
        if not seen.bad or seen.inputs or trace is None or skipped_by_scaler(run, step):
            continue
        if isinstance(trace, TraceFacts) and (trace.first or trace.finite_without_scale):
            continue
        if (
            isinstance(trace, TraceFacts)
            and not seen.num_gradients
            and all(map(math.isfinite, trace.losses or (math.nan,)))
        ):
            continue  # precision.overflow
        names = seen.gradients
        why = "the replay of the step is finite" if isinstance(trace, TraceFacts) else f"it was not replayed: {trace}"
        yield run.finding(
            step,
            symptom=f"NaN or infinite values in step {step}",
            cause=why + (f"; the gradients of {listed(names)} were not finite" if names else ""),
            where=Where(module=names[0].rpartition(".")[0] if len(names) == 1 else None),
            evidence=[("non-finite gradients", seen.num_gradients, 0)],
        )
