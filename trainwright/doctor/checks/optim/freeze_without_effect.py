from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import WeightsFacts


@check(points_at=("construction", "optimizer"), stage="update", confidence=0.95, since_step=1)
def freeze_without_effect(run: RunContext, facts: WeightsFacts) -> Results:
    """A part of the model should be frozen and is trained: `requires_grad = False` was set where it has no effect.

    How it is detected: a module has an attribute `requires_grad` that is False, or a parameter has one with a similar
    name, such as `require_grad`. Python creates the attribute, and PyTorch does not read it. An optimizer holds the
    weights, and they require a gradient.

    Usual cause: `model.backbone.requires_grad = False` instead of `requires_grad_(False)`; a missing letter.

    Fix: `model.backbone.requires_grad_(False)` before the optimizer is made.

    Sources: CSCYQJ/MICCAI23-ProtoContra-SFDA#18, udacity/deep-learning-v2-pytorch#12.
    """
    if names := facts.frozen_by_name:
        yield run.finding(
            symptom=f"{listed(names)} should be frozen, but the optimizer trains the weights",
            where=Where(module=names[0].rpartition(".")[0] if names[0].endswith((".weight", ".bias")) else names[0]),
            evidence=[("modules and parameters with an attribute that does not freeze them", len(names), 0)],
        )
