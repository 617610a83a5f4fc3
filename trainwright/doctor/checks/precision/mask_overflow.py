"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result
from trainwright.doctor.context import RunContext
from trainwright.doctor.shared_nonfinite import Way, traced_by, traced_check


@traced_check()
def mask_overflow(run: RunContext) -> Iterator[Result]:
    """A mask adds a number such as -1e9, which is -inf in float16: a row that is all masked, or 0 times it, is NaN.

    How it is detected: the step is replayed operation by operation; the infinity comes from a constant that float16
    cannot hold, and the operation is finite in float32.

    Usual cause: `scores + mask * -1e9` under autocast to float16. It is harmless until the first row that is all
    masked.

    Looks like: precision.softmax_over_masked_row, where -inf was written on purpose.

    Fix: `scores.masked_fill(~mask, torch.finfo(scores.dtype).min)`, or a boolean mask for
    `F.scaled_dot_product_attention`.

    Sources: gpt-2 #122, apex #1105.
    """
    cause = "the large negative constant of the mask is -inf in {dtype}{place}; a row with nothing else is NaN"
    yield from traced_by(run, {"mask_overflow": Way(cause, guard="finite_mask")})
