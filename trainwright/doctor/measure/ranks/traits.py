"""Describes the operations of a rank in a step. Replicas are the same whatever their data are."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.recorder.program import Call, ClipGradients, Instruction, Multiply, Operation, RecordedStep, alive

_MAX_LENGTH = 160


def traits_of(step: RecordedStep) -> dict[str, str]:
    """Returns by name: module modes, precision, loss, and operations on gradients; {} without a recording."""
    program = alive(step.program)
    calls = [each for each in program if isinstance(each, Call)]
    if not calls:
        return {}
    modes, wanted = calls[0].training, calls[0].wanted
    losses = [each.name for each in program if isinstance(each, Operation) and each.with_grad]
    return {
        "modes": f"{sum(modes)} of {len(modes)} modules in training mode",
        "trained weights": f"{sum(wanted)} of {len(wanted)}",
        "precision": " and ".join(dict.fromkeys(_precision(call) for call in calls)),
        "loss": " ".join(losses)[:_MAX_LENGTH],
        "changes of the gradients": ", ".join(_changes(program))[:_MAX_LENGTH] or "none",
    }


def _precision(call: Call) -> str:
    is_on, dtype, _ = call.autocast
    return f"autocast to {dtype}" if is_on else "no autocast"


def _changes(program: list[Instruction]) -> Iterator[str]:
    for each in program:
        if isinstance(each, ClipGradients):
            yield f"clipped by {each.by} at {each.at:.3g}"
        elif isinstance(each, Multiply):
            yield "multiplied"
