from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.calls import AttributesFacts


@check(points_at="attribute", stage="loop", confidence=0.9, since_step=1)
def attribute_without_effect(run: RunContext, facts: AttributesFacts) -> Results:
    """An attribute is set that nothing reads: weights are not frozen, or the learning rate does not change.

    How it is detected: parameters that are trained and have an attribute whose name resembles `requires_grad`; a module
    with `requires_grad = False` whose parameters are trained; an optimizer of torch with an attribute `lr`.

    Exceptions: a module whose class reads the attribute.

    Usual cause: `param.require_grad = False`, `module.requires_grad = False` or `optimizer.lr = ...`.

    Fix: `param.requires_grad = False`, `module.requires_grad_(False)`, `optimizer.param_groups[0]["lr"] = ...`.

    Sources: udacity/deep-learning-v2-pytorch#12; discuss.pytorch.org, "requires_grad on a module".
    """
    if not facts.idle:
        return
    first = facts.idle[0]
    what = f"{first.count} parameters are trained" if first.known.startswith("requires") else "the learning rate stays"
    yield run.finding(
        symptom=f"the attribute {first.name} of {first.owner} is read by nothing: {what}",
        remedy=f"set {first.known}",
        where=Where(module=first.owner.removesuffix(".weight").removesuffix(".bias")),
        evidence=[(f"set on {each.owner}", each.name, each.known) for each in facts.idle[:8]],
    )
