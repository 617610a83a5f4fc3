from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(
    stage="forward",
    severity="critical",
    confidence=0.93,
    explains=("model.mixes_samples", "model.depends_on_batch_position"),
    since_step=1,
)
def batch_first_missing(run: RunContext, facts: LayersFacts) -> Results:
    """A recurrent or attention layer without `batch_first` treats the samples of the batch as the steps of a sequence.

    Why it matters: it relates samples to each other, and not the steps of a sample. Nothing fails, and the loss falls.

    How it is detected: `nn.LSTM`, `nn.GRU`, `nn.RNN` or `nn.MultiheadAttention` with `batch_first=False` gets an input
    of three axes. The first axis has the batch size of the loader, as does the first axis of the model's input.

    Usual cause: `batch_first=True` was left out: the default takes (length, batch, feature).

    Looks like: model.mixes_samples.

    Fix: `nn.LSTM(..., batch_first=True)`, or `x.transpose(0, 1)` before and after the layer.

    Sources: AndersonJo/dqn-pytorch#1, ray075hl/Bi-Model-Intent-And-Slot PR 2, pytorch/pytorch#1538.
    """
    for each in facts.wrong_axes("batch_as_steps"):
        shape = list(each.shapes[0])
        yield run.finding(
            symptom=f"{in_words(each.module)} has no batch_first and gets {shape}: it takes {shape[0]} samples for "
            "steps of a sequence",
            where=Where(module=each.module, source=each.line),
            evidence=[("shape of its input", shape, [shape[1], shape[0], shape[2]])],
        )
