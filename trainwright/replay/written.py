"""Recorded steps as JSON values and tensors, and back: what is read is data, and nothing in it can be called.

A container or a leaf that JSON has no word for is a list that begins with its tag: ``["tuple", 1, 2]``. Of torch's
functions the name is kept, and a name is looked up in torch's own table of functions that can be overridden.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

from trainwright.engine.chunked import chunked_cross_entropy
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Constant,
    Instruction,
    Multiply,
    Operation,
    OptimizerStep,
    RecordedStep,
    Slot,
    ZeroGrad,
    alive,
    tensors_of,
)

ALIGNED = 64  # bytes: where torch puts a tensor; kernels of other libraries may sum otherwise at other places
SPREAD = 4  # a view of a memory this many times larger than itself is kept as its elements alone
_INSTRUCTIONS = {
    each.__name__: each for each in (Call, Operation, Backward, ZeroGrad, Multiply, ClipGradients, OptimizerStep)
}
_TAKES_CODE = frozenset(
    {"apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "set_", "module_load"}
)


@dataclass(frozen=True)
class Named:
    """Stands for a parameter of the model, by number, until there is one."""

    number: int


@dataclass(frozen=True)
class Lost:
    """Stands for what could not be kept; its tensors were."""

    what: str
    tensors: tuple[Tensor, ...] = ()


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Torch's public functions of tensors by name, without those that take something to call; and our own."""
    every = [function for group in get_overridable_functions().values() for function in group]
    named = {_name_of(function): function for function in every}
    return {name: function for name, function in named.items() if _is_harmless(name)} | _OURS


_OURS: dict[str, Callable[..., Any]] = {"trainwright.chunked_cross_entropy": chunked_cross_entropy}


def _name_of(function: Callable[..., Any]) -> str:
    ours = next((name for name, each in _OURS.items() if each is function), None)
    return ours or str(resolve_name(function))


def _is_harmless(name: str) -> bool:
    own = name.removesuffix(".__get__").split(".")[-1]
    return own not in _TAKES_CODE and (not own.startswith("_") or own in _OPERATORS)


