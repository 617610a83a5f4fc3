from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import FunctionFacts


@check(stage="forward", confidence=0.9, since_step=1)
def depends_on_batch_position(run: RunContext, facts: FunctionFacts) -> Results:
    """The output for a sample depends on its position in the batch.

    How it is detected: in eval mode the samples of a batch from a loader are moved by one row, and their outputs change
    by more than the measured rounding error. If these are the earlier outputs in another order, the model has reordered
    the samples.

    Exceptions: inputs whose rows are not samples, or are related to each other (graphs, one set).

    Usual cause: position embeddings or a mask of the size `x.size(0)` instead of `x.size(1)`: without `batch_first`
    the sequence is the first dimension, with it the second; or a parameter or a buffer with a row for each sample; or a
    batch that is sorted by length to pack it, and not put back into order.

    Looks like: model.mixes_samples, where other samples matter.

    Fix: `position = torch.arange(x.size(1), device=x.device)` for inputs of shape (batch, length).

    Sources: songyangco/GETNext#2, tanjimin/C.Origami#42, fartashf/vsepp PR 36, pytorch/pytorch#2615.
    """
    if facts.place is None:
        yield NotApplicable("no loader says what a sample is, or samples are related")
    elif facts.place.is_reordered:
        yield run.finding(
            symptom="the outputs are in another order than the samples, so each meets the label of another sample",
            cause="the batch is sorted in the model, for example by length to pack it, and the result is not put back",
            remedy="restore the order before the result is returned: `out[order.argsort()]`, or pack with "
            "`enforce_sorted=False`, which does both",
            where=Where(module=facts.place.module, source=facts.place.line),
            explains=("model.mixes_samples",),
        )
    elif facts.place.is_real and not (facts.neighbours and facts.neighbours.is_real):
        found = facts.place
        yield run.finding(
            symptom="the output for a sample changes when only its position in the batch changes, first in "
            f"{in_words(found.module)}",
            where=Where(module=found.module, source=found.line),
            evidence=[("change of the outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
        )
