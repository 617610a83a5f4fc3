"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.precision import FormatFacts, LossScaleFacts
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial, in_words
from trainwright.doctor.shared_requests import is_due
from trainwright.runlog.records import Where

LOST, APART = 0.1, 0.05
"""Fraction of the elements that are lost, and relative distance of the gradients: rounding alone moves them by 1 %."""


@check(stage="backward", confidence=0.95, needs=FormatFacts, explains=("optim.lr_too_low", "gradient.vanishing"))
def fp16_underflow(run: RunContext) -> Iterator[Result]:
    """Numbers in float16 are so small that they are exactly 0: below 6e-8 there is nothing left.

    Why it matters: a large part of the weights gets no gradient, without an error. It can be one term only, such as the
    balance loss of a router.

    How it is detected: a step without a loss scale is replayed with the largest of three scales that keeps its
    gradients finite: a tenth of the gradient's elements are 0 only without it, and the gradients move by 5 %. Or all
    results of an operation are 0 in float16, and not in float32.

    Exceptions: single values that vanish beside larger ones, such as the tail of a softmax.

    Usual cause: float16 without a GradScaler, or with `enabled=False`.

    Looks like: gradient.vanishing, where gradients are small in float32 as well.

    Fix: `scaler = torch.amp.GradScaler("cuda")`, then `scaler.scale(loss).backward()`, `scaler.step(optimizer)`,
    `scaler.update()`; or bfloat16. Small terms in float32.

    Sources: gpt-neox #477, huggingface/transformers #43543, Micikevicius et al. 2018.
    """
    facts = run.latest(FormatFacts)
    if facts is None or "float16" not in facts.values:
        return
    step = run.every(FormatFacts)[-1][0]
    for first in facts.emptied[:1]:
        yield run.finding(
            step,
            symptom=f"{first.op} in {in_words(first.module)} gives only 0; in float32 it gives up to "
            f"{first.largest:.2g}",
            cause="the values are smaller than float16 can represent (6e-8)",
            remedy="compute this part in float32",
            sure=0.9,
            stage="forward" if first.module is not None else "loss",
            where=Where(module=first.module, op=first.op, dtype="float16"),
            evidence=[("largest value in float32", first.largest, ">= 6e-8")],
            trial=RemedyTrial("everything_in_fp32"),
        )
    if facts.scaled:
        return
    if is_due(run, LossScaleFacts):
        yield ExperimentRequest(LossScaleFacts.experiment)
    for step, scaled in run.every(LossScaleFacts)[-1:]:
        if scaled.lost >= LOST and scaled.error >= APART:
            yield run.finding(
                step,
                symptom=f"{scaled.lost:.0%} of the gradient's elements are 0, and are not with a scaled loss",
                severity="critical" if scaled.error >= 0.5 else None,
                where=Where(dtype="float16"),
                evidence=[
                    ("fraction of elements that are 0 without a scale only", round(scaled.lost, 4), 0.0),
                    ("distance from the gradients of a scaled loss", scaled.error, f"< {APART}"),
                ],
                trial=RemedyTrial("loss_scale"),
            )
