from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps


@check(points_at=("criterion", "op:cross_entropy"), stage="loss", confidence=0.8, since_step=1)
def class_weights_inverted(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The class weights of the loss are inverted: frequent classes get large weights.

    Why it matters: weights should make rare classes count. These make the imbalance worse, and the loss falls.

    How it is detected: the logarithms of the weights and of the frequencies of the targets have a correlation above
    0.95. With two classes, the ratio of the weights is that of the frequencies, within a quarter. `pos_weight` is the
    odds of a positive target instead of their inverse, within a quarter.

    Exceptions: classes of nearly equal frequency.

    Usual cause: `counts / counts.sum()` or `num_pos / num_neg` instead of the inverse.

    Looks like: loss.class_weights_permuted, where the weights fall in another order.

    Fix: `weight = counts.sum() / (len(counts) * counts)`; `pos_weight = num_neg / num_pos`.

    Sources: janghyuncho/PiCIE#28, mlcommons/GaNDLF#209.
    """
    for each in over_most_steps(exams).given:
        if each.inverted:
            yield run.finding(
                where=Where(op=each.op, source=each.line),
                evidence=[("weights rise with the frequencies of the classes", True, False)],
            )
