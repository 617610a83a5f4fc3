from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import ResumeFacts


@check(points_at="load", stage="input", confidence=0.95)
def weights_not_loaded(run: RunContext, facts: ResumeFacts) -> Results:
    """Weights of the model are missing in the state that is loaded, and `strict=False` hides it.

    How it is detected: the missing keys of `load_state_dict` differ from the keys of the loaded state only by a prefix,
    or are at least half of the model. Or a state among the variables of the loop fits the model except for a prefix,
    and no module has its values.

    Exceptions: a part that is new, such as a head; the state of an adapter without its frozen weights.

    Usual cause: names that differ by `module.`, `_orig_mod.` or `model.`.

    Fix: remove the prefix, for example `{k.removeprefix("module."): v for k, v in state.items()}`, or load the state of
    this model. Use `strict=True`.

    Sources: Lightning #4333, torchgeo/torchgeo#4036.
    """
    for load in facts.loads:
        if load.prefix is None and 2 * len(load.missing) < load.tensors:
            continue
        yield run.finding(
            max(1, load.step),
            symptom=f"{len(load.missing)} of {load.tensors} tensors of the model were not in the state that was loaded",
            cause=f"the names differ by {load.prefix!r}" if load.prefix else "the state is of another model",
            severity="critical" if len(load.missing) == load.tensors else None,
            sure=None if load.prefix is not None else 0.8,
            since_step=max(1, load.step),
            evidence=[("missing keys", list(load.missing[:4])), ("unexpected keys", list(load.unexpected[:4]))],
        )
