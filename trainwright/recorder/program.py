"""The program of a step: what a loop did, written down so that it can be read and run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Ids = tuple[int, ...] | None
"""Dataset positions of one batch; None where they are not known."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that the program itself makes: an output of a forward call, or of an operation on one."""

    number: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that comes from outside: an input, a target, a mask. ``version`` tells whether it was written to."""

    tensor: Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


Autocast = tuple[bool, torch.dtype, bool]
"""Whether it is on, its dtype, whether it caches weights."""


@dataclass(slots=True)
class Call:
    """A forward call of a root module. ``outputs`` are the slots of its tensors, in the order of ``tensors_of``.

    ``training`` holds the mode of every module of every root, ``wanted`` which parameters wanted a gradient;
    ``batch`` is which of the segment's batches it reads, ``part`` the path of what was called in its root.
    """

    root: int
    args: Any
    kwargs: Any
    rng: Any
    training: tuple[bool, ...]
    autocast: Autocast
    outputs: list[int] = field(default_factory=list)
    batch: int = -1
    part: str = ""
    wanted: tuple[bool, ...] = ()


@dataclass(slots=True)
class Operation:
    """A torch function between the outputs and the loss."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    autocast: Autocast
    outputs: list[int]
    in_place: bool = False


@dataclass(slots=True)
class Backward:
    """``loss.backward()``. ``slot`` is None for a loss that the program does not know how to make."""

    slot: int | None
    value: Any
    scale_at: float | Tensor = 1.0
    gradient: Any = None
    retain: bool = False
    inputs: Any = None

    @property
    def scale(self) -> float:
        """The loss scale. On a GPU this waits for the device."""
        return float(self.scale_at)


@dataclass(slots=True)
class ZeroGrad:
    """All gradients of an optimizer (its number) or of the roots (None) are dropped."""

    optimizer: int | None


@dataclass(slots=True)
class Multiply:
    """The gradients of these parameters, by number, times a 0-d tensor or a number."""

    parameters: list[int] | None
    factor: Any


@dataclass(slots=True)
class ClipGradients:
    """By norm, by value or adaptively ("agc"), at a threshold; or by a ``function`` of the user's ("custom")."""

    by: str
    at: float
    parameters: list[int]
    function: Callable[..., None] | None = None


@dataclass(slots=True)
class OptimizerStep:
    """The update. ``groups`` are the hyperparameters that may change between two steps."""

    optimizer: int
    groups: list[dict[str, Any]]
    grad_scale: Any = None
    closure: bool = False


Instruction = Call | Operation | Backward | ZeroGrad | Multiply | ClipGradients | OptimizerStep


@dataclass(slots=True)
class RecordedStep:
    """One optimizer step as it was heard. ``ids`` are those of each batch it consumed.

    ``losses`` are as given to backward, without a loss scale; ``loss`` is their mean where a loop tells it.

    ``blind`` says why it cannot be run again; None if it can. ``num_bytes`` is what its tensors hold.
    """

    step: int
    program: list[Instruction] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    loss: Any = None
    grad_norm: Any = None
    lr: float = 0.0
    num_bytes: int = 0
    ended_s: float = 0.0
    blind: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        return [each for each in self.program if isinstance(each, Call)]


def alive(program: list[Instruction]) -> list[Instruction]:
    """The program without operations that no loss is made of: accuracies, logs."""
    needed: set[int] = set()
    kept: list[Instruction] = []

    def need(value: Any) -> None:
        mapped(value, lambda leaf: needed.add(leaf.number) if isinstance(leaf, Slot) else None)

    for each in reversed(program):
        if isinstance(each, Operation):
            writes = each.in_place and isinstance(each.args[0], Slot) and each.args[0].number in needed
            if not writes and not needed.intersection(each.outputs):
                continue
            need((each.args, each.kwargs))
        elif isinstance(each, Call):
            need((each.args, each.kwargs))
        elif isinstance(each, Backward):
            needed.update([] if each.slot is None else [each.slot])
            need(each.gradient)
        kept.append(each)
    return kept[::-1]


def constants_of(value: Any) -> list[Constant]:
    """All Constants in nested containers, in order."""
    found: list[Constant] = []
    mapped(value, lambda leaf: found.append(leaf) if isinstance(leaf, Constant) else None)
    return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf replaced; containers are rebuilt, objects of other classes are leaves."""
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "keys"):  # HF's BatchEncoding and ModelOutput
        return {key: mapped(value[key], change) for key in value}
    return change(value)


def tensors_of(value: Any, depth: int = 6) -> list[Tensor]:
    """The tensors in what a model returned, always in the same order: containers, dataclasses, plain objects."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float):
        return []
    if isinstance(value, Mapping):
        items: Any = [value[key] for key in value]
    elif isinstance(value, list | tuple):
        items = value
    elif dataclasses.is_dataclass(value) or type(value).__module__ not in ("builtins", "torch"):
        items = getattr(value, "__dict__", {}).values()
    else:
        items = ()
    return [tensor for item in items for tensor in tensors_of(item, depth - 1)]
