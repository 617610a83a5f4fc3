from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.facts.unmoved import HeadFacts


@check(stage="update", confidence=0.85, points_at=("construction", "optimizer"), since_step=1)
def new_head_frozen(run: RunContext, head: HeadFacts, exams: Every[LossFacts]) -> Results:
    """The new output layer of a classifier or regressor is frozen at its random initial weights.

    Why it matters: all layers before it must fit random class vectors. Adapters with few parameters cannot do this.

    How it is detected: the last linear layer is not trainable, in no optimizer, and its weights have the distribution
    of an initialisation. Gradients flow through it, and the loss has as many classes as the layer has outputs.

    Exceptions: the output layer of a language model, which is as wide as its vocabulary; a fixed target network,
    through which no gradient flows.

    Usual cause: `get_peft_model` freezes everything but the adapters, and `modules_to_save` does not name the new head;
    or everything is frozen after the head was added.

    Looks like: optim.params_missing, where the layer is trainable and in no optimizer.

    Fix: `LoraConfig(..., task_type="SEQ_CLS")` or `modules_to_save=["classifier"]`; by hand,
    `model.head.requires_grad_(True)` before the optimizer is made.

    Sources: huggingface/peft#577, huggingface/peft#1070, superkevingit in TNI-playground/Fed_HeLLo#2.
    """
    widths = {call.classes or (call.shape[-1] if call.shape else 0) for _, facts in exams for call in facts.given}
    if head.outputs in widths:
        yield run.finding(
            symptom=f"{head.module} with {head.outputs} outputs is frozen at its initial weights, while {head.trained} "
            "other parameters are trained",
            where=Where(module=head.module),
            evidence=[("trainable parameters of the last layer", 0, "its weight and bias")],
        )
