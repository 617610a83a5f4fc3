"""See the function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import takewhile

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import WeightsFacts

STILL_LOSSES = 8
"""Equal losses in a row that are no chance in float32."""


@check(names_cause=False, stage="loss", confidence=0.75, needs=WeightsFacts)
def stands_still(run: RunContext) -> Iterator[Result]:
    """The loss has the same bits in many steps in a row, though weights change.

    How it is detected: 8 equal losses in a row, 24 where the loss fits into 16 bits; checksums of the weights.

    Exceptions: a loss of 0 that was higher before; reported only with -v where the gradient is not 0, as in GRPO.

    Usual cause: the loss does not depend on the weights that are trained, or is computed from something constant.

    Looks like: optim.weights_never_move, model.output_same_for_all_samples.

    Fix: print the outputs of the model and the loss of two steps; look for a stale copy, a clamp or a constant.
    """
    facts, steps = run.latest(WeightsFacts), [each for each in run.steps if not math.isnan(each.loss)]
    if facts is None or len(steps) < STILL_LOSSES:
        return
    loss = steps[-1].loss
    last = list(takewhile(lambda each: each.loss == loss, reversed(steps)))[::-1]
    was_higher = loss == 0.0 and len(last) < len(steps)
    is_coarse = loss != 0.0 and math.frexp(loss)[0] * 2**11 % 1 == 0.0  # in 16 bits a small change is rounded away
    moves = facts.moved and facts.stands_since >= last[0].step + STILL_LOSSES // 2
    if not moves or was_higher or len(last) < (3 if is_coarse else 1) * STILL_LOSSES:
        yield Passed(f"{len(steps)} steps")
        return
    yield run.finding(
        last[-1].step,
        symptom=f"the loss is {loss:.6g} in {len(last)} steps in a row, to the last bit, while weights change",
        severity="info" if statistics.median(each.grad_norm for each in last) > 0.0 else "warning",
        since_step=last[0].step,
        evidence=[("equal losses in a row", len(last), 1)],
    )
