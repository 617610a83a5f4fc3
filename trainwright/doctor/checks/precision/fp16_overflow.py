from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import CONSEQUENCES, Mechanism, traced_by, traced_check


@traced_check(explains=(*CONSEQUENCES, "precision.overflow", "precision.undefined_operation"))
def fp16_overflow(run: RunContext) -> Results:
    """A number becomes larger than 65504, the largest number of float16; in float32 the step is finite.

    How it is detected: the step is replayed operation by operation and once in float32. The first operation that is not
    finite in float16 is finite in float32. The replay has no loss scale, so steps that a scaler skips while it searches
    for its scale are not reported.

    Usual cause: large activations or exponentials, such as those of a model that was trained in bfloat16.

    Looks like: precision.overflow, where float32 is not finite either.

    Fix: bfloat16, which has the range of float32 and needs no scaler; or compute this operation in float32
    (`x.float()`), inside of `torch.autocast("cuda", enabled=False)`.

    Sources: huggingface/transformers #5651.
    """
    cause = "{op}{place} gives more than 65504, the largest number of {dtype}; in fp32 it is finite"
    yield from traced_by(run, {"fp16_overflow": Mechanism(cause, guard="in_fp32")})
