from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.wiring import WiringFacts


@check(stage="update", confidence=0.9)
def nothing_trainable(run: RunContext, facts: WiringFacts) -> Results:
    """Nearly everything is frozen: nothing is trained, or only normalisation layers.

    How it is detected: the trainable parameters that an optimizer holds, without those of normalisation layers.

    Usual cause: `requires_grad_(False)` after the new head was added, or on all of the model.

    Looks like: a frozen backbone with a head or adapters that train, which is fine.

    Fix: `model.head.requires_grad_(True)`, then make the optimizer.
    """
    if facts.trained_beside_norms or not facts.frozen_beside_norms:
        return
    yield run.finding(
        symptom=f"{'only normalisation layers' if facts.trained else 'nothing'} can be trained; "
        f"{facts.frozen_beside_norms} other weights are frozen",
        evidence=[("trained weights that belong to no normalisation", 0, "the head at least")],
    )
