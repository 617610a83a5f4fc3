from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.facts.weights import WeightsFacts


@check(stage="update", confidence=0.85, points_at=("construction", "optimizer"), since_step=1)
def new_head_frozen(run: RunContext, weights: WeightsFacts, exams: Every[LossFacts]) -> Results:
    """The new output layer of a classifier is frozen at its random initial weights.

    Why it matters: the layers before it must fit random class vectors. If only the trained weights are saved, the
    reloaded model has another random layer.

    How it is detected: the last linear layer is not trainable, and its weights have the distribution of an
    initialisation, unlike those of other frozen layers. The loss has as many classes as the layer has outputs.

    Exceptions: a weight that is shared with an embedding.

    Usual cause: `get_peft_model` freezes everything but the adapters, and `modules_to_save` does not name the new head;
    or everything is frozen after the head was added.

    Looks like: optim.params_missing, where the layer is trainable and in no optimizer.

    Fix: `LoraConfig(..., task_type="SEQ_CLS")` or `modules_to_save=["classifier"]`; by hand,
    `model.head.requires_grad_(True)` before the optimizer is made.

    Sources: huggingface/peft#577, huggingface/peft#1070.
    """
    if weights.frozen_at_random and any(weights.frozen_outputs == call.classes for _, e in exams for call in e.given):
        yield run.finding(
            symptom=f"layer {weights.frozen_at_random} ({weights.frozen_outputs} outputs) is frozen at random weights",
            where=Where(module=weights.frozen_at_random),
            evidence=[("trainable parameters of the last layer", 0, "its weight and bias")],
        )
