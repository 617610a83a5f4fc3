from trainwright.doctor import RemedyTrial, Results, RunContext, Where, check
from trainwright.doctor.facts.calls import CallsFacts


@check(
    stage="update",
    severity="critical",
    confidence=0.97,
    explains=("model.frozen_in_train_mode", "optim.lr_too_low", "optim.zero_grad_before_step"),
)
def stale_params(run: RunContext, facts: CallsFacts) -> Results:
    """The optimizer holds tensors that are no longer in the model.

    How it is detected: tensors of the optimizer are not in the watched models. Parameters of these models get
    gradients, but are in no optimizer and do not change.

    Usual cause: the model was copied, wrapped, rebuilt or loaded with `assign=True` after the optimizer was made.

    Looks like: optim.zero_grad_before_step and optim.lr_too_low, where the optimizer holds the right tensors.

    Fix: make the optimizer last: after `.to(device)`, `deepcopy`, LoRA, FSDP and `load_state_dict(..., assign=True)`.

    Sources: accelerate#2665, accelerate#3256, pytorch/pytorch#107843, TransformerLens#1725.
    """
    stale = sum(each.stale for each in facts.optimizers)
    if not run.steps or not facts.missing or not stale:
        return
    held = sum(each.parameters for each in facts.optimizers)
    yield run.finding(
        symptom=f"{len(facts.missing)} parameters get gradients and do not change; {stale} of the optimizer's {held} "
        "tensors are not in the model",
        severity="critical" if facts.missing_share > 0.3 else "warning",
        where=Where(module=facts.missing[0].rpartition(".")[0] or None),
        evidence=[("tensors of the optimizer that are not in the model", stale, 0)],
        trial=RemedyTrial("with_optimizer", {"names": list(facts.missing)}),
    )
