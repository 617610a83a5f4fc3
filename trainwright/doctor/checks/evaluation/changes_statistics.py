from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.function import FunctionFacts


@check(stage="buffers", confidence=0.9, needs=FunctionFacts)
def changes_statistics(run: RunContext) -> Results:
    """An evaluation changes the running statistics of the model.

    How it is detected: two passes in eval mode on a replay; the buffers that they write to.

    Exceptions: buffers that are no running statistics (counters, caches, codes) are reported only with -v.

    Usual cause: a normalisation updates its statistics without asking for `self.training`.

    Fix: update buffers only where `self.training` is True.
    """
    facts = run.measured(FunctionFacts)
    if facts.written:
        kinds = {name.rpartition(".")[2] for name in facts.written}
        yield run.finding(
            run.last_step,
            symptom=f"in eval mode a forward pass changes {listed(facts.written)}",
            severity="warning" if kinds & {"running_mean", "running_var", "num_batches_tracked"} else "info",
            where=Where(module=facts.written[0].rpartition(".")[0]),
            evidence=[("buffers written in eval mode", list(facts.written), [])],
        )
