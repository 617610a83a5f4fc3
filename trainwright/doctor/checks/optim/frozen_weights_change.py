from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import WeightsFacts


@check(stage="update", confidence=0.8)
def frozen_weights_change(run: RunContext, facts: WeightsFacts) -> Results:
    """A weight with `requires_grad=False` changes.

    How it is detected: checksums of the weights that an optimizer holds and that have `requires_grad=False`.

    Usual cause: its last gradient is still there, so the optimizer continues to apply momentum or weight decay.

    Looks like: optim.frozen_rows_decay, where only rows are frozen.

    Fix: set `p.grad = None` when it is frozen, or make the optimizer from the trainable weights only.
    """
    if not facts.frozen:
        yield NotApplicable("no optimizer holds a frozen tensor")
    elif facts.frozen_moved:
        names = facts.frozen_moved
        yield run.finding(
            symptom=f"{listed(names)} cannot be trained (requires_grad is False) and changes",
            where=Where(module=names[0].rpartition(".")[0]),
            evidence=[("frozen tensors that changed", len(names), 0)],
        )
