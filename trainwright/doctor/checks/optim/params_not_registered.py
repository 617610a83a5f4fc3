from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.wiring import WiringFacts


@check(points_at="construction", stage="update", severity="critical", confidence=0.95)
def params_not_registered(run: RunContext, facts: WiringFacts) -> Results:
    """A layer is used, but `parameters()` does not contain it.

    Why it matters: it is not trained, not moved by `.to(device)`, and not in the checkpoint.

    How it is detected: a leaf of the autograd graph is in an attribute of a module, but is not a registered parameter.

    Usual cause: layers in a Python list, dict or plain attribute are not registered.

    Fix: `nn.ModuleList`, `nn.ModuleDict` or `nn.ParameterList` instead of the list; `nn.Parameter` for a tensor; then
    make the optimizer.

    Sources: pytorch/pytorch#666, #38639.
    """
    if facts.unregistered:
        yield run.finding(
            symptom=f"tensors in {listed(facts.unregistered)} get gradients but are no parameters of the model",
            where=Where(module=facts.unregistered[0]),
            evidence=[("values that autograd reaches and parameters() does not", facts.unregistered_values, 0)],
        )
