from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.wiring import WiringFacts


@check(stage="update", confidence=0.9)
def nothing_trainable(run: RunContext, facts: WiringFacts) -> Results:
    """Nearly everything is frozen: nothing is trained, or only normalization layers.

    How it is detected: the optimizers hold no trainable parameter outside of normalization layers, and others are
    frozen.

    Usual cause: `requires_grad_(False)` after the new head was added, or on the full model.

    Fix: `model.head.requires_grad_(True)`, then create the optimizer.
    """
    if facts.trained_beside_norms or not facts.frozen_beside_norms:
        return
    yield run.finding(
        symptom=f"{'only normalization layers' if facts.trained else 'nothing'} can be trained; "
        f"{facts.frozen_beside_norms} other weights are frozen",
        evidence=[("trained weights outside of normalization layers", 0, "the head at least")],
    )
