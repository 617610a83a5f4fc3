"""Finds a loss of the sum of an output and its targets, in place of their difference."""

from __future__ import annotations

from trainwright.recorder.program import Call, Constant, Operation, RecordedStep, Slot

SUMS = frozenset({"add", "__add__", "__radd__", "radd"})
SIZES = frozenset({"square", "abs", "absolute", "pow", "__pow__"})
"""What makes a distance of a difference: even functions."""
VIEWS = frozenset(
    {"float", "double", "to", "type", "squeeze", "unsqueeze", "view", "reshape", "flatten", "__getitem__", "contiguous"}
)
"""What leaves an output what it is."""
FEW = 8
"""Values that are targets, and no margin."""


def added_to_targets(recorded: RecordedStep) -> str:
    """The function that gets the sum of a model's output and a constant of its shape; "" where there is none."""
    outputs = {slot for each in recorded.program if isinstance(each, Call) for slot in each.outputs}
    sums: set[int] = set()
    for each in recorded.program:
        if not isinstance(each, Operation):
            continue
        given = {value.number for value in each.args if isinstance(value, Slot)}
        if each.name in VIEWS and given & outputs:
            outputs |= set(each.outputs)
        elif each.name in SUMS and given & outputs and any(_are_targets(value) for value in each.args):
            sums |= set(each.outputs)
        elif each.name in SIZES and given & sums and _is_even(each):
            return each.name
    return ""


def _are_targets(value: object) -> bool:
    """Whether it has a value for each sample, of both sides of their mean."""
    if not isinstance(value, Constant) or value.tensor.requires_grad or not value.tensor.is_floating_point():
        return False
    flat = value.tensor.detach().flatten()
    return flat.numel() >= FEW and bool((flat != flat[0]).any())


def _is_even(operation: Operation) -> bool:
    return operation.name not in ("pow", "__pow__") or operation.args[1:] == (2,)
