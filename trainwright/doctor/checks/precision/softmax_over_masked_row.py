from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def softmax_over_masked_row(run: RunContext) -> Results:
    """A softmax over a row in which every entry is masked with -inf is 0/0: NaN.

    How it is detected: the step is replayed operation by operation; the first NaN comes from a softmax with a row of
    -inf, or from a constant such as -1e9 that float16 cannot hold.

    Usual cause: a sample that is all padding, or a mask that is inverted; `scores + mask * -1e9` under autocast to
    float16. The NaN appears at the first row that is fully masked.

    Fix: leave one key unmasked in each row, or mask with `torch.finfo(scores.dtype).min` and drop the output of that
    row. `nan_to_num` after the softmax repairs the forward pass only: the gradient is still NaN.

    Sources: pytorch/pytorch #103963, #41508, PR 131060; gpt-2 #122, apex #1105.
    """
    written = "every entry of a row of {op}{place} is -inf: 0 / 0"
    overflowed = "the large negative constant of the mask is -inf in {dtype}{place}; a row with no other value is NaN"
    ways = {"softmax_all_masked": written, "mask_overflow": overflowed}
    yield from traced_by(run, {what: Mechanism(cause, guard="finite_mask") for what, cause in ways.items()})
