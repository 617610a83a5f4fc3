from trainwright.doctor import ExperimentRequest, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, LabelSignalFacts

MIN_STEPS = 40
RECENT_STEPS = 16
MAX_DEVIATIONS = 2.5  # Standard deviations above chance up to which the labels count as unpredictable


@check(stage="label", confidence=0.7, explains=("optim.lr_too_low",))
def label_feature_misaligned(run: RunContext, facts: BatchFacts) -> Results:
    """Inputs and labels do not belong together.

    Why it matters: the loss stays at the entropy of the labels. No architecture and no learning rate helps.

    How it is detected: the loss stays above 0.9 of that entropy. On at least 256 samples (30 for each class), simple
    learners predict held-out labels at most 2.5 standard deviations better than chance. In a replay, the model can
    memorize a single batch.

    Usual cause: one of the two was shuffled, filtered or sorted without the other.

    Fix: index both by one permutation, sort file lists on both sides, and inspect ten pairs from the loader.

        order = torch.randperm(len(x)); x, y = x[order], y[order]

    Sources: TheDeepChecker (Ben Braiek and Khomh).
    """
    losses = [each.loss for each in run.steps if each.step > run.last_step - RECENT_STEPS]
    if not facts.classes or not facts.entropy:
        yield NotApplicable("the samples do not have one class each")
        return
    recent = sum(losses) / max(1, len(losses))
    if run.last_step < MIN_STEPS or len(losses) < RECENT_STEPS or recent < 0.9 * facts.entropy:
        return
    if not run.was_tried(LabelSignalFacts):
        yield ExperimentRequest(LabelSignalFacts.experiment, run.last_step)
    signal = run.latest(LabelSignalFacts)
    if signal is None or signal.deviations > MAX_DEVIATIONS or signal.samples < max(256, 30 * facts.classes):
        return
    if not signal.memorized[-1] < 0.9 * signal.memorized[0]:
        return
    yield run.finding(
        run.last_step,
        symptom=f"the loss after {run.last_step} steps is {recent:.3g}; predicting only the class frequencies "
        f"gives {facts.entropy:.3g}",
        evidence=[
            (
                f"accuracy above chance on {signal.samples} samples, in standard deviations",
                signal.deviations,
                "> 2.5",
            ),
            ("loss when one batch is repeated", [signal.memorized[0], signal.memorized[-1]]),
        ],
    )
