from trainwright.doctor import Results, RunContext, check
from trainwright.runs.records import NotCaptured


@check(stage="loop", severity="info")
def graphs_not_used(run: RunContext) -> Results:
    """The recipe asks for CUDA graphs (`graphs: true`), and the steps run eagerly.

    How it is detected: the engine reports why it did not capture a step, or stopped replaying it.

    Usual cause: the step needs the host: it reads a value (`.item()`), draws from Python's random generator, uses an
    optimizer that is not fused, or gets batches whose shapes keep changing.

    Fix: change what the reason names, or leave `graphs` out of the recipe. The training is correct either way.

    Sources: docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (constraints);
    pytorch.org/blog/accelerating-pytorch-with-cuda-graphs.
    """
    reported = [each for each in run.records if isinstance(each, NotCaptured)]
    if reported:
        yield run.finding(
            max(1, reported[-1].step),
            symptom=f"steps run eagerly, without CUDA graphs: {reported[-1].reason}",
            evidence=[("the reason", reported[-1].reason, "every step can be captured")],
        )
