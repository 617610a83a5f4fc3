from trainwright.doctor import RemedyTrial, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.calls import CallsFacts


@check(points_at=("optimizer", "construction"), stage="update", confidence=0.95, explains=("optim.lr_too_low",))
def params_missing(run: RunContext, facts: CallsFacts) -> Results:
    """Parameters get gradients, and no optimizer holds them.

    How it is detected: trainable parameters have a gradient, are in no optimizer (watched or not), and did not change
    between two examinations, unlike target networks and averages. Modules with up to 4 parameters outside of the
    watched model, such as a loss function with weights, count if the loss depends on them.

    Exceptions: reported only with -v where all parameters are missing (an image or a prompt is trained) or where the
    missing parameters of the model were trained before the run (a pretrained model on which only a head is trained).

    Usual cause: the optimizer was made before a layer was added, or from `model.head.parameters()`.

    Looks like: optim.stale_params, where the optimizer holds tensors that are not in the model.

    Fix: `torch.optim.AdamW(model.parameters())` once all layers exist, or `optimizer.add_param_group(...)`. If they
    should not be trained: `module.requires_grad_(False)`.

    Sources: HVPNeT#5, mace#525, 4uiiurz1/pytorch-adacos#10.
    """
    if not run.steps or any(each.stale for each in facts.optimizers):
        return
    if not facts.missing:
        return
    names = facts.missing
    yield run.finding(
        symptom=f"{len(names)} parameters get gradients, but no optimizer holds them: {listed(names, 4)}",
        cause="the weights of a loss function or a head outside of the model are in no optimizer"
        if facts.missing_outside
        else "",
        severity="info" if facts.missing_share == 1.0 or facts.missing_were_trained else "warning",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("their fraction of the trainable weights", facts.missing_share, 0.0)],
        trial=None if facts.missing_outside else RemedyTrial("with_optimizer", {"names": list(names)}),
    )
