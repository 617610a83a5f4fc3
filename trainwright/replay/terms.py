"""The terms of a loss: the summands of its last additions, read from the program of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from trainwright.recorder.program import Backward, Constant, Operation, RecordedStep, Slot, mapped

FACTORIES = frozenset({"new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like"})
"""Functions that make the initial value of a sum. They use only the dtype and device of a tensor."""


@dataclass(frozen=True)
class Term:
    """One term: the value in ``slot``, the ``name`` of its operation ("output" of a model), and its weight.

    ``coefficient`` is the weight without factors of the total, such as a loss scale or 1 / number of micro-batches.
    """

    slot: int
    name: str
    weight: float
    coefficient: float


def terms_of(recorded: RecordedStep) -> list[Term]:
    """Returns the terms of the loss of the first backward pass."""
    makers: dict[int, Operation] = {}
    for each in recorded.program:
        if isinstance(each, Operation):
            makers.update(dict.fromkeys(each.outputs, each))
        elif isinstance(each, Backward):
            return [] if each.slot is None else _terms(each.slot, makers)
    return []


def _terms(slot: int, makers: dict[int, Operation]) -> list[Term]:
    outer = 1.0
    while (inner := _factored(slot, makers)) is not None:
        slot, outer = inner[0], outer * inner[1]
    return [replace(term, weight=outer * term.coefficient) for term in _split(slot, 1.0, makers)]


def _factored(slot: int, makers: dict[int, Operation]) -> tuple[int, float] | None:
    """Returns another slot and a factor if the value in ``slot`` is that slot's value times the factor; else None."""
    operation = makers.get(slot)
    if operation is None:
        return None
    name, slots = operation.name.strip("_"), _slots(operation.args)
    factors = [f for f in map(_number, operation.args) if f is not None]
    if name in ("neg", "negative"):
        return slots[0], -1.0
    if name in ("mul", "multiply", "rmul") and len(slots) == len(factors) == 1:
        return slots[0], factors[0]
    if name in ("div", "divide", "truediv") and isinstance(operation.args[0], Slot) and factors and factors[0]:
        return slots[0], 1 / factors[0]
    return None


def _split(slot: int, coefficient: float, makers: dict[int, Operation]) -> list[Term]:
    operation = makers.get(slot)
    if operation is None:
        return [Term(slot, "output", coefficient, coefficient)]
    name, slots = operation.name.strip("_"), _slots(operation.args)
    if name in FACTORIES:
        return []
    if (inner := _factored(slot, makers)) is not None:
        return _split(inner[0], coefficient * inner[1], makers)
    if name in ("add", "radd") and not operation.kwargs:
        return [term for each in slots for term in _split(each, coefficient, makers)]
    if name in ("sub", "rsub") and not operation.kwargs and len(operation.args) == 2:
        signs = (-coefficient, coefficient) if name == "rsub" else (coefficient, -coefficient)
        parts = zip(operation.args, signs)
        return [term for each, sign in parts for one in _slots(each) for term in _split(one, sign, makers)]
    if name in ("sum", "mean") and len(operation.args) == 1 and slots:
        return _stacked(slots[0], coefficient, makers, name) or [
            Term(slot, _named(slots[0], name, makers), coefficient, coefficient)
        ]
    return [Term(slot, name, coefficient, coefficient)]


def _stacked(slot: int, coefficient: float, makers: dict[int, Operation], how: str) -> list[Term]:
    """Returns the terms of ``torch.stack(losses).sum()``."""
    operation = makers.get(slot)
    if operation is None or operation.name != "stack":
        return []
    slots = _slots(operation.args)
    part = coefficient / len(slots) if how == "mean" else coefficient
    return [term for each in slots for term in _split(each, part, makers)]


def _named(slot: int, name: str, makers: dict[int, Operation]) -> str:
    operation = makers.get(slot)
    return f"{name} of {operation.name.strip('_')}" if operation else f"{name} of an output"


def _slots(value: object) -> list[int]:
    found: list[int] = []
    mapped(value, lambda leaf: found.append(leaf.number) if isinstance(leaf, Slot) else None)
    return found


def _number(value: object) -> float | None:
    if isinstance(value, Constant):
        tensor: Tensor = value.tensor
        return float(tensor) if tensor.numel() == 1 and not tensor.requires_grad else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
