from trainwright.doctor import NotApplicable, Results, RunContext, check


@check(names_cause=False, stage="loop", confidence=0.5)
def not_reproducible(run: RunContext) -> Results:
    """A recorded step, replayed by `trainwright replay`, does not give the same bits.

    How it is detected: `trainwright replay` compares losses, gradients and weights of the replay with the record.

    Usual cause: another machine, library or code; an operation that is not deterministic; random numbers that torch
    does not draw; or faulty hardware, if two replays in the same process differ.

    Fix: `torch.use_deterministic_algorithms(True)`, and draw random numbers from torch only.

    Sources: PyTorch documentation, "Reproducibility".
    """
    yield NotApplicable("it is found by `trainwright replay`, not in a run")
