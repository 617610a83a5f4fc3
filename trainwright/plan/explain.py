"""The plan as lines of text before the run, and numbers in human units."""

from __future__ import annotations

import math

from trainwright.plan.make import Plan


def preflight(plan: Plan) -> list[str]:
    """One line for each fact and decision of the plan."""
    lines = [
        f"device      {plan.device} ({plan.device_name})",
        f"parameters  {plan.parameters:,}{_share(plan.trainable, plan.parameters)}",
        f"length      {_length(plan)}",
    ]
    lines += [f"{note.topic:<11} {note.choice}: {note.why}" for note in plan.notes]
    if plan.memory_bytes is not None:
        parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in plan.memory_bytes.items() if size)
        lines.append(f"memory      about {human_bytes(sum(plan.memory_bytes.values()))}: {parts}")
    if plan.step_s is not None:
        lines.append(f"time        about {human_seconds(plan.step_s)} a step without data and saving{_total(plan)}")
    if plan.initial_loss is not None:
        lines.append(f"first loss  {_first_loss(plan.initial_loss, plan.expected_loss)}")
    return lines


def _share(trainable: int, parameters: int) -> str:
    return "" if trainable == parameters else f", {trainable:,} of them trained ({trainable / parameters:.2%})"


def _length(plan: Plan) -> str:
    if plan.extent.steps is None:
        return f"{plan.extent.seconds:g} s of training"
    if plan.steps_per_epoch is None or plan.spent.step:  # earlier epochs had another number of steps
        return f"{plan.extent.steps:,} steps"
    epochs = f", {plan.extent.steps / plan.steps_per_epoch:.3g} epochs"
    return f"{plan.extent.steps:,} steps{epochs}"


def _total(plan: Plan) -> str:
    assert plan.step_s is not None
    if plan.extent.steps is not None:
        return f", {human_seconds(plan.step_s * plan.extent.steps)} in all"
    assert plan.extent.seconds is not None
    return f", about {plan.extent.seconds / plan.step_s:,.0f} steps in {plan.extent.seconds:g} s"


def _first_loss(loss: float, expected: float | None) -> str:
    if expected is None:
        return f"{loss:.4f}"
    theory = f"{loss:.4f}, and theory says ln {math.exp(expected):.0f} = {expected:.4f} for a model that knows nothing"
    if not math.isfinite(loss):
        return f"{theory}: NOT FINITE, the data or the initial weights are broken"
    if loss > 1.5 * expected:
        return f"{theory}: far above, so inputs may not be normalised or initial weights may be too large"
    return theory


def human_bytes(count: float) -> str:
    """Such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # beyond, three digits would be 1e+03
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def human_seconds(seconds: float) -> str:
    """Such as `12 ms`, `3.2 s`, `4 min 10 s` or `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
