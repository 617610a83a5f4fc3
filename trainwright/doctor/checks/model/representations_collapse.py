from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.layers import ModulesFacts

MAX_SPREAD = 0.2  # Spread of outputs over samples / size of the outputs. After a collapse, noise still causes a tenth.
MIN_FALL_RATIO = 2.5  # Initial spread / current spread


@check(stage="forward", confidence=0.8)
def representations_collapse(run: RunContext, facts: ModulesFacts) -> Results:
    """The representations collapse: all samples get nearly the same vector.

    Why it matters: the loss reaches its minimum without anything being learned.

    How it is detected: if the loss compares outputs of the model only with each other, the spread of the output vectors
    over the samples, relative to their size, falls by a factor of 2.5 and below 0.2.

    Usual cause: a similarity loss without a stop-gradient on one side (SimSiam, BYOL), or without negatives. Its
    trivial solution is a constant vector.

    Looks like: model.output_same_for_all_samples, which is there from the start.

    Fix: detach one side: `F.cosine_similarity(p1, z2.detach())`; or add negatives or a variance term.

    Sources: PatrickHua/SimSiam#39, lightly-ai/lightly#559.
    """
    spreads = facts.spreads
    if len(spreads) < 3:
        yield NotApplicable("the loss compares the outputs with data, or they are no vectors")
        return
    first, last = max(each.spread for each in spreads[:3]), spreads[-2:]
    if all(each.spread < min(MAX_SPREAD, first / MIN_FALL_RATIO) for each in last):
        yield run.finding(
            last[-1].step,
            symptom=f"the outputs for a batch differ by {last[-1].spread:.2g} of their size, at first by {first:.2g}",
            since_step=next(each.step for each in spreads if each.spread < first / MIN_FALL_RATIO),
            evidence=[("spread of the outputs", last[-1].spread, first)],
        )
