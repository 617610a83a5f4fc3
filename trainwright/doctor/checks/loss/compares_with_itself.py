from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps


@check(points_at=("criterion", "op:cross_entropy"), stage="loss", confidence=0.85, since_step=1)
def compares_with_itself(run: RunContext, exams: Every[LossFacts]) -> Results:
    """A contrastive loss counts the similarity of each sample with itself as a negative pair.

    Why it matters: this similarity is the largest possible and cannot fall, so it dominates the softmax. The gradient
    of the true pairs is weak, and the loss has a high lower bound.

    How it is detected: cross-entropy of similarities (N, N) in every examined step. The diagonal has one value, which
    is the largest of each row, and is no target.

    Exceptions: pairs of two encoders, as in CLIP, where the diagonal is the target.

    Usual cause: the diagonal of the similarity matrix is not masked.

    Fix: mask the diagonal before the softmax:
    `sim.masked_fill(torch.eye(len(z), device=z.device).bool(), float("-inf"))`.

    Sources: Lightning-Universe/lightning-bolts#695, alinlab/CSI#49.
    """
    for each in over_most_steps(exams).given:
        if each.own_pairs:
            yield run.finding(
                where=Where(op=each.op, source=each.line),
                evidence=[("the diagonal is the largest similarity of each row, and a negative pair", True, False)],
            )
