from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, in_words, listed
from trainwright.doctor.facts.function import FunctionFacts
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", confidence=0.9, since_step=1)
def depends_on_batch_position(run: RunContext) -> Results:
    """The output for a sample depends on its position in the batch.

    Why it matters: the model uses, and learns, the arbitrary order of the rows of a batch.

    How it is detected: in eval mode the samples of a batch from a loader are moved by one row, and the outputs that
    belong to them change by more than rounding, which is measured. Or rows of a table, one for each sample in the
    order of the batch, are added to sequences.

    Exceptions: inputs whose rows are not samples, or are related to each other (graphs, one set).

    Usual cause: position embeddings or a mask of the size `x.size(0)` instead of `x.size(1)`: without `batch_first`
    the sequence is the first dimension, with it the second; or a parameter or a buffer with a row for each sample.

    Looks like: model.mixes_samples, where other samples matter.

    Fix: `position = torch.arange(x.size(1), device=x.device)` for inputs of shape (batch, length).

    Sources: songyangco/GETNext#2, tanjimin/C.Origami#42.
    """
    facts, layers = run.latest(FunctionFacts), run.latest(LayersFacts)
    for each in layers.wrong_axes("numbered") if layers is not None else ():
        yield run.finding(
            symptom=f"in {in_words(each.module)}, {listed([str(shape) for shape in each.shapes])}: rows of a table of "
            "positions are chosen by the position of the sample in the batch",
            where=Where(module=each.module, op="add", source=each.line),
            evidence=[("shapes of positions and sequences", [list(shape) for shape in each.shapes])],
        )
        return
    if facts is None or facts.place is None:
        yield NotApplicable("no loader says what a sample is, or samples are related")
    elif facts.place.is_real and not (facts.neighbours and facts.neighbours.is_real):
        found = facts.place
        yield run.finding(
            symptom="the output for a sample changes when only its position in the batch changes, first in "
            f"{in_words(found.module)}",
            where=Where(module=found.module),
            evidence=[("change of the outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
        )
