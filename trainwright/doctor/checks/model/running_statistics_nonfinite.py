from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.precision import SeenNonfinite, TraceFacts
from trainwright.doctor.nonfinite import traced_at


@check(stage="buffers", severity="critical", confidence=0.99, explains=("precision.nonfinite_step",))
def running_statistics_nonfinite(run: RunContext) -> Results:
    """The running mean or variance of a BatchNorm is not finite: every evaluation from now on is NaN.

    How it is detected: running statistics are read after a step that was not finite, and after forward passes in
    training mode that no backward pass follows.

    Usual cause: a forward pass in training mode over a bad batch. Skipping the update does not help: the forward pass
    has written the statistics already. Training does not read them, so the loss shows nothing.

    Fix: find the batch by its input, not by its loss, and skip it before the forward pass. Then call
    `bn.reset_running_stats()`, and run some forward passes in training mode over good batches.

    Sources: pytorch/pytorch #1206, SparseConvNet #190.
    """
    for step, seen in run.every(SeenNonfinite):
        if not seen.poisoned:
            continue
        trace = traced_at(run, step)
        first = trace.first if isinstance(trace, TraceFacts) else None
        yield run.finding(
            step,
            symptom=f"running statistics of {listed(seen.poisoned)} are not finite since step {step}",
            cause="a forward pass in training mode updated them"
            + (": non-finite values in the input" if first and first.kind == "input" else ""),
            where=Where(
                module=seen.poisoned[0],
                dtype=first.dtype if first else "float32",
                sample_ids=first.ids if first else (),
            ),
            evidence=[("modules with non-finite statistics", len(seen.poisoned), 0)],
        )
