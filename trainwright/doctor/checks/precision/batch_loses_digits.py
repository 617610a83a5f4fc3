"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.precision import BatchDigitsFacts

MAX_LOST = 0.05
"""Of a standard deviation: 16-bit floats of usual size lose a hundredth."""


@check(stage="input", confidence=0.95, needs=BatchDigitsFacts)
def batch_loses_digits(run: RunContext) -> Iterator[Result]:
    """A tensor of the batch is cast to a dtype that its values do not fit in, before the model or the loss uses it.

    How it is detected: in the first four steps, what the model and the loss take is compared with what the loader
    returned: it is the same but for a cast, and the difference is above a twentieth of its standard deviation.

    Exceptions: whole numbers that a model with an embedding is given; masks.

    Usual cause: `.long()` or `.to(torch.uint8)` on features, or a default dtype of a collate function.

    Fix: cast to a floating dtype that the values fit in.
    """
    facts = run.latest(BatchDigitsFacts)
    if facts is None or facts.lost <= MAX_LOST:
        yield Passed(f"the batches of {facts.compared if facts else 0} steps")
        return
    yield run.finding(
        max(1, facts.since),
        symptom=f"a tensor of the batch is {facts.dtype} before it is used by the {facts.place}, and loses "
        f"{facts.lost:.0%} of its spread",
        cause=f"it is cast to {facts.dtype}, and has {facts.values} different values left",
        stage="input" if facts.place == "model" else "label",
        since_step=facts.since,
        evidence=[("what the cast takes away, in standard deviations", facts.lost, 0.0)],
    )
