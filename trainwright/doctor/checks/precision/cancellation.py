from trainwright.doctor import ExperimentRequest, Results, RunContext, Where, by_experiment, check, listed
from trainwright.doctor.facts.precision import FormatFacts, LossInFp32Facts

MIN_GRADIENT_ERROR = 0.05  # Relative error of the gradients
RUN_LENGTH_RATIO = 3  # The experiment is requested again when the run is this many times as long


@check(stage="loss")
def cancellation(run: RunContext, formats: FormatFacts) -> Results:
    """The loss subtracts nearly equal numbers in 16 bits, so its gradients have large rounding errors.

    Why it matters: a KL divergence in bfloat16 has gradients that are off by 9 to 19 %. All values are finite, so there
    is no error.

    How it is detected: two steps are replayed with everything after the models in float32. In both, the gradients of
    the step differ from those of the replay by more than 5 %. Rounding alone causes a difference of 1 or 2 %.

    Usual cause: `log_softmax`, KL divergence, means, variances or long sums on 16-bit outputs.

    Looks like: precision.fp16_underflow, where the gradients are exactly 0.

    Fix: compute the loss in float32: `F.log_softmax(logits.float(), dim=-1)`, and everything after it.

    Sources: speculators #788.
    """
    if not formats.loss_ops:
        return
    tried = [each.step for each in by_experiment(run.records).get(LossInFp32Facts.experiment, [])]
    if run.steps and (not tried or run.last_step >= RUN_LENGTH_RATIO * tried[-1]):
        yield ExperimentRequest(LossInFp32Facts.experiment)
    seen = run.every(LossInFp32Facts)
    if not seen or (seen[-1][1].error or 0.0) < MIN_GRADIENT_ERROR:
        return
    step, facts = seen[-1]
    if len(seen) > 1 and (seen[-2][1].error or 0.0) < MIN_GRADIENT_ERROR:
        yield ExperimentRequest(LossInFp32Facts.experiment, max(1, step - 4))  # one batch may cancel by chance
        return
    dtype, ops = formats.dtype or "bfloat16", formats.loss_ops
    yield run.finding(
        step,
        symptom=f"the gradients are {facts.error:.0%} off because the loss is computed in {dtype}",
        cause=f"in {dtype}, {listed(ops)} round away the differences of nearly equal numbers",
        where=Where(op=ops[-1] if len(ops) == 1 else None, dtype=dtype),
        evidence=[
            ("distance of the gradients from those of a float32 loss", facts.error, "< 0.02"),
            ("loss", facts.loss, facts.loss_in_fp32),
        ],
    )
