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

    How it is detected: bytes that are allocated and not freed, on the GPU and in the process: over at least eight
    readings after step 64, they grow by 64 MiB and by a tenth. Three of four readings rise, and the growth continues in
    the second half.

    Exceptions: freed blocks that the allocator keeps and pages of mapped files do not count. A buffer that is filled to
    its bound looks the same until it is full.

    Usual cause: something is kept of every step: outputs, batches, histories, caches without a bound.

    Looks like: resources.graphs_kept.

    Fix: look for lists and dicts that the loop appends to; keep numbers, not tensors.

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
