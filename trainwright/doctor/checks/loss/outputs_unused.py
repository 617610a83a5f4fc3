from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.weights import WeightsFacts


@check(names_cause=False, stage="loss", confidence=0.8, since_step=1)
def outputs_unused(run: RunContext, facts: WeightsFacts) -> Results:
    """Some outputs of the model are never trained: no gradient reaches them.

    Why it matters: these outputs stay at their random initial weights.

    How it is detected: the gradients of the layers that make the outputs of the model, in the first 32 steps. The rows
    of some outputs are exactly 0 in all steps, and those of all others in none.

    Exceptions: idle outputs behind all others, such as a padded vocabulary or a variance that is not learned; gradients
    that the loop edits.

    Usual cause: a term of the loss is computed and not added, as when the sum is outside of the loop over the terms, so
    that only the last one counts; or the loss reads the wrong columns.

    Looks like: optim.weights_never_move, where a whole matrix has no gradient.

    Fix: add every term to the total that is passed to `backward()`; print `layer.weight.grad.abs().sum(1)`.

    Sources: samvanstroud/hepattn#23, alvinwan/neural-backed-decision-trees#26.
    """
    if idle := facts.idle_outputs:
        places = ", ".join(map(str, idle[:6])) + (", ..." if len(idle) > 6 else "")
        yield run.finding(
            max(1, facts.steps),
            symptom=f"{len(idle)} of the {facts.outputs} outputs of {facts.idle_module or 'the model'} never had a "
            f"gradient: {places}",
            where=Where(module=facts.idle_module),
            evidence=[("outputs without a gradient", len(idle), 0)],
        )
