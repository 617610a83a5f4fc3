from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts

MAX_SPACING = 2.0**-10  # Spacing of the values in standard deviations. Standardized float32 has 2**-22


@check(points_at=("dataset", "loader"), stage="input", confidence=0.85, since_step=1)
def offset_of_input(run: RunContext, facts: BatchFacts) -> Results:
    """An input has a large offset, so float32 cannot represent its variation.

    Why it matters: close values become equal. A Unix time of today has steps of 128 seconds in float32.

    How it is detected: neighbouring float32 values at the largest value of an input are more than a thousandth of its
    standard deviation apart.

    Exceptions: inputs in 16 bits, whose steps are always large.

    Usual cause: time stamps, or coordinates in metres of a global grid, are converted to float32 before the first value
    or the origin is subtracted.

    Fix: subtract in float64, then convert to float32: `((t.double() - t0) / 3600).float()`, with a constant `t0` for
    all samples.

    Sources: open-mmlab/mmdetection3d#296, aimhubio/aim PR 1494.
    """
    varying = [(n, each) for n, each in enumerate(facts.inputs) if (each.std or 0.0) > 0.0]
    if not varying:
        yield NotApplicable("no input has floating-point values that vary")
    for number, each in varying:
        if each.spacing > MAX_SPACING * (each.std or 0.0):
            yield run.finding(
                symptom=f"input {number} is about {each.mean:.6g} and varies by {each.std:.3g}; float32 has steps of "
                f"{each.spacing:.3g} there",
                evidence=[("steps of float32, in standard deviations", each.spacing / (each.std or 1.0), MAX_SPACING)],
            )
