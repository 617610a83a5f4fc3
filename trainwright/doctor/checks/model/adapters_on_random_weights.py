"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import PretrainedFacts


@check(stage="forward", severity="warning", confidence=0.95, needs=PretrainedFacts)
def adapters_on_random_weights(run: RunContext) -> Iterator[Result]:
    """Low-rank adapters are trained on a frozen base model with random weights.

    Why it matters: the base has learned nothing, and it stays frozen. Adapters of low rank cannot replace it.

    How it is detected: a recipe builds the model without pretrained weights and has `model.lora`.

    Exceptions: a test of the setup.

    Usual cause: `architecture` instead of `name` in `model: {use: hf, ...}`.

    Fix: `model: {use: hf, name: FOLDER}`, or leave `model.lora` out.

    Sources: https://arxiv.org/abs/2106.09685.
    """
    facts = run.latest(PretrainedFacts)
    if facts is None or not facts.adapters:
        yield NotApplicable("the model has no adapters")
    elif facts.is_random:
        yield run.finding(
            run.last_step,
            symptom=f"{facts.adapters} adapters are trained on frozen weights that are random",
            since_step=1,
            evidence=[("base model has pretrained weights", False, True)],
        )
