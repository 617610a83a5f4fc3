"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.gradient import DerivativeFacts, Slopes
from trainwright.doctor.finding import listed
from trainwright.runlog.records import Where

STAIRS = 0.01
"""Of the gradient's slope: below it the loss has no slope, and what has a gradient is an estimator on purpose."""


@check(names_cause=False, stage="backward", confidence=0.9, needs=DerivativeFacts)
def not_the_derivative(run: RunContext) -> Iterator[Result]:
    """The gradient is not the derivative of the loss that `backward()` was called on.

    How it is detected: the slope of the loss along a random direction, by difference quotients of a replay in float64
    with two step sizes, at two examinations. Where it differs from that of the gradient by a thousandth and by ten
    times its own error, halves of the direction find the tensors.

    Exceptions: reported only with -v where a stop-gradient, a hook, an autograd Function or a straight-through
    estimator is in the backward pass; a loss without a slope (rounded, quantized).

    Usual cause: values that the backward pass needs were overwritten (`.data`) or recomputed otherwise.

    Looks like: gradient.wrong_backward, gradient.saved_tensor_modified, gradient.recompute_mismatch name the mechanism.

    Fix: look at what is between these weights and the loss; test custom functions with `torch.autograd.gradcheck`.

    Sources: Pearlmutter 1994, Richardson 1911.
    """
    looks = [(step, facts) for step, facts in run.every(DerivativeFacts) if facts.whole]
    off = [(step, facts, rows) for step, facts in looks if (rows := _with_slope(facts))]
    if len(off) < min(2, len(looks)) or not off:
        if looks:
            yield Passed(f"{looks[-1][1].tensors} tensors at {len(looks)} steps, in {looks[-1][1].dtype}")
        return
    step, facts, rows = off[-1]
    names = [name for each in rows for name in each.names]
    worst = max(rows, key=lambda each: abs(each.of_loss - each.of_gradient))
    stops = listed(sorted({how for how, _ in facts.cuts}))
    author = facts.author or (f"a stop-gradient ({stops})" if facts.cuts else "")
    yield run.finding(
        step,
        symptom=f"the gradients of {len(names)} weights are not the derivative of the loss: along "
        f"{listed(worst.names)} it falls {worst.factor:.3g} times as fast as they say",
        cause=f"{author} is in the backward pass: meant, unless it is in the wrong place" if author else "",
        severity="info" if author else "warning",
        sure=0.6 if author else 0.9,
        since_step=off[0][0],
        where=Where(module=names[-1].rpartition(".")[0]),
        evidence=[("slope of the loss / slope of the gradient", worst.factor, 1.0)],
    )


def _with_slope(facts: DerivativeFacts) -> list[Slopes]:
    return [each for each in facts.deviating if abs(each.of_loss) > STAIRS * abs(each.of_gradient)]
