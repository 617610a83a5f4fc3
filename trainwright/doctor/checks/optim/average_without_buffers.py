from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.weights import AveragesFacts, averages_of

MIN_DISTANCE = 0.5  # Standard deviations of the input of a normalization


@check(stage="loop", confidence=0.9, since_step=1)
def average_without_buffers(run: RunContext, facts: AveragesFacts) -> Results:
    """A moving average of the weights (EMA) is evaluated with outdated running statistics of BatchNorm.

    Why it matters: BatchNorm shifts and scales by statistics of other weights, so the average seems far worse than it
    is.

    How it is detected: a module follows the weights gradually. It is called in eval mode while the running means of all
    its normalizations are unchanged since step 24, and one is more than half a standard deviation away from that of the
    trained module.

    Exceptions: an average in train mode, and statistics that are computed again before it is evaluated.

    Usual cause: the average updates only the parameters, not the buffers of BatchNorm.

    Fix: copy the buffers after each update, or call `torch.optim.swa_utils.update_bn(loader, average)` before an
    evaluation.

        for mine, theirs in zip(average.buffers(), model.buffers()):
            mine.copy_(theirs)


    `torch.optim.swa_utils.AveragedModel(model, use_buffers=True)` averages them.

    Sources: CuriousAI/mean-teacher#9, pytorch/ignite#2590.
    """
    averages = averages_of(facts)
    if not averages:
        yield NotApplicable("no copy of the weights follows them")
        return
    for copy in averages:
        if copy.stale is not None and copy.stale.distance > MIN_DISTANCE:
            yield run.finding(
                copy.stale.step,
                symptom=f"the average of the weights of {copy.of} (a {copy.kind}) is evaluated with running means that "
                f"are {copy.stale.distance:.2g} standard deviations from those of the trained weights",
                where=Where(module=copy.stale.module, source=copy.stale.source),
                evidence=[
                    ("distance of the running means in deviations", round(copy.stale.distance, 3), f"< {MIN_DISTANCE}")
                ],
            )
