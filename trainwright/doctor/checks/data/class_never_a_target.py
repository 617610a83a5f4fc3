from trainwright.doctor import Finding, NotApplicable, Passed, Results, RunContext, check
from trainwright.doctor.facts.data import MOST_CLASSES, RowsFacts, TargetsFacts
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss, calls, where_of

MIN_SAMPLES_OF_RAREST = 32
"""Distinct samples of the rarest other class. A class 10 times as rare would have appeared 3 times."""
MAX_CLASSES_NAMED = 8
"""Maximum number of classes in the symptom."""


@check(stage="label", confidence=0.75, needs=(TargetsFacts, LossFacts, RowsFacts))
def class_never_a_target(run: RunContext) -> Results:
    """The model has an output for a class that is never a target in training.

    Why it matters: the output learns only to be small. If labels are shifted, every prediction names a wrong class; if
    a class was lost on the way, the model never predicts it.

    How it is detected: of at most 128 classes at least one has never been a target, while each of the others came with
    at least 32 different samples, and none of these for the first time in the later half. A class that is merely rare
    has others nearly as rare beside it. Of an image or a text one target counts, and a sample that comes again counts
    once.

    Exceptions: the class that `ignore_index` names; models whose integer inputs are ids of the same vocabulary, where
    padding and the token that begins a text are no targets; targets that are positions in the batch, as those of a
    contrastive loss, which never come twice in one call.

    Usual cause: labels are counted from 1 while the number of outputs was raised until no error came, a filter or a
    mapping of labels drops a class, or the number of outputs is that of another data set.

    Looks like: data.labels_all_equal, where only one class comes; data.label_out_of_range, where labels from 1 to n
    meet n outputs; loss.real_class_ignored; data.samples_never_drawn.

    Fix: count the labels of the data set, and give the last layer as many outputs as there are classes.

        print(sorted(Counter(int(y) for _, y in dataset).items()))

    Sources: keras-team/keras-io PR 313, Megvii-BaseDetection/YOLOX#407, pyg-team/pytorch_geometric#441.
    """
    facts, rows = run.measured(TargetsFacts), run.measured(RowsFacts)
    losses = [call for _, _, call in calls(run) if call.classes and call.module is None]
    numbers = {call.classes for call in losses}
    if len(numbers) != 1 or not facts.rows:
        yield NotApplicable("no loss over classes is called by the loop, or several with different numbers of them")
        return
    classes = numbers.pop()
    seen = _observed_classes(facts)
    missing = sorted(set(range(classes)) - seen - {call.ignored_class for call in losses})
    if classes > MOST_CLASSES:
        yield NotApplicable(f"of {classes} classes some are seldom all used")
    elif facts.most < 2:
        yield NotApplicable("targets are positions in the batch")
    elif any(classes // 2 <= largest < classes for largest in facts.ids):
        yield NotApplicable("inputs and targets have the same vocabulary")
    elif not missing:
        yield Passed(f"{sum(facts.counts)} targets of {classes} classes")
    elif len(seen) < 2 or _rarest(facts, rows) < MIN_SAMPLES_OF_RAREST or _came_late(run, facts):
        yield NotApplicable("too few targets of the rarest class are known")
    else:
        yield _finding(run, facts, losses[0], missing)


def _observed_classes(facts: TargetsFacts) -> set[int]:
    return {each for each, count in enumerate(facts.counts) if count}


def _rarest(facts: TargetsFacts, rows: RowsFacts) -> float:
    """Returns the number of distinct samples of the rarest class."""
    return min(each for each in facts.counts if each) * min(1.0, rows.distinct / facts.rows)


def _came_late(run: RunContext, facts: TargetsFacts) -> bool:
    """Returns True if a class first appeared in the second half, as in data sorted by class."""
    before = [each for _, each in run.every(TargetsFacts) if 2 * each.rows <= facts.rows]
    return not before or _observed_classes(before[-1]) != _observed_classes(facts)


def _finding(run: RunContext, facts: TargetsFacts, loss: MeasuredLoss, missing: list[int]) -> Finding:
    seen = _observed_classes(facts)
    many = len(missing) > 1
    names = ", ".join(map(str, missing[:MAX_CLASSES_NAMED])) + (", ..." if len(missing) > MAX_CLASSES_NAMED else "")
    if missing == [0]:
        cause = "labels are counted from 1, and the model has an output for 0"
    elif missing[0] > max(seen):
        cause = "the number of outputs is that of another data set, or the last classes were filtered out"
    else:
        cause = ""
    return run.finding(
        run.last_step,
        symptom=f"class{'es' if many else ''} {names} of {loss.classes} {'are' if many else 'is'} never a target among "
        f"{sum(facts.counts)}, of which the rarest other class has {min(each for each in facts.counts if each)}",
        cause=cause,
        since_step=1,
        where=where_of(loss),
        evidence=[("classes that are targets", len(seen), loss.classes), ("targets", sum(facts.counts))],
    )
