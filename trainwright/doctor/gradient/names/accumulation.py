"""Gradient accumulation: whether the micro-batches of a step add up to the mean that one large batch would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import variance

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding
from trainwright.doctor.program.names.contract import kinds, of_step
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined


def windows(case: Case) -> list[Examined]:
    """The outcomes for steps whose backward passes have a batch each, all through the same functions.

    Several losses on one batch, the real and the fake images of a GAN, or an adversarial attack before the step are
    not micro-batches. Nor are passes whose gradients the loop has read before it dropped them: for a step by hand, as
    of an extragradient, or for a projection.
    """
    seen = [e for e in case.outcomes("accumulation") if e.values.get("distinct") and e.values.get("same_functions")]
    return [e for e in seen if not e.values.get("used_by_hand")]


def not_normalised(case: Case) -> Iterator[Finding]:
    """Each micro-batch has the weight of a whole batch: the gradient is a sum of means.

    A weight is the derivative of the argument of backward() with respect to the mean loss. A loop that divides the
    gradients by hand is recognised by their norm at the step, which then differs from that of the replay.
    """
    found = [exam for exam in windows(case) if _is_sum(exam.values)]
    if not found:
        return
    last, count = found[-1], found[-1].values["backwards"]
    yield finding(
        "accum.not_normalised",
        "warning",
        last.step,
        symptom=f"the gradient of a step is the sum of {count} micro-batches, {count} times what their mean is",
        cause="each micro-batch's mean loss goes to backward() without being divided by the number of micro-batches",
        remedy=f"call backward() on loss / {count}",
        sure=0.9,
        stage="loss",
        since_step=found[0].step,
        evidence=[("sum of the weights of the micro-batches", sum(last.values["weights"]), 1.0)],
        trial=RemedyTrial("divided_loss", {"by": count}),
        explains=("grad.clip_always_active", "opt.lr_too_high", "sched.no_warmup"),
    )


def _is_sum(values: Facts) -> bool:
    weights = values.get("weights") or [None]
    if any(each is None for each in weights) or values.get("discarded"):
        return False
    return is_as_recorded(values) and all(0.9 <= each <= 1.1 for each in weights)


def is_as_recorded(values: Facts) -> bool:
    """Whether nothing else has scaled the gradients: their norm at the step is that of the replay."""
    then, now = values.get("norm_then"), values.get("norm_now")
    return not then or not now or abs(then - now) < 0.05 * now


def token_weighting(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Micro-batches of unequal numbers of targets have equal weights, so a target in a short one counts for more.

    Reported only where the gradient differs from that of the whole batch. A smaller last micro-batch is usual.
    """
    uneven = [exam for exam in windows(case) if _is_uneven(exam.values)][:4]
    if len(uneven) > 1 or any(len({*exam.values["counts"][:-1]}) > 1 for exam in uneven):
        yield from (ExperimentRequest("token_weights", exam.step) for exam in uneven)
    found = [exam for exam in case.outcomes("token_weights") if exam.values.get("off", 0.0) > 0.1]
    if not found:
        return
    last = found[-1]
    counts = last.values["counts"]
    yield finding(
        "accum.token_weighting",
        "warning",
        found[0].step,
        symptom=f"targets count for up to {max(counts) / min(counts):.2g} times as much as others in the same step",
        cause=f"micro-batches of {', '.join(f'{each:g}' for each in counts)} targets each get a mean of their own and "
        "the same weight",
        remedy="sum the losses of all micro-batches and divide by the number of targets in all of them",
        sure=0.9,
        stage="loss",
        evidence=[
            ("difference to the gradient of the whole, relative", last.values["off"], 0.0),
            ("loss", last.values["loss"], last.values["loss_by_count"]),
        ],
    )


def _is_uneven(values: Facts) -> bool:
    """Whether weights are equal while the counts of targets differ by more than masking at random would make them.

    Counts under random masking are binomial: their variance is below their mean. Those of sequence lengths are not.
    """
    counts, weights = values.get("counts") or [None], values.get("weights") or [None]
    if len(counts) < 2 or any(not each for each in (*counts, *weights)):
        return False
    differ = max(counts) >= 1.5 * min(counts) and variance(counts) > sum(counts) / len(counts)
    return differ and bool(max(weights) < 1.1 * min(weights))


def grads_discarded(case: Case) -> Iterator[Finding]:
    """In most steps the gradients of some micro-batches are dropped before the update.

    A loop that leaves an update out, for a loss scale that is too high or for an outlier, does so in few of its steps.
    """
    found = [exam for exam in windows(case) if exam.values.get("discarded")]
    looked_at = [exam for exam in case.outcomes("accumulation") if "backwards" in exam.values]
    if len(found) < 2 or 2 * len(found) < len(looked_at):
        return
    last = found[-1]
    lost, count = last.values["discarded"], last.values["backwards"]
    yield finding(
        "accum.grads_discarded",
        "critical",
        last.step,
        symptom=f"of {count} micro-batches only {count - lost} are in the update",
        cause="zero_grad() is called between the backward passes of one step",
        remedy="call zero_grad() once for each step, behind step()",
        sure=0.95,
        stage="backward",
        since_step=found[0].step,
        evidence=[("backward passes whose gradients are dropped", lost, 0)],
        explains=("opt.lr_too_low", "accum.not_normalised", "opt.missing_zero_grad"),
    )


def leftover_window(case: Case) -> Iterator[Finding]:
    """A window that was incomplete at the end of an epoch stayed open, and a whole window was added to it.

    A window that runs across epochs on purpose has the usual length in all. Where windows are as long as their
    contents make them (a number of tokens), there is no usual length.
    """
    counts = {record.step: len(kinds(record, "backward")) for record in case.watched}
    usual, times = Counter(counts.values()).most_common(1)[0] if counts else (1, 0)
    split = case.facts("contract").get("split_windows") or ()
    within = [count for step, count in counts.items() if step not in {step for step, _, _ in split}]
    if len(within) - within.count(usual) > max(1, len(split)):
        return
    for step, before, total in split:
        if usual < 2 or times < 3 or total != usual + before or before >= usual:
            continue
        record = of_step(case, step)
        yield finding(
            "accum.leftover_window",
            "warning",
            step,
            symptom=f"the update of step {step} has {total} micro-batches in it, not {usual}",
            cause=f"no step followed the last {before} micro-batches of the epoch before, and their gradients stayed",
            remedy="step at the end of an epoch too (divided by what the window has), or drop what is left over",
            sure=0.95,
            stage="backward",
            evidence=[
                ("backward passes in the window", total, usual),
                ("norm at the step", record.grad_norm if record else None),
            ],
        )


NAMES: tuple[OldCheck, ...] = (
    not_normalised,
    token_weighting,
    grads_discarded,
    leftover_window,
)
