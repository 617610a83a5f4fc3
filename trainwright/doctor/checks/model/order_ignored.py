from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.layers import InputsFacts


@check(stage="forward", confidence=0.75, since_step=1)
def order_ignored(run: RunContext, exams: Every[InputsFacts]) -> Results:
    """Attention treats the tokens as a set: in another order, each token has the same output.

    Why it matters: the model cannot tell "dog bites man" from "man bites dog".

    How it is detected: in replays in eval mode the tokens of each row are put in another order. The outputs are the
    same, in that order, up to rounding, and the model has attention over the row. Weights that are all 0, as positions
    may be at the start, are filled with small numbers before.

    Exceptions: reported only with -v if the model has no table of positions and one output for all tokens, or if its
    tokens are vectors and no buffer is such a table, because it may be a model of sets.

    Usual cause: no positional encoding is added, or one whose value is the same at every position (`pe[:, n]` instead
    of `pe[:, :n]`, or a table indexed by the batch dimension).

    Fix: `x = embed(ids) + positions(torch.arange(ids.shape[1]))` before the first attention layer.

    Sources: cmu-l3/anlp-fall2025-code#1, Lightning-AI/pytorch-lightning PR 20099.
    """
    if not any(each.keeps_order for _, each in exams):
        yield run.finding(exams[-1][0], severity="warning" if exams[-1][1].needs_order else "info")
