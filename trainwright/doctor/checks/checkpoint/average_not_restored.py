from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import AveragesFacts, averages_of

MIN_RELATIVE_DISTANCE = 0.5  # Relative to the norm of the weights. Independent random weights are about 1.4 apart.


@check(points_at="load", stage="loop", confidence=0.85, since_step=1)
def average_not_restored(run: RunContext, facts: AveragesFacts) -> Results:
    """After a resume, the moving average (EMA) starts far from the weights.

    Why it matters: evaluations and saved models use the average, which stays near the initial weights for many steps.

    How it is detected: the optimizer already had state when the watch began, and at that time the average was further
    from the weights than half of their norm. That initial distance is computed from a later measurement and the decay
    of the average.

    Usual cause: the average was not restored from the checkpoint, so it starts from the initial weights.

    Looks like: optim.average_does_not_follow, where the factors of the average are wrong.

    Fix: save and load the average with the model, or copy the loaded weights into it:
    `average.load_state_dict(model.state_dict())`.

    Sources: ai2cm/ace#349, Vchitect/Latte#55.
    """
    if not facts.is_resumed:
        yield NotApplicable("the optimizer began without a state")
        return
    for copy in averages_of(facts):
        share = min(max(copy.moves[0].share, 0.0), 0.9)
        gap = copy.gap / (1.0 - share) ** (copy.moves[0].step - 1)
        if copy.gap > MIN_RELATIVE_DISTANCE / 10 and gap > MIN_RELATIVE_DISTANCE:
            yield run.finding(
                symptom=f"the average of {copy.of} (a {copy.kind}) was about {gap:.2g} times the norm of the weights "
                f"away from them at the start, although the optimizer was resumed",
                evidence=[
                    (
                        "distance from the weights, relative to their size",
                        round(copy.gap, 3),
                        f"< {MIN_RELATIVE_DISTANCE / 10}",
                    )
                ],
            )
