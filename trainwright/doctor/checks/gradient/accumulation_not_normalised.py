from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.loss import AccumulationFacts


@check(
    points_at="backward", stage="loss", confidence=0.9, explains=("gradient.clip_always_active", "optim.lr_too_high")
)
def accumulation_not_normalised(run: RunContext, exams: Every[AccumulationFacts]) -> Results:
    """The losses of accumulated micro-batches are not divided by their number, or are divided by a wrong one.

    Why it matters: the gradient grows with the number of micro-batches. With clipping, every step is clipped.

    How it is detected: a replay computes, for each micro-batch of a step, the derivative of the tensor that
    `backward()` was called on with respect to the mean loss of the micro-batch. The sum of these derivatives must be 1;
    below 0.9 or above 1.1 is reported.

    Exceptions: losses that are sums, several losses on one batch, and gradients that the loop scales by hand. A shorter
    last step of an epoch is reported only with -v.

    Usual cause: `loss.backward()` without `/ accumulation`, or a shorter last step of an epoch is divided by it, too.

    Fix: `(loss / accumulation).backward()`. If micro-batches have unequal numbers of targets, use sums
    (`reduction="sum"`) divided by the number of targets in all micro-batches of the step.

    Sources: guided-diffusion#111, verl#436, huggingface/transformers#34191.
    """
    by_hand = {each.step for each in run.steps if each.values.get("edited")}
    seen = [
        (step, [each for each in facts.weights if each is not None])
        for step, facts in exams
        if facts.is_plain and not facts.discarded and step not in by_hand and facts.is_as_recorded
        and facts.weights and None not in facts.weights
    ]  # fmt: skip
    if not seen:
        yield NotApplicable("no step of several micro-batches whose losses are means was examined")
        return
    off = [(step, weights) for step, weights in seen if not 0.9 < sum(weights) < 1.1]
    if not off:
        return
    step, weights = off[-1]
    of_transformers = any(facts.of_transformers for _, facts in exams)
    is_sum = all(0.9 <= each <= 1.1 for each in weights)
    yield run.finding(
        step,
        symptom=f"the gradient of a step is {sum(weights):.3g} times that of the mean over its {len(weights)} "
        "micro-batches",
        cause="the Trainer leaves the division to a model whose forward takes **kwargs (num_items_in_batch)"
        if of_transformers
        else "",
        remedy="`trainer.model_accepts_loss_kwargs = False` before train(), or gradient_accumulation_steps=1 with a "
        "larger batch"
        if of_transformers
        else f"call backward() on loss / {len(weights)}"
        if is_sum
        else "divide by the number of micro-batches in this step",
        severity="warning" if is_sum or len(off) == len(seen) else "info",
        since_step=off[0][0],
        evidence=[
            ("sum of the factors of the micro-batch losses", sum(weights), 1.0),
            ("steps like this", f"{len(off)} of {len(seen)}"),
        ],
    )
