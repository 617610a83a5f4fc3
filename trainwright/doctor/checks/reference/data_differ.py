from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, differ, differences, differing, traits_of

MIN_SCALE = 0.5  # Relative difference of the standard deviations of an input. Batches differ by less.


@check(stage="input", confidence=0.8, names_cause=False)
def data_differ(run: RunContext, reference: ReferenceFacts) -> Results:
    """The batches differ from those of the reference run in shape, scale, number of rows, classes or repetition.

    How it is detected: the rows of a step, the shapes of the inputs, their standard deviation, the largest target, and
    in runs of equal length the fraction of rows that are still new at the end, from the 8th step on.

    Usual cause: another data set, batch size or preprocessing, or a sampler that repeats.

    Fix: examine the difference. If it is intended, use another run as reference.
    """
    if (here := traits_of(run)).steps < MIN_STEPS:
        return
    there = reference.traits
    evidence = differing(
        [
            ("rows of a step", here.rows, there.rows),
            ("shapes of the inputs", list(here.shapes), list(there.shapes)),
        ]
    )
    if differ(here.scale, there.scale, MIN_SCALE):
        evidence.append(("largest standard deviation of an input", here.scale, there.scale))
    if differ(here.new_rows, there.new_rows) and here.steps == there.steps:
        evidence.append(("fraction of rows that are new", here.new_rows, there.new_rows))
    ours, theirs = here.largest_target, there.largest_target
    if ours is not None and theirs is not None and not theirs / 2 <= ours <= theirs:
        evidence.append(("largest target", ours, theirs))
    if evidence:
        yield run.finding(symptom=differences(evidence), evidence=evidence)
