from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.calls import KeptFacts

MIN_LOADS = 2


@check(stage="loop", confidence=0.9)
def loaded_from_itself(run: RunContext, facts: KeptFacts) -> Results:
    """A module is loaded again and again with its own weights, so the load does nothing.

    Why it matters: a target network that never changes returns the values of its initialization, so what is learned
    from it is wrong.

    How it is detected: `load_state_dict()` is called at two or more steps with the live tensors of the same module.

    Usual cause: the target network is the online network itself (`target = online` without a copy), or
    `target.load_state_dict(target.state_dict())` instead of the state of the online network.

    Looks like: checkpoint.kept_state_changes, where a state was kept without a copy and restored later.

    Fix: `target = copy.deepcopy(online)`, then `target.load_state_dict(online.state_dict())`.

    Sources: thesouther/MARL#8, higgsfield/RL-Adventure#32.
    """
    if len(set(facts.from_itself)) >= MIN_LOADS and not facts.changed:
        yield run.finding(
            symptom=f"{facts.loaded_module} was loaded from its own tensors {len(facts.from_itself)} times",
            since_step=facts.from_itself[0],
            where=Where(module=facts.loaded_module, source=facts.loaded_at),
            evidence=[("loads that changed nothing", len(facts.from_itself), 0)],
        )
