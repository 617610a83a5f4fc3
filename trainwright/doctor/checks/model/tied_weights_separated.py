from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import TiesFacts


@check(stage="update", confidence=0.95, needs=TiesFacts)
def tied_weights_separated(run: RunContext) -> Results:
    """Tied weights are no longer one parameter, or were never one.

    How it is detected: the identity and the memory of every parameter, at the start and at each examination.

    Usual cause: one of them was replaced (`load_state_dict(assign=True)`, a new layer, `.to()` of a part), or they were
    tied through `.data`: then each has a gradient of its own, and the optimizer updates the memory twice.

    Fix: assign the parameter itself, after loading: `head.weight = embedding.weight`.
    """
    facts = run.measured(TiesFacts)
    pairs = facts.broken or facts.split
    if not (pairs or facts.tied):
        yield NotApplicable("no weights are shared")
    elif pairs:
        yield run.finding(
            run.last_step,
            symptom=f"{listed(pairs[0])} were one parameter at the start and are several now"
            if facts.broken
            else f"{listed(pairs[0])} are several parameters over the same memory",
            where=Where(module=pairs[0][0].rpartition(".")[0]),
            evidence=[("names of one weight", list(pairs[0]), "one parameter")],
        )
