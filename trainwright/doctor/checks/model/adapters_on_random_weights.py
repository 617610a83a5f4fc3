from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import PretrainedFacts


@check(stage="forward", severity="warning", confidence=0.95, since_step=1)
def adapters_on_random_weights(run: RunContext, facts: PretrainedFacts) -> Results:
    """Low-rank adapters are trained on a frozen base model with random weights.

    Why it matters: the base has learned nothing, and it stays frozen. Adapters of low rank cannot replace it.

    How it is detected: a recipe builds the model without pretrained weights and has `model.lora`.

    Exceptions: a test of the setup.

    Usual cause: `architecture` instead of `name` in `model: {use: hf, ...}`.

    Fix: `model: {use: hf, name: FOLDER}`, or leave `model.lora` out.

    Sources: https://arxiv.org/abs/2106.09685.
    """
    if not facts.adapters:
        yield NotApplicable("the model has no adapters")
    elif facts.is_random:
        yield run.finding(
            symptom=f"{facts.adapters} adapters are trained on frozen weights that are random",
            evidence=[("base model has pretrained weights", False, True)],
        )