_OPERATORS = {f"__{prefix}{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
) for prefix in ("", "r", "i")} | {
    f"__{name}__" for name in ("getitem", "setitem", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")
}  # fmt: skip


@dataclass
class Writer:
    """Takes values apart; ``lost`` says what could not be kept. ``numbers`` are those of parameters, by identity."""

    numbers: Mapping[int, int]
    lost: list[str] = field(default_factory=list)

    def segment(self, recorded: RecordedStep) -> dict[str, Any]:
        """One step."""
        if recorded.blind:
            self.lost.append(recorded.blind)
        program = [self._instruction(each) for each in alive(recorded.program)]
        names = [each.name for each in fields(recorded) if each.name != "program"]
        rest = {name: self.value(getattr(recorded, name), "the record") for name in names}
        return {**rest, "program": program}

    def _instruction(self, each: Instruction) -> dict[str, Any]:
        name, what = type(each).__name__, "the inputs" if isinstance(each, Call) else "the loss"
        kept = {f.name: self.value(getattr(each, f.name), what) for f in fields(each) if f.name != "function"}
        if isinstance(each, Operation):
            function: str | None = _name_of(each.function)
            if function not in _functions():
                function = None
                self.lost.append(f"the loss is made with {each.name}, which is no public function of torch")
            kept["function"] = function
        return {"is": name, **kept}

    def value(self, value: Any, where: str) -> Any:
        """Anything that a program, a snapshot or a record holds."""
        match value:
            case Constant():
                return self._constant(value, where)
            case Tensor():
                return self._tensor(value, where)
            case np.generic():
                return value.item()
            case None | bool() | int() | float() | str():
                return value
            case Slot():
                return ["slot", value.number]
            case torch.dtype() | torch.memory_format() | torch.layout():
                return [type(value).__name__, str(value).removeprefix("torch.")]
            case torch.device():
                return ["device", str(value)]
            case slice():
                return ["slice", *(self.value(each, where) for each in (value.start, value.stop, value.step))]
            case types.EllipsisType():
                return ["ellipsis"]
            case _:
                return self._container(value, where)

    def _container(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return ["dict", *([self.value(k, where), self.value(v, where)] for k, v in value.items())]
        if type(value) in (list, tuple, torch.Size):
            return [type(value).__name__, *(self.value(each, where) for each in value)]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.lost.append(f"{where} hold a {kind}, which cannot be kept without running code to read it")
        return ["lost", kind, *(self._tensor(each, where) for each in tensors_of(value))]

    def _constant(self, constant: Constant, where: str) -> Any:
        tensor = constant.tensor
        if (number := self.numbers.get(id(tensor))) is not None:
            return ["parameter", number]
        if not constant.is_unchanged and not isinstance(tensor, nn.Parameter):
            self.lost.append(f"{where} were written to after they were used")
        return ["constant", self._tensor(tensor, where), tensor.requires_grad]

    def _tensor(self, tensor: Tensor, where: str) -> Any:
        """Its elements as they lie in memory, and where in it they begin."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_quantized or tensor.is_meta:
            self.lost.append(f"{where} hold a {type(tensor).__qualname__}, which is more than a tensor")
        tensor, on_device = tensor.detach(), tensor.device.type != "cpu"
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return ["tensor", tensor, 0, on_device]
        begins = tensor.data_ptr() % ALIGNED // tensor.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if tensor.is_contiguous() or tensor.is_complex() or not tensor.numel() or span > SPREAD * tensor.numel():
            return ["tensor", tensor, begins, on_device]
        flat = tensor.as_strided((span,), (1,))
        return ["view", flat, begins, on_device, list(tensor.shape), list(tensor.stride())]


class Reader:
    """Puts values together again. Raises ValueError and its like for what no Writer wrote.

    ``whole``: nothing was lost, so every function has a name.
    """

    def __init__(self, num_parameters: int, device: torch.device, *, whole: bool) -> None:
        self._num_parameters, self._device, self._whole = num_parameters, device, whole

    def segment(self, kept: Mapping[str, Any]) -> RecordedStep:
        """One step."""
        program = [self._instruction(each) for each in kept["program"]]
        recorded: RecordedStep = self._made(
            RecordedStep, {k: self.value(v) for k, v in kept.items() if k != "program"} | {"program": program}
        )
        return recorded

    def _instruction(self, kept: Mapping[str, Any]) -> Any:
        cls = _INSTRUCTIONS[kept["is"]]
        given = {name: self.value(each) for name, each in kept.items() if name not in ("is", "function")}
        if cls is Operation:
            lost = kept["function"] is None and not self._whole
            given["function"] = _is_lost if lost else function_of(kept["function"])
        return self._made(cls, given)

    def _made(self, cls: Any, given: dict[str, Any]) -> Any:
        hints = _hints(cls)
        if given.keys() != hints.keys():
            raise ValueError(f"a {cls.__name__} has not the fields {sorted(given.keys() ^ hints.keys())}")
        for name, value in given.items():
            if not _fits(value, hints[name]):
                raise ValueError(f"{name} of a {cls.__name__} is no {hints[name]}")
        return cls(**given)

    def value(self, kept: Any) -> Any:
        """The inverse of ``Writer.value``."""
        if not isinstance(kept, list):
            if kept is None or type(kept) in (bool, int, float, str):
                return kept
            raise ValueError(f"a {type(kept).__name__} has no tag")
        tag, *items = kept
        match tag:
            case "list" | "tuple" | "Size":
                return {"list": list, "tuple": tuple, "Size": torch.Size}[tag](self.value(each) for each in items)
            case "dict":
                return {self.value(key): self.value(each) for key, each in items}
            case "slot" if type(items[0]) is int:
                return Slot(items[0])
            case "parameter" if type(items[0]) is int and 0 <= items[0] < self._num_parameters:
                return Named(items[0])
            case "lost":
                return Lost(str(items[0]), tuple(self.value(each) for each in items[1:]))
            case _:
                return self._leaf(tag, items)

    def _leaf(self, tag: str, items: Sequence[Any]) -> Any:
        match tag:
            case "tensor" | "view":
                return self._tensor(*items)
            case "constant":
                tensor = self._tensor(*items[0][1:]).requires_grad_(items[1] is True)
                return Constant(tensor, tensor._version)
            case "dtype" | "memory_format" | "layout":
                found = getattr(torch, items[0])
                if type(found) is not getattr(torch, tag):
                    raise ValueError(f"torch.{items[0]} is no {tag}")
                return found
            case "device":
                return torch.device(items[0])
            case "slice":
                return slice(*(self.value(each) for each in items))
            case "ellipsis":
                return ...
        raise ValueError(f"there is nothing like {tag!r} here")

    def _tensor(self, tensor: Tensor, begins: int, on_device: bool, shape: Any = None, stride: Any = None) -> Tensor:
        """A tensor of its own that lies as it did."""
        if not isinstance(tensor, Tensor) or type(begins) is not int or not 0 <= begins < ALIGNED:
            raise ValueError("a tensor is missing")
        if on_device and self._device.type != "cpu":
            tensor = tensor.to(self._device)
        if tensor.layout != torch.strided:
            return tensor
        room = torch.empty(begins + tensor.numel(), dtype=tensor.dtype, device=tensor.device)[begins:]
        if shape is None and not tensor.is_contiguous():
            room = tensor.clone()
        elif shape is None:
            room = room.view(tensor.shape).copy_(tensor)
        else:
            room = room.copy_(tensor).as_strided(shape, stride, room.storage_offset())
        return room.detach()


def _is_lost(*args: Any, **kwargs: Any) -> None:
    """Stands for a function that could not be kept."""
    raise ValueError("this function was not kept")


def function_of(name: Any) -> Callable[..., Any]:
    """Torch's function of that name. Raises ValueError for any other: nothing is looked up but in torch's table."""
    if not isinstance(name, str) or name not in _functions():
        raise ValueError(f"{name!r} is no public function of torch that a step could have called")
    return _functions()[name]


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says, as deep as it says it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or origin is Callable or hint is Callable or origin is typing.get_origin(Callable[..., Any]):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in args)
    if origin is tuple and args[-1:] == (...,):
        return type(value) is tuple and all(_fits(each, args[0]) for each in value)
    if origin is tuple:
        return type(value) is tuple and len(value) == len(args) and all(map(_fits, value, args))
    if origin is list:
        return type(value) is list and (args[0] is Any or all(_fits(each, args[0]) for each in value))
    if origin is dict:
        return type(value) is dict and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if hint is float:
        return type(value) in (float, int)
    return type(value) is hint or (hint not in (int, bool) and isinstance(value, hint))
