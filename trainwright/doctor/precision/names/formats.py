"""Checks of 16-bit formats: whether gradients, updates and sums fit, by comparison with the same step in float32."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding, in_words
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where

CANCELS = 0.05
"""Share of the gradients that are off because the loss is computed in 16 bits."""
APART = 4
"""Steps between two that are looked at."""


def _is_due(case: Case, experiment: str) -> bool:
    """Whether a costly experiment is due: the first time, and again when the run is three times as long."""
    newest = case.newest(experiment)
    return newest is None or case.last_step >= 3 * newest.step


def _outcome(case: Case, experiment: str) -> Examined | None:
    """The newest outcome of an experiment that succeeded; None if there is none."""
    made = [each for each in case.outcomes(experiment) if "blind" not in each.values and not each.values.get("error")]
    return made[-1] if made else None


def what_16_bits_lose(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Requests the comparisons with float32 where 16-bit formats are used at all."""
    facts = case.facts("formats")
    if facts.get("values") and _is_due(case, "fp32_shadow"):
        yield ExperimentRequest("fp32_shadow")
    if facts.get("weights") and _is_due(case, "updates_kept"):
        yield ExperimentRequest("updates_kept")
    if facts.get("weights") and facts["backwards"] > 1 and _is_due(case, "summed_in_16_bit"):
        yield ExperimentRequest("summed_in_16_bit")


