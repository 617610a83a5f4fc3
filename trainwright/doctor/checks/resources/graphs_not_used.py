from trainwright.doctor import Results, RunContext, check
from trainwright.runs.records import NotCaptured


@check(stage="loop", severity="info")
def graphs_not_used(run: RunContext) -> Results:
    """The recipe has `graphs: true`, but the steps run eagerly, without CUDA graphs.

    How it is detected: the engine reports why it did not capture a step, or why it stopped replaying its graph.

    Usual cause: the step reads a value on the host (`.item()`), draws from Python's random generator, uses an optimizer
    that is not fused, or the batches have many different shapes.

    Fix: remove the reported obstacle, or leave `graphs` out. The training is correct either way.

    Sources: docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (constraints);
    pytorch.org/blog/accelerating-pytorch-with-cuda-graphs.
    """
    reported = [each for each in run.records if isinstance(each, NotCaptured)]
    if reported:
        yield run.finding(
            max(1, reported[-1].step),
            symptom=f"steps run eagerly, without CUDA graphs: {reported[-1].reason}",
            evidence=[("capture of a step", reported[-1].reason, "every step can be captured")],
        )
