from trainwright.doctor import Every, NotApplicable, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts
from trainwright.doctor.trend import rises, still_falls

MAX_EVENNESS = 0.2  # Entropy of attention weights / entropy of equal weights. Below it, each row attends to few keys.
MAX_SCALED_SPREAD = 1.5  # Standard deviation of initial scores. Above it, they are not scaled by the root.


@check(stage="forward", confidence=0.85)
def attention_logit_growth(run: RunContext, looks: Every[LayersFacts]) -> Results:
    """Attention scores grow step by step until each row attends to one key.

    Why it matters: a softmax at 0 and 1 has no gradient; the loss spikes hundreds of steps later.

    How it is detected: the largest score of an attention is above 50, four times the first, and higher in each of the
    last three examined steps; the entropy of its weights is below 0.2 of that of equal weights; and the loss does not
    fall.

    Exceptions: the loss still falls. Reported only with -v if the loss does not rise and the scores of the first steps
    have a standard deviation below 1.5: the model may have learned sharp attention.

    Usual cause: queries and keys grow without bound, or the scores are not divided by the root of the head size.

    Looks like: optim.lr_too_high, where the loss diverges without this early sign.

    Fix: `scores = q @ k.transpose(-1, -2) / math.sqrt(head_dim)`; normalise queries and keys; a smaller learning rate.

    Sources: PixelDiT#14; imagen#69.
    """
    step, last = looks[-1]
    for path, now in last.attention.items():
        history = [facts.attention[path] for _, facts in looks if path in facts.attention]
        high = [each.highest for each in history]
        if len(high) < 3 or high[-1] < max(50, 4 * high[0]) or not high[-3] < high[-2] < high[-1]:
            continue
        if now.evenness > MAX_EVENNESS:
            continue
        if still_falls(run):
            yield NotApplicable(f"the largest score is {high[-1]:.3g}, and the loss still falls")
            return
        unscaled = looks[0][0] <= 2 and history[0].spread > MAX_SCALED_SPREAD
        yield run.finding(
            step,
            symptom=f"the largest attention score in {in_words(path)} has grown from {high[0]:.3g} to {high[-1]:.3g}",
            severity="warning" if unscaled or rises(run) else "info",
            where=Where(module=path, op="softmax"),
            evidence=[("largest score", high[-1], high[0]), ("evenness of the weights, 0 to 1", now.evenness)],
            explains=("optim.lr_too_high",) if unscaled else (),
        )
