from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.weights import WeightsFacts

MIN_UPDATES = 8


@check(stage="forward", confidence=0.9, since_step=1)
def recurrence_unused(run: RunContext, facts: WeightsFacts) -> Results:
    """The recurrent weights of an RNN get no gradient: the loss uses only the state of time step 1.

    Why it matters: the layer, or its reverse direction, remembers nothing of the sequence.

    How it is detected: `weight_hh` of a recurrent layer has a gradient of exactly 0 at every examination, after 8
    updates or more. This weight multiplies the previous hidden state, which starts at 0.

    Usual cause: `output[:, -1]` of a bidirectional layer is read, where the reverse direction has seen only one
    element. Or each sequence has length 1, since `batch_first` or an `unsqueeze` is in the wrong place.

    Looks like: model.padding_changes_output, where the state is read after the padding.

    Fix: read the last state of both directions: `torch.cat([h_n[-2], h_n[-1]], dim=1)` of `output, h_n = rnn(x)`.

    Sources: keras-team/keras#4791, graykode/nlp-tutorial#47, aymericdamien/TensorFlow-Examples#201.
    """
    stuck = [name for name in facts.zero_gradients if ".weight_hh" in f".{name}"]
    if facts.updates < MIN_UPDATES or not stuck:
        return
    path = stuck[0].rpartition(".")[0]
    is_reverse = stuck[0].endswith("_reverse")
    which = "the reverse direction of " if is_reverse else ""
    yield run.finding(
        symptom=f"{which}{in_words(path)} learns no recurrence: {stuck[0]} always has a gradient of 0",
        cause="the last output of a bidirectional layer is used, where the reverse direction has read one element"
        if is_reverse
        else "all sequences have length 1, or only time step 1 is used",
        where=Where(module=path),
        evidence=[("recurrent weights with a gradient of 0", len(stuck), 0)],
    )