def gradients_underflow(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """fp16 gradients become 0 for lack of a loss scale: they are nonzero when the replay scales the loss.

    Gradients that vanish in the model are as small in float32.
    """
    exam = _outcome(case, "fp32_shadow")
    if exam is None or "float16" not in case.facts("formats").get("values", ()):
        return
    facts, scaled = exam.values, exam.values["scaled"]
    if not scaled or facts["gradient_error"] is None:
        return
    is_off = facts["gradient_error"] >= 0.05 and scaled["gradient_error"] < 0.3 * facts["gradient_error"]
    is_lost = facts["lost"] >= 0.1 and scaled["lost"] < 0.3 * facts["lost"]
    if not (is_off and is_lost):
        return
    yield finding(
        "prec.fp16_underflow",
        "critical" if facts["gradient_error"] >= 0.5 else "warning",
        exam.step,
        symptom=f"{facts['lost']:.0%} of the gradient's elements are 0 and are not in float32",
        cause="the gradients are smaller than fp16 can represent, and no loss scale enlarges them",
        remedy="use torch.amp.GradScaler, or bfloat16",
        sure=0.95,
        stage="backward",
        where=Where(dtype="float16"),
        evidence=[
            ("share of gradient elements that are 0 only in fp16", round(facts["lost"], 4), round(scaled["lost"], 4)),
            ("distance from the float32 gradients", facts["gradient_error"], scaled["gradient_error"]),
        ],
        trial=RemedyTrial("loss_scale"),
        explains=("optim.lr_too_low", "gradient.vanishing"),
    )


def values_underflow(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """All results of an fp16 operation are 0, and none of them is in float32: the operation has no effect any more.

    Single values that vanish beside larger ones (the tail of a softmax) do no harm.
    """
    exam = _outcome(case, "fp32_shadow")
    emptied = [each for each in exam.values["emptied"] if each["dtype"] == "float16"] if exam else []
    if exam is None or not emptied:
        return
    first: Facts = emptied[0]
    yield finding(
        "prec.fp16_underflow",
        "warning",
        exam.step,
        symptom=f"{first['op']} in {in_words(first['module'])} gives only 0; in float32 it gives up to "
        f"{first['largest']:.2g}",
        cause="the values are smaller than fp16 can represent (6e-8)",
        remedy="compute this part in float32",
        sure=0.9,
        stage="forward" if first["module"] is not None else "loss",
        where=Where(module=first["module"], op=first["op"], dtype="float16"),
        evidence=[("largest value in float32", first["largest"], ">= 6e-8"), ("operations emptied", len(emptied), 0)],
        trial=RemedyTrial("everything_in_fp32"),
    )


def loss_cancels(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """With only the loss in float32, on the same outputs, the gradients differ: the loss cancels in 16 bits.

    It subtracts numbers that 16 bits have made equal. Rounding alone changes gradients by a percent or two, and now and
    then, where the numbers of a batch happen to be near each other, by more: what earlier steps did not show is looked
    at in another step.
    """
    exam = _outcome(case, "fp32_shadow")
    if exam is None or (exam.values["by_loss"] or 0.0) < CANCELS:
        return
    before = [e for e in case.outcomes("fp32_shadow") if e is not exam and e.values.get("by_loss") is not None]
    if before and before[-1].values["by_loss"] < CANCELS:
        yield ExperimentRequest("fp32_shadow", max(1, exam.step - APART))
        return
    facts = exam.values
    dtype = (case.facts("formats").get("values") or ["bfloat16"])[0]
    op = facts["loss_ops"][-1] if len(facts["loss_ops"]) == 1 else None
    yield finding(
        "prec.cancellation",
        "warning",
        exam.step,
        symptom=f"the gradients are {facts['by_loss']:.0%} off because the loss is computed in {dtype}",
        cause=f"{', '.join(facts['loss_ops'][:6])} in {dtype} subtract numbers that differ by less than its precision",
        remedy="compute the loss in float32: .float() on the outputs before it",
        sure=0.9,
        stage="loss",
        where=Where(op=op, dtype=dtype),
        evidence=[
            ("distance of the gradients from those of a float32 loss", facts["by_loss"], "< 0.02"),
            ("loss", facts["loss"], facts["loss_in_fp32"]),
        ],
        trial=RemedyTrial("loss_in_fp32"),
    )


def updates_are_lost(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """An update leaves 16-bit weights unchanged although they have gradients, and nothing else keeps what was lost.

    What keeps it: a float32 copy, compensated or stochastic rounding. It counts only at a learning rate near the one
    that the run is meant to have: a schedule that is at 0 changes nothing in any format.
    """
    exam = _outcome(case, "updates_kept")
    if exam is None or exam.values["kept_elsewhere"] or exam.values["elements"] == 0 or exam.values["still"] < 0.5:
        return
    lrs = {each.step: each.lr for each in case.watched}
    schedule = case.facts("schedule")
    bases = [lr for each in schedule.get("schedulers", ()) for part in each["parts"] for lr in part.get("base_lrs", ())]
    if not lrs.get(exam.step, 0.0) >= 0.5 * max([*lrs.values(), *bases]) > 0:
        return
    still = exam.values["still"]
    yield finding(
        "prec.lost_updates",
        "critical" if still >= 0.9 else "warning",
        exam.step,
        symptom=f"an update leaves {still:.0%} of the weights that have a gradient unchanged",
        cause="the weights are 16-bit numbers and the updates are smaller than half of their last digit",
        remedy="keep the weights in float32 (autocast for the matrix products), or round stochastically",
        sure=0.95,
        stage="update",
        evidence=[("share of weights that an update does not change", round(still, 4), "< 0.2")],
        trial=RemedyTrial("fp32_weights"),
        explains=("optim.lr_too_low",),
    )


def sums_lose(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The sum of micro-batch gradients in 16 bit is further from the true sum than a single rounding would put it.

    A small addend no longer changes a large sum. A few micro-batches lose little more than one does.
    """
    exam = _outcome(case, "summed_in_16_bit")
    facts = exam.values if exam else {}
    if exam is None or not facts["off"] or facts["off"] < 4 * facts["rounded_once"]:
        return
    yield finding(
        "prec.lost_accumulation",
        "warning",
        exam.step,
        symptom=f"adding up {facts['micro_batches']} micro-batches puts the gradients {facts['off']:.1%} off",
        cause="the gradients are summed in 16 bit, where the sum is too large for what is added to it",
        remedy="accumulate in float32: float32 weights under autocast, or a float32 buffer for the gradients",
        sure=0.9,
        stage="backward",
        evidence=[("distance from the float32 sum", facts["off"], facts["rounded_once"])],
        trial=RemedyTrial("sum_in_fp32"),
    )


def autocast_keeps_old_weights(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Autocast is on at the update, and the live loss is exactly that of older weights.

    Autocast keeps its 16-bit copies of the weights until its block ends. Where it ends in each step, the loss is that
    of the weights of the step.
    """
    exam = case.newest("stale_weights")
    if exam is not None and exam.values.get("weights_of_step") is not None:
        facts = exam.values
        yield finding(
            "prec.autocast_stale_cache",
            "critical",
            exam.step,
            symptom=f"the model computes with the weights it had in step {facts['weights_of_step']}",
            cause="autocast is entered once around the loop, and keeps its copies of the weights until that block ends",
            remedy="enter autocast in each step, around forward and loss only",
            sure=1.0,
            stage="forward",
            since_step=facts["weights_of_step"] + 1,
            evidence=[("loss", facts["then"], facts["now"])],
            explains=("hw.*", "grad*.*", "opt*.*", "data.*"),
        )
        return
    again = case.newest("again")
    steps = [each for each in case.watched if again is not None and each.step == again.step]
    under = any(kind == "step" and value.get("autocast") for each in steps for kind, value in each.events)
    if again is not None and under and again.values.get("same_losses") is False:
        yield ExperimentRequest("stale_weights", again.step)


NAMES: tuple[OldCheck, ...] = (
    what_16_bits_lose,
    gradients_underflow,
    values_underflow,
    loss_cancels,
    updates_are_lost,
    sums_lose,
    autocast_keeps_old_weights,
)
