from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import DropoutFacts, LayersFacts


@check(points_at="construction", stage="forward", confidence=0.85)
def excess_dropout(run: RunContext, exams: Every[LayersFacts]) -> Results:
    """Dropout removes so much that the model underfits.

    How it is detected: from step 8 on, a dropout rate is 0.7 or more, and in a replay the loss of a batch is at least
    15 % lower without dropout than its mean over eight masks (4 % is enough for a rate of 0.8 or more).

    Exceptions: a rate below 0.8 is reported only with -v.

    Usual cause: the probability of keeping was passed instead of the probability of dropping.

    Fix: `nn.Dropout(0.1)`, or no dropout while the model does not overfit.
    """
    step, now = exams[-1]
    if not now.dropout or step < 8:
        return
    path, p = max(now.dropout.items(), key=lambda item: item[1])
    measured = run.every(DropoutFacts)
    if (not measured and not run.was_tried(DropoutFacts)) or (measured and step >= 2 * measured[-1][0]):
        yield ExperimentRequest(DropoutFacts.experiment, step)
    if not measured:
        return
    facts = measured[-1][1]
    if facts.with_dropout * (1 - (0.04 if p >= 0.8 else 0.15)) > facts.without >= 0:
        yield run.finding(
            step,
            symptom=f"the loss of a batch is {facts.with_dropout:.3g} with dropout, {facts.without:.3g} without; "
            f"{in_words(path)} drops {p:.0%} of its values",
            severity="warning" if p >= 0.8 else "info",
            where=Where(module=path, op="dropout"),
            evidence=[("loss with dropout", facts.with_dropout, facts.without), ("p", p, "0.5 at most")],
        )
