from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def ctc_infeasible(run: RunContext) -> Results:
    """A CTC target is too long for its input: no alignment exists, so the loss is infinite.

    How it is detected: the step is replayed operation by operation; `ctc_loss` is infinite for finite
    log-probabilities.

    Usual cause: `input_length < target_length + repeats` for a sample, often after subsampling.

    Fix: `nn.CTCLoss(zero_infinity=True)`, or leave out samples that are too short after subsampling.

    Sources: wenet #2299.
    """
    cause = "a target is too long for its input: no alignment exists"
    yield from traced_by(run, {"ctc_infeasible": Mechanism(cause, guard="zero_infinity")})
