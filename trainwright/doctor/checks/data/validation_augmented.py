from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.modes import EvaluationFacts

MIN_ALTERED = 0.1  # Fraction of the samples that differ from one evaluation to the next


@check(points_at="validation", stage="input", confidence=0.85)
def validation_augmented(run: RunContext, facts: EvaluationFacts) -> Results:
    """The validation data goes through a random augmentation, as training data does.

    Why it matters: the validation score is that of altered samples. It is too low, and it changes from evaluation to
    evaluation without a change of the model, so the best checkpoint is partly chosen by chance.

    How it is detected: two evaluations in a row read the same labels in the same order from a loader, and at least a
    tenth of the samples have other values. The first four evaluations at a call site are compared.

    Exceptions: labels in a regular order, such as those of few-shot episodes; targets that are not classes. Reported
    only with -v if the datasets share neither data nor transforms: samples of a simulation may be new each time.

    Usual cause: `random_split` divides one dataset, so both parts share its random transforms; or the validation set is
    a copy of the training set.

    Fix: make two datasets over the same files, one with random transforms and one without, and split their indices.

    Sources: LBANN/lbann#1019, udacity/deep-learning-v2-pytorch#132, gpleiss/efficient_densenet_pytorch#51.
    """
    if facts.altered >= MIN_ALTERED:
        yield run.finding(
            max(1, facts.after),
            severity="warning" if facts.is_shared else "info",
            symptom=f"{facts.altered:.0%} of the evaluated samples have other values than in the last evaluation",
            where=Where(source=facts.altered_at),
            evidence=[("samples with the same label and other values", round(facts.altered, 3), 0.0)],
        )
