from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.calls import KeptFacts

USES = {"load": "loaded back", "save": "saved", "": "still kept at the end"}


@check(stage="loop", confidence=0.95)
def kept_state_changes(run: RunContext, facts: KeptFacts) -> Results:
    """A kept `state_dict()` changes with the training, because its tensors are the live weights.

    Why it matters: the "best" weights are those of the last step.

    How it is detected: by the version counters of the tensors in each dictionary that `state_dict()` of a watched model
    returns. They are compared when the dictionary or a shallow copy of it is loaded or saved, or at the end if it still
    exists. A model that is loaded with its own live tensors, taken at an earlier step, is reported as well.

    Exceptions: a dictionary that was copied or saved before the next update, and one left over from the last
    evaluation.

    Usual cause: `best = model.state_dict()`, which holds references and no copies. So do `dict(model.state_dict())`
    and, of a model on the CPU, `{k: v.cpu() for k, v in model.state_dict().items()}`.

    Fix: `best = copy.deepcopy(model.state_dict())`, or `{k: v.clone() for k, v in model.state_dict().items()}`.

    Sources: the PyTorch tutorial "Saving and loading models", note on `best_model_state`; WenjieDu/PyPOTS#667.
    """
    if not facts.taken:
        yield NotApplicable("no state_dict() was called on a watched model")
    elif facts.changed:
        kept = facts.changed[0]
        yield run.finding(
            symptom=f"the state_dict() of step {kept.taken} is {USES[kept.used]} after step {kept.used_at}, but it "
            f"contains the weights of step {kept.used_at}",
            sure=0.95 if kept.used == "load" else 0.85 if kept.used else 0.6,
            since_step=kept.taken,
            where=Where(source=kept.source),
            evidence=[("updates since it was taken", kept.used_at - kept.taken, 0)],
        )
