from trainwright.doctor import Results, RunContext, Where
from trainwright.doctor.facts.loss import LossFacts, sign_of
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check(points_at="criterion")
def ctc_infeasible(run: RunContext) -> Results:
    """A CTC target is too long for its input: no alignment exists, so the loss is infinite.

    Why it matters: with `zero_infinity=True` these samples count as 0 and are never learned; the loss looks normal.

    How it is detected: the step is replayed operation by operation; `ctc_loss` is infinite for finite
    log-probabilities. Or, by the lengths that `ctc_loss` gets, at least 5 % of the samples have fewer frames than the
    number of labels plus repeated labels.

    Usual cause: `input_length < target_length + repeats` for a sample, often after subsampling.

    Fix: subsample less, and remove the few samples that are still too short. `nn.CTCLoss(zero_infinity=True)` only
    hides them.

    Sources: wenet #2299, pytorch/pytorch#31557.
    """
    cause = "a target is too long for its input: no alignment exists"
    yield from traced_by(run, {"ctc_infeasible": Mechanism(cause, guard="zero_infinity")})
    sign = sign_of(run.every(LossFacts), "no_alignment")
    if sign is not None:
        yield run.finding(
            severity="warning",
            symptom=f"{sign.value:.0%} of the samples have fewer frames than labels: CTC cannot align them, and they "
            "are not learned",
            cause="the input is subsampled too much, or its lengths are wrong",
            where=Where(op=sign.op, source=sign.line),
            evidence=[("samples without an alignment", sign.value, 0)],
        )
