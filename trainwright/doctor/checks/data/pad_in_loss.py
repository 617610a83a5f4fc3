from trainwright.doctor import Every, ExperimentRequest, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import BatchFacts, PaddingFacts


@check(points_at="op:cross_entropy", stage="label")
def pad_in_loss(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """Padding is counted as a target of the loss.

    Why it matters: padding is the easiest token there is, so the loss looks low, and gradients are spent on it.

    How it is detected: rows of different lengths are padded with one id. A replay shows a gradient of the loss at
    outputs deep within the padding. If the loss ignored padding, this gradient would be exactly 0.

    Usual cause: the loss does not ignore the padding id; the default of `ignore_index` is -100.

    Looks like: loss.eos_ignored, the opposite: a true token that is never a target.

    Fix: `ignore_index=pad_id` in the loss, or `labels = ids.masked_fill(attention_mask == 0, -100)`.

    Sources: huggingface/trl#1623.
    """
    padded = next(((step, facts) for step, facts in exams if facts.padding), None)
    if padded is None:
        yield NotApplicable("the inputs have no padding")
        return
    if not run.was_tried(PaddingFacts):
        yield ExperimentRequest(PaddingFacts.experiment, padded[0])
        return
    facts = run.latest(PaddingFacts)
    if facts is None:
        return
    if facts.at_padding <= 1e-6 * facts.elsewhere:
        return
    yield run.finding(
        symptom=f"{facts.padding.fraction:.0%} of the tokens are padding (id {facts.padding.id}), and the loss counts "
        "them as targets",
        where=Where(op="cross_entropy"),
        evidence=[
            ("gradient of the loss at outputs within padding", facts.at_padding, 0),
            ("gradient elsewhere", facts.elsewhere),
        ],
    )
