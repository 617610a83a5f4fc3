"""Formats the plan as lines of text before the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.call_trace import KINDS
from trainwright.plan.header import TOPICS
from trainwright.plan.make import Plan

EXAMINATIONS = "examinations"
"""A key of ``Predicted.seconds``. Its value is the most seconds that examinations may take; they may need less."""


def preflight(plan: Plan, now_s: float) -> list[str]:
    """Return the lines that are printed before a run. ``now_s`` is the Unix time of the first step."""
    lines = [
        f"device      {plan.device} ({plan.device_name})",
        f"parameters  {plan.parameters:,}{_share(plan.trainable, plan.parameters)}",
        f"length      {_length(plan)}",
        *plan.header.lines(),
    ]
    topics = TOPICS if plan.header.settings else frozenset[str]()
    reasons = {each.why for each in plan.header.settings}
    notes = [note for note in plan.notes if note.topic not in topics and note.why not in reasons]
    lines += [f"{note.topic:<11} {note.choice}: {note.why}" for note in notes]
    predicted = plan.predicted
    if predicted.memory_bytes is not None:
        lines.append(f"memory      tensors {memory_in_words(predicted.memory_bytes)}; the process comes on top")
    if predicted.step_s is not None:
        step = step_in_words(predicted.step_s, predicted.wait_s)
        scope = "a dry run of forward, backward and update; log, doctor and other programs come on top"
        lines.append(f"time        {step}{_steps_in_time(plan)}: {scope}")
    if predicted.ends_in_s is not None:
        left_s = predicted.ends_in_s
        lines.append(f"end         {time_of_day(now_s + left_s, now_s)}, in {human_seconds(left_s)}")
    elif predicted.seconds:
        lines.append(f"end         {_end(predicted.seconds, now_s)}")
    if predicted.initial_loss is not None:
        lines.append(f"first loss  {_first_loss(predicted.initial_loss, predicted.expected_loss)}")
    return lines


def _share(trainable: int, parameters: int) -> str:
    return "" if trainable == parameters else f", {trainable:,} of them trained ({trainable / parameters:.2%})"


def _length(plan: Plan) -> str:
    if plan.extent.steps is None:
        counted = "by the clock: from the first step on: training, evaluation, examinations, samples and the last save"
        if plan.predicted.ends_in_s is None:
            what = "steps and waiting for data; evaluation, saving, examinations and samples come on top"
            counted = f"of training: {what}"
        return f"{plan.extent.seconds:g} s {counted}"
    if plan.steps_per_epoch is None or plan.spent.step:  # earlier epochs had another number of steps
        return f"{plan.extent.steps:,} steps"
    epochs = f"{plan.extent.steps / plan.steps_per_epoch:.3g}"
    return f"{plan.extent.steps:,} steps, {epochs} epoch{'' if epochs == '1' else 's'}"


def memory_in_words(memory_bytes: Mapping[str, int]) -> str:
    """Return memory by kind, such as `about 88 KiB: weights 22 KiB, ...`, always in the same order."""
    known = [kind for kind in KINDS if memory_bytes.get(kind)]
    parts = ", ".join(f"{kind} {human_bytes(memory_bytes[kind])}" for kind in known)
    return f"about {human_bytes(sum(memory_bytes.values()))}: {parts}"


def step_in_words(step_s: float, wait_s: float) -> str:
    """Return the measured step time. The wait for data is named if it is more than a tenth of the step."""
    waits = f", {human_seconds(wait_s)} of it waiting for data" if wait_s > 0.1 * step_s else ""
    return f"about {human_seconds(step_s)} a step{waits}"


def _steps_in_time(plan: Plan) -> str:
    if plan.extent.seconds is None or plan.predicted.ends_in_s is not None or not plan.predicted.step_s:
        return ""
    return f", about {plan.extent.seconds / plan.predicted.step_s:,.0f} steps in {plan.extent.seconds:g} s"


def _end(seconds: Mapping[str, float], now_s: float) -> str:
    """Return text such as `about 14:32:05, after 62 s: training 60 s, evaluation 2.1 s`."""
    total_s = sum(seconds.values())
    most = {EXAMINATIONS: f"{EXAMINATIONS} at most"}
    parts = ", ".join(f"{most.get(what, what)} {human_seconds(each)}" for what, each in seconds.items() if each)
    return f"about {time_of_day(now_s + total_s, now_s)}, after {human_seconds(total_s)}: {parts}"


def describe_corrected_end(step_s: float, predicted_s: float, left_s: float, now_s: float) -> str:
    """Return the line that corrects the predicted end after the real step time is known."""
    end = f"ends about {time_of_day(now_s + left_s, now_s)}, in {human_seconds(left_s)}"
    return f"a step takes {human_seconds(step_s)} ({human_seconds(predicted_s)} predicted): {end}"


def time_of_day(then_s: float, now_s: float) -> str:
    """Return local time, such as `14:32:05`, or with the day if it is not today: `Tue 24 Nov 14:32`."""
    then, now = time.localtime(then_s), time.localtime(now_s)
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%a %d %b %H:%M", then)


def _first_loss(loss: float, expected: float | None) -> str:
    if expected is None:
        return f"{loss:.4f}"
    theory = f"{loss:.4f}, and theory says ln {math.exp(expected):.0f} = {expected:.4f} for a model that knows nothing"
    if not math.isfinite(loss):
        return f"{theory}: NOT FINITE, the data or the initial weights are broken"
    if loss > 1.5 * expected:
        return f"{theory}: far above, so inputs may not be normalised or initial weights may be too large"
    return theory
