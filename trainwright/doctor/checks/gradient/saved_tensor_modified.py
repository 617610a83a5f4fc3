from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.wiring import SavedFacts


@check(stage="backward", severity="critical", confidence=0.98)
def saved_tensor_modified(run: RunContext, facts: SavedFacts) -> Results:
    """A tensor that backward needs was changed after forward had saved it.

    Why it matters: the gradient is wrong and there is no error.

    How it is detected: checksums of saved tensors in forward and in backward, on a replay.

    Usual cause: `.data` or NumPy writes to a tensor behind autograd's back.

    Fix: work out of place, `h = h * mask`, not `h.data.mul_(mask)`.

    Sources: pytorch/pytorch#6990.
    """
    if facts.modified:
        yield run.finding(
            symptom=f"{len(facts.modified)} tensors that {in_words(facts.modified[0])} saved were changed later",
            where=Where(module=facts.modified[0]),
            evidence=[("changed tensors", len(facts.modified), 0)],
        )
