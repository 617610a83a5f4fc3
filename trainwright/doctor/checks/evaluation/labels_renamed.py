from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.modes import EvaluationFacts


@check(points_at="validation", stage="label", confidence=0.9)
def labels_renamed(run: RunContext, facts: EvaluationFacts) -> Results:
    """The validation set numbers its classes differently than the training set.

    Why it matters: right predictions count as wrong, so the reported accuracy says nothing about the model.

    How it is detected: the predictions of an evaluation are counted for each target class. At least half of the samples
    of two or more classes are predicted as one other class, and no two classes as the same one. With the classes
    renamed in this way, at least 20 % more predictions are right.

    Exceptions: fewer than 64 samples, or classes with fewer than 8; the next tokens of a language model.

    Usual cause: class numbers are made for each split from its own folders or labels, and one split lacks a class;
    `LabelEncoder().fit_transform` is called on each split; labels begin at 1 in one split.

    Looks like: data.validation_encoded_apart, where the inputs are encoded in two ways.

    Fix: make the mapping once, from the training set: `[train.class_to_idx[name] for name in val_class_names]`.

    Sources: ultralytics/ultralytics#13936, huggingface/pytorch-image-models#957, weecology/DeepForest PR 1147.
    """
    if (each := facts.renamed) is None:
        return
    pairs = ", ".join(f"{target} as {said}" for target, said in list(zip(each.targets, each.predicted))[:4])
    yield run.finding(
        max(1, facts.after),
        symptom=f"most validation samples of one class are predicted as another, {pairs}: the class numbers of the "
        "validation labels differ from those of training",
        where=Where(source=each.source),
        evidence=[
            ("right predictions", each.right, each.right_renamed),
            ("classes predicted as another one", len(each.targets), 0),
        ],
    )
