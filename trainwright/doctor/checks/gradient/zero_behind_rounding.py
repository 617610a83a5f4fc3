from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.layers import ModulesFacts
from trainwright.doctor.facts.weights import WeightsFacts


@check(stage="backward", severity="critical", confidence=0.95, since_step=1)
def zero_behind_rounding(run: RunContext, facts: ModulesFacts, weights: WeightsFacts) -> Results:
    """Gradients are exactly 0 before a rounding operation, so the weights there do not learn.

    How it is detected: the autograd graph of the loss contains `round`, `floor`, `ceil`, `trunc` or `sign`. Parameters
    that the loss reaches only through this function have a gradient of exactly 0 in every examined step.

    Exceptions: a straight-through estimator, which leaves another path.

    Usual cause: quantization or a hard threshold in `forward`. The derivative of rounding is 0 everywhere.

    Looks like: gradient.graph_cut, where there is no gradient at all.

    Fix: a straight-through estimator: `code = z + (torch.round(z) - z).detach()`.

    Sources: Justin-Tan/generative-compression#27, hahnyuan/PTQ4ViT#6.
    """
    if weights.updates < 2:
        return
    names = [name for name in facts.behind_flat if name in weights.zero_gradients]
    if names:
        yield run.finding(
            weights.steps,
            symptom=f"the gradients of {listed(names)} are exactly 0: the loss depends on them only through "
            f"{facts.flat}()",
            where=Where(module=names[0].rpartition(".")[0], op=facts.flat),
            evidence=[("weights whose gradient is always 0", len(names), 0)],
        )
