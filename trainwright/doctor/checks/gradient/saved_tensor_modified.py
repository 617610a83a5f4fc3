from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.wiring import SavedFacts


@check(stage="backward", severity="critical", confidence=0.98)
def saved_tensor_modified(run: RunContext, facts: SavedFacts) -> Results:
    """A tensor that backward needs was changed after forward had saved it.

    Why it matters: the gradient is wrong and there is no error.

    How it is detected: a replay compares checksums of the saved tensors in forward and in backward.

    Usual cause: an in-place write through `.data` or NumPy, which autograd cannot detect.

    Fix: write `h = h * mask` instead of `h.data.mul_(mask)`.

    Sources: pytorch/pytorch#6990.
    """
    if facts.modified:
        yield run.finding(
            symptom=f"{len(facts.modified)} tensors that {in_words(facts.modified[0])} saved for backward changed "
            "later",
            where=Where(module=facts.modified[0]),
            evidence=[("changed tensors", len(facts.modified), 0)],
        )
