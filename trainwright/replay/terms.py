"""The terms of a loss: what is added up last, read from the program of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainwright.observe.program import Backward, Constant, Operation, Segment, Slot, mapped


@dataclass(frozen=True)
class Term:
    """What makes the value in ``slot``, an operation or a model ("output"), and its weight in the loss."""

    slot: int
    name: str
    weight: float


def terms_of(segment: Segment) -> list[Term]:
    """The terms of the first loss that a backward pass begins at."""
    made: dict[int, Operation] = {}
    for each in segment.program:
        if isinstance(each, Operation):
            made.update(dict.fromkeys(each.outputs, each))
        elif isinstance(each, Backward):
            return [] if each.slot is None else _split(each.slot, 1.0, made)
    return []


def _split(slot: int, weight: float, made: dict[int, Operation]) -> list[Term]:
    operation = made.get(slot)
    name = operation.name.strip("_") if operation else "output"
    if operation is None:
        return [Term(slot, name, weight)]
    slots = _slots(operation.args)
    factors = [f for f in map(_number, operation.args) if f is not None]
    if name in ("add", "iadd", "radd") and not operation.kwargs:
        return [term for each in slots for term in _split(each, weight, made)]
    if name in ("sub", "rsub", "isub") and not operation.kwargs and len(operation.args) == 2:
        signs = (-1.0, 1.0) if name == "rsub" else (1.0, -1.0)
        parts = zip(operation.args, signs)
        return [t for each, s in parts for one in _slots(each) for t in _split(one, s * weight, made)]
    if name == "neg":
        return _split(slots[0], -weight, made)
    if name in ("mul", "imul", "rmul") and len(slots) == len(factors) == 1:
        return _split(slots[0], weight * factors[0], made)
    if name in ("div", "truediv") and isinstance(operation.args[0], Slot) and factors and factors[0]:
        return _split(slots[0], weight / factors[0], made)
    if name in ("sum", "mean") and len(operation.args) == 1 and slots:
        return _stacked(slots[0], weight, made, name) or [Term(slot, _named(slots[0], name, made), weight)]
    return [Term(slot, name, weight)]


def _stacked(slot: int, weight: float, made: dict[int, Operation], how: str) -> list[Term]:
    """``torch.stack(losses).sum()``."""
    operation = made.get(slot)
    if operation is None or operation.name != "stack":
        return []
    slots = _slots(operation.args)
    share = weight / len(slots) if how == "mean" else weight
    return [term for each in slots for term in _split(each, share, made)]


def _named(slot: int, name: str, made: dict[int, Operation]) -> str:
    operation = made.get(slot)
    return f"{name} of {operation.name.strip('_')}" if operation else f"{name} of an output"


def _slots(value: Any) -> list[int]:
    found: list[int] = []
    mapped(value, lambda leaf: found.append(leaf.number) if isinstance(leaf, Slot) else None)
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, Constant):
        tensor: Tensor = value.tensor
        return float(tensor) if tensor.numel() == 1 and not tensor.requires_grad else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
