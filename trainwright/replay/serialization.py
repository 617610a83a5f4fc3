"""Serializes recorded steps as JSON values and tensors, and reads them back without executing anything.

A container or leaf that JSON does not have is a list that begins with a tag: ``["tuple", 1, 2]``. Torch functions are
written by name, and names are looked up only in torch's own table of overridable functions.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

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
from trainwright.recorder.user_types import Kwargs, TorchFunction
from trainwright.runs.json_values import Facts

ALIGNMENT_BYTES = 64
"""Alignment of torch's allocations in bytes. Kernels may sum in another order at other addresses."""
MAX_VIEW_MEMORY_RATIO = 4
"""If the memory of a view exceeds the view by this factor, only the elements of the view are written."""
_INSTRUCTIONS: dict[str, type[Instruction]] = {
    "Call": Call,
    "Operation": Operation,
    "Backward": Backward,
    "ZeroGrad": ZeroGrad,
    "Multiply": Multiply,
    "Clip": ClipGradients,
    "Step": OptimizerStep,
}
"""The classes of instructions by their names on disk."""
_NOT_WRITTEN = ("function", "held")
_NAMES = {each: name for name, each in _INSTRUCTIONS.items()}
_METHODS_NOT_IN_BUNDLES = frozenset(
    {"apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "set_", "module_load"}
)


T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A placeholder for a parameter of the model, by number."""

    number: int


@dataclass(frozen=True)
class Lost:
    """A placeholder for an object that could not be written; only its tensors were."""

    what: str
    tensors: tuple[Tensor, ...] = ()


@cache
def _functions() -> dict[str, TorchFunction]:
    """Returns functions by name: Trainwright's, and torch's public functions of tensors that take no callable."""
    every = [function for group in get_overridable_functions().values() for function in group]
    named = {_name_of(function): function for function in every}
    return {name: function for name, function in named.items() if _is_harmless(name)} | _OURS


_OURS: dict[str, TorchFunction] = {"trainwright.chunked_cross_entropy": chunked_cross_entropy}


def _name_of(function: TorchFunction) -> str:
    ours = next((name for name, each in _OURS.items() if each is function), None)
    return ours or str(resolve_name(function))


def _is_harmless(name: str) -> bool:
    own = name.removesuffix(".__get__").split(".")[-1]
    return own not in _METHODS_NOT_IN_BUNDLES and (not own.startswith("_") or own in _OPERATORS)


_OPERATORS = {f"__{prefix}{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
) for prefix in ("", "r", "i")} | {
    f"__{name}__" for name in ("getitem", "setitem", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")
}  # fmt: skip


@dataclass
class Writer:
    """Writes values. ``lost`` lists what could not be written. ``numbers`` maps the id of a parameter to its number."""

    numbers: Mapping[int, int]
    lost: list[str] = field(default_factory=list)

    def step(self, recorded: RecordedStep) -> dict[str, object]:
        """Writes one step."""
        if recorded.blind:
            self.lost.append(recorded.blind)
        program = [self._instruction(each) for each in alive(recorded.program)]
        names = [each.name for each in fields(recorded) if each.name != "program"]
        rest = {name: self.value(getattr(recorded, name), "the record") for name in names}
        return {**rest, "program": program}

    def _instruction(self, each: Instruction) -> dict[str, object]:
        name, what = _NAMES[type(each)], "the inputs" if isinstance(each, Call) else "the loss"
        stored = {f.name: self.value(getattr(each, f.name), what) for f in fields(each) if f.name not in _NOT_WRITTEN}
        if isinstance(each, Operation):
            function: str | None = _name_of(each.function)
            if function not in _functions():
                function = None
                self.lost.append(f"the loss is made with {each.name}, which is no public function of torch")
            stored["function"] = function
        return {"is": name, **stored}

    def value(self, value: object, where: str) -> object:
        """Writes any value of a program, a snapshot or a record. ``where`` is its location, for ``lost``."""
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

    def _container(self, value: object, where: str) -> list[object]:
        if isinstance(value, dict):
            return ["dict", *([self.value(k, where), self.value(v, where)] for k, v in value.items())]
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            return [type(value).__name__, *(self.value(each, where) for each in value)]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.lost.append(f"{where} hold a {kind}, which cannot be kept without running code to read it")
        return ["lost", kind, *(self._tensor(each, where) for each in tensors_of(value))]

    def _constant(self, constant: Constant, where: str) -> list[object]:
        tensor = constant.tensor
        if (number := self.numbers.get(id(tensor))) is not None:
            return ["parameter", number]
        if not constant.is_unchanged and not isinstance(tensor, nn.Parameter):
            self.lost.append(f"{where} were written to after they were used")
        return ["constant", self._tensor(tensor, where), tensor.requires_grad]

    def _tensor(self, tensor: Tensor, where: str) -> list[object]:
        """Returns a tag, the elements in memory order, and the offset of the first one from an aligned address."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_quantized or tensor.is_meta:
            self.lost.append(f"{where} hold a {type(tensor).__qualname__}, which is more than a tensor")
        tensor, on_device = tensor.detach(), tensor.device.type != "cpu"
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return ["tensor", tensor, 0, on_device]
        begins = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if (
            tensor.is_contiguous()
            or tensor.is_complex()
            or not tensor.numel()
            or span > MAX_VIEW_MEMORY_RATIO * tensor.numel()
        ):
            return ["tensor", tensor, begins, on_device]
        flat = tensor.as_strided((span,), (1,))
        return ["view", flat, begins, on_device, list(tensor.shape), list(tensor.stride())]


class Reader:
    """Reads the output of a Writer. Raises ValueError, TypeError and the like for any other input.

    ``whole``: nothing was lost, so every function has a name.
    """

    def __init__(self, num_parameters: int, device: torch.device, *, whole: bool) -> None:
        self._num_parameters, self._device, self._whole = num_parameters, device, whole

    def step(self, stored: Facts) -> RecordedStep:
        """Reads one step."""
        program = [self._instruction(each) for each in stored["program"]]
        arguments = {name: self.value(each) for name, each in stored.items() if name != "program"}
        return self._construct(RecordedStep, arguments | {"program": program})

    def _instruction(self, stored: Facts) -> Instruction:
        cls = _INSTRUCTIONS[stored["is"]]
        arguments = {name: self.value(each) for name, each in stored.items() if name not in ("is", "function")}
        if cls is Operation:
            lost = stored["function"] is None and not self._whole
            arguments["function"] = _lost_function if lost else function_of(stored["function"])
        return self._construct(cls, arguments)

    def _construct(self, cls: type[T], arguments: Kwargs) -> T:
        own_class: type = cls  # mypy accepts no type[T] for hashable
        hints = _hints(own_class)
        if arguments.keys() != hints.keys():
            raise ValueError(f"a {cls.__name__} does not have the fields {sorted(arguments.keys() ^ hints.keys())}")
        for name, value in arguments.items():
            if not _fits(value, hints[name]):
                raise ValueError(f"{name} of a {cls.__name__} is no {hints[name]}")
        return cls(**arguments)

    def value(self, stored: object) -> Any:
        """Reads a value. The inverse of ``Writer.value``."""
        if not isinstance(stored, list):
            if stored is None or type(stored) in (bool, int, float, str):
                return stored
            raise ValueError(f"a {type(stored).__name__} has no tag")
        tag, *items = stored
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

    def _leaf(self, tag: str, items: list[Any]) -> object:
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
        raise ValueError(f"there is no tag {tag!r}")

    def _tensor(
        self,
        tensor: Tensor,
        begins: int,
        on_device: bool,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] = (),
    ) -> Tensor:
        """Returns a tensor with its own memory, at the same offset from an aligned address as the recorded one."""
        if not isinstance(tensor, Tensor) or type(begins) is not int or not 0 <= begins < ALIGNMENT_BYTES:
            raise ValueError("a tensor is missing")
        if on_device and self._device.type != "cpu":
            tensor = tensor.to(self._device)
        if tensor.layout != torch.strided:
            return tensor
        placed = torch.empty(begins + tensor.numel(), dtype=tensor.dtype, device=tensor.device)[begins:]
        if shape is None and not tensor.is_contiguous():
            placed = tensor.clone()
        elif shape is None:
            placed = placed.view(tensor.shape).copy_(tensor)
        else:
            placed = placed.copy_(tensor).as_strided(shape, stride, placed.storage_offset())
        return placed.detach()


def _lost_function(*args: object, **kwargs: object) -> None:
    """A placeholder for a function that could not be written."""
    raise ValueError("this function was not kept")


def function_of(name: object) -> TorchFunction:
    """Returns the torch function of that name. Raises ValueError for a name that is not in torch's table."""
    if not isinstance(name, str) or name not in _functions():
        raise ValueError(f"{name!r} is no public function of torch that a step could have called")
    return _functions()[name]


@cache
def _hints(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    kept = [each.name for each in fields(cls) if each.name not in _NOT_WRITTEN or cls is Operation]
    return {name: hints[name] for name in kept}


def _fits(value: object, hint: Any) -> bool:
    """Returns True if a value matches an annotation, as deep as the annotation specifies."""
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
