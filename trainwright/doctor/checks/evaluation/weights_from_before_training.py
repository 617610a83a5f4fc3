from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.unmoved import UnmovedFacts

MIN_STEPS = 20
MIN_EVALUATIONS = 2


@check(stage="loop", confidence=0.85)
def weights_from_before_training(run: RunContext, facts: UnmovedFacts) -> Results:
    """The evaluated model has the weights from before the training, although the trained weights have changed.

    Why it matters: the metrics, and a checkpoint selected by them, do not describe the trained model.

    How it is detected: in at least two evaluations, the last one after 20 steps, the evaluated model has its initial
    weights. It is a copy of the model in a variable of the loop, or the model itself in passes without gradients whose
    outputs are compared with targets.

    Exceptions: copies that are called in every fourth step or more often, or whose outputs training uses, such as
    teachers, target networks and reference policies.

    Usual cause: a moving average whose `update` is never called, or that is evaluated before its first update; a
    separate evaluation model that never gets the trained weights.

    Looks like: optim.average_does_not_follow, where the average is updated wrongly.

    Fix: call `ema.update(model)` after each `optimizer.step()`.

    Sources: huggingface/pytorch-image-models#1831, lucidrains/DALLE2-pytorch#131.
    """
    for each in facts.evaluations:
        if len(each.steps) < MIN_EVALUATIONS or each.steps[-1] < MIN_STEPS:
            continue
        what = f"a copy of the model ({each.kind})" if each.is_copy else f"the model ({each.kind})"
        yield run.finding(
            symptom=f"{what} was evaluated {len(each.steps)} times with the weights from before the training",
            since_step=max(1, each.steps[0]),
            where=Where(source=each.source),
            evidence=[("evaluated after steps", list(each.steps))],
        )
