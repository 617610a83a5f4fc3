from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", confidence=0.85, needs=LayersFacts)
def attention_weights_sum(run: RunContext) -> Results:
    """The weights of attention do not add up to 1 over the values that they weigh.

    How it is detected: the result of a softmax that is multiplied with values, in the examined steps: in half
    of its rows the sum over the values is off by more than 0.05.

    Usual cause: the softmax is taken over another dimension than that of the keys.

    Fix: `softmax(scores, dim=-1)` for scores of (..., queries, keys), then `weights @ values`.
    """
    step, now = run.every(LayersFacts)[-1]
    off = {path: facts.off for path, facts in now.attention.items() if facts.off > 0.05}
    if off:
        path = max(off, key=off.__getitem__)
        yield run.finding(
            step,
            symptom=f"the weights of attention in {in_words(path)} do not add up to 1: off by {off[path]:.3g}",
            where=Where(module=path, op="softmax"),
            since_step=1,
            evidence=[("distance of the sum of weights from 1", round(off[path], 4), 0.0)],
        )
