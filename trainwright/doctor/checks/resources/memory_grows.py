from itertools import pairwise

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.resources import MIN_RISING_READINGS, GrowthFacts

MIB = 2**20
MIN_STEPS = 64  # Steps after which the recorder has reached its final size and caches are filled
MIN_BYTES = 64 * MIB
MIN_FRACTION = 0.1


@check(names_cause=False, stage="loop", confidence=0.75)
def memory_grows(run: RunContext, facts: GrowthFacts) -> Results:
    """Memory grows from step to step, once caches are filled.

    How it is detected: from the bytes that are allocated and not freed, on the GPU and in the process. Over at least
    eight readings after step 64, they grow by more than 64 MiB and a tenth. Three of four readings rise, and the growth
    continues in the second half.

    Exceptions: blocks that the allocator keeps after they are freed, and pages of mapped files. A buffer that is being
    filled looks like a leak until it is full.

    Usual cause: the loop keeps something of every step: outputs, batches, histories, caches without a limit.

    Looks like: resources.graphs_kept.

    Fix: search for lists and dicts that the loop appends to, and store `x.item()` instead of tensors.

    Sources: PyTorch FAQ, "My model reports cuda runtime error(2): out of memory".
    """
    held = [each for each in facts.held if each.step >= MIN_STEPS]
    if len(held) < 2 * MIN_RISING_READINGS:
        return
    kinds = (("GPU memory", [each.device_bytes for each in held]), ("memory", [each.memory_bytes for each in held]))
    for name, sizes in kinds:
        rising = sum(b > a for a, b in pairwise(sizes)) >= 0.75 * (len(sizes) - 1)
        grown, lately = sizes[-1] - sizes[0], sizes[-1] - sizes[len(sizes) // 2]
        if rising and grown > max(MIN_BYTES, MIN_FRACTION * sizes[0]) and lately > 0.25 * grown:
            yield run.finding(
                symptom=f"{name} grows by {grown / MIB / (held[-1].step - held[0].step):.3g} MiB a step: "
                f"{sizes[0] / MIB:.0f} MiB after step {held[0].step}, {sizes[-1] / MIB:.0f} after step {held[-1].step}",
                since_step=held[0].step,
                evidence=[("MiB, by step", [[h.step, s // MIB] for h, s in zip(held, sizes)][-8:], "constant")],
            )
