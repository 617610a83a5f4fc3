from trainwright.doctor import RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.wiring import WiringFacts


@check(stage="update", confidence=0.9, needs=WiringFacts, explains=("optim.weights_never_move",))
def nothing_trainable(run: RunContext) -> Results:
    """Nearly everything is frozen: nothing is trained, or only normalisation layers.

    How it is detected: the trainable parameters that an optimizer holds, without those of normalisation layers.

    Usual cause: `requires_grad_(False)` after the new head was added, or on all of the model.

    Looks like: a frozen backbone with a head or adapters that train, which is fine.

    Fix: `model.head.requires_grad_(True)`, then make the optimizer.
    """
    facts = run.measured(WiringFacts)
    if facts.trained_beside_norms or not facts.frozen_beside_norms:
        return
    yield run.finding(
        run.every(WiringFacts)[-1][0],
        symptom=f"{'only normalisation layers' if facts.trained else 'nothing'} can be trained; "
        f"{facts.frozen_beside_norms} other weights are frozen",
        evidence=[("trained weights that belong to no normalisation", 0, "the head at least")],
        trial=RemedyTrial("unfreeze"),
    )
