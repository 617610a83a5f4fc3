"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts
from trainwright.runlog.records import Where


@check(stage="loss", confidence=0.85, needs=LossFacts)
def focal_weight_of_batch_mean(run: RunContext) -> Iterator[Result]:
    """The focal weight is computed from the mean loss of the batch, so hard samples weigh no more than easy ones.

    Why it matters: one weight for the whole batch only rescales the gradient of the plain cross entropy.

    How it is detected: exp(-loss) of a `cross_entropy` that was already reduced to a scalar is multiplied with that
    scalar again.

    Usual cause: `cross_entropy` with its default `reduction="mean"` inside of a focal loss.

    Fix: `cross_entropy(logits, target, reduction="none")`, then weight each sample, then take the mean.

    Sources: kaidic/LDAM-DRW#6, foamliu/InsightFace-v2 PR 39.
    """
    facts = run.latest(LossFacts)
    for sign in facts.signs if facts is not None else ():
        if sign.kind == "focal_of_mean":
            yield run.finding(
                run.last_step,
                cause="cross_entropy is reduced to the mean of the batch before the focal weight: the weight is one "
                "number for the whole batch, not one for each sample",
                since_step=1,
                where=Where(op=sign.op, source=sign.line),
                evidence=[("values of the loss that are weighted", 1, "one for each sample")],
            )
            return
