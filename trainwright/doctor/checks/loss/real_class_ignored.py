from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.loss import LossFacts, calls, where_of

MIN_INSIDE = 0.25  # Fraction of the sequences in which the ignored class is between targets that count


@check(points_at="criterion", stage="label", confidence=0.85, since_step=1)
def real_class_ignored(run: RunContext, exams: Every[LossFacts]) -> Results:
    """`ignore_index` is the number of a real class, which is never learned.

    How it is detected: `ignore_index` is the number of a class, and in more than a quarter of the sequences targets
    with that number stand between targets that count. Padding occurs only at the ends.

    Exceptions: targets of images, where a class such as the background is ignored on purpose.

    Usual cause: the padding index of the inputs (0) is passed as `ignore_index`, although 0 is a class of the targets.

    Fix: pad targets with -100, the default of `ignore_index`, instead of a class.

    Sources: nyu-mll/jiant#925; pytorch.org/docs, torch.nn.CrossEntropyLoss.
    """
    for step, _, call in calls(exams):
        if call.ignored_class is not None and call.ignored_inside > MIN_INSIDE:
            yield run.finding(
                step,
                symptom=f"ignore_index={call.ignored_class} leaves out {call.ignored:.0%} of the targets; in "
                f"{call.ignored_inside:.0%} of the sequences they are between other targets",
                where=where_of(call),
                evidence=[("sequences with ignored targets between others", round(call.ignored_inside, 3), 0.0)],
            )
            return
    if not any(call.ignored_class is not None for _, _, call in calls(exams)):
        yield NotApplicable("no loss function has the number of a class as ignore_index")
