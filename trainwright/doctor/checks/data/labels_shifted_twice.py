from trainwright.doctor import Every, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import BatchFacts


@check(stage="label", severity="critical", confidence=0.9, explains=("loss.no_shift",))
def labels_shifted_twice(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """The labels are shifted twice: the model learns the token after the next one.

    Why it matters: the loss falls as usual, but generated text skips every second token.

    How it is detected: each prediction is assigned to a position of the input, and its target is the input token two
    positions later.

    Exceptions: another loss predicts the next token, as with several prediction heads.

    Usual cause: the data set shifts the labels, and the model, as those of transformers, shifts them again.

    Looks like: loss.no_shift, where nothing shifts them.

    Fix: shift in one place: pass `labels=input_ids` to a model that shifts them itself.

    Sources: huggingface/transformers#32944, wdndev/tiny-llm-zh#10.
    """
    step, facts = exams[-1]
    if not facts.offsets:
        yield NotApplicable("no target is a token of the input")
    elif 2 in facts.offsets and 1 not in facts.offsets:
        yield run.finding(
            step,
            where=Where(op="cross_entropy"),
            evidence=[("tokens from a prediction to its target", 2, 1)],
        )
