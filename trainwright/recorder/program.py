"""The program of a step: the calls of a loop, as instructions that can be read and replayed."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.reach import ReachableState, is_followed
from trainwright.recorder.plain_tensors import version_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.runs.json_values import Event, Facts

Ids = tuple[int, ...] | None
"""Dataset positions of one batch; None if unknown."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that the program makes: an output of a forward call, or of an operation on one."""

    number: int


@dataclass(slots=True, eq=False)  # not frozen, which would triple the time of creation in every step
class Constant:
    """A tensor that the program does not make: an input, a target, a mask.

    ``version`` is its version counter when it was recorded. ``was_cut``: it had an autograd graph that the program does
    not contain, so a model has made it.
    """

    tensor: Tensor
    version: int
    was_cut: bool = False

    @property
    def is_unchanged(self) -> bool:
        return version_of(self.tensor) == self.version


Autocast = tuple[bool, torch.dtype, bool]
"""The state of autocast: whether it is enabled, its dtype, and whether it caches cast weights."""


@dataclass(slots=True)
class Call:
    """A forward call of a root module. ``outputs`` are the slots of its results, in the order of ``tensors_of``.

    ``training`` holds the mode of every module of every root, ``wanted`` the ``requires_grad`` of every parameter.
    ``RecordedStep.ids[batch]`` are the samples of its batch; -1: there is none. ``part`` is the path of the called
    module in its root. ``held`` is the state of arguments that are neither tensors nor plain values; None: all are.
    """

    root: int
    args: Args
    kwargs: Kwargs
    rng: tuple[Tensor, Tensor | None]
    training: tuple[bool, ...]
    autocast: Autocast
    outputs: list[int] = field(default_factory=list)
    batch: int = -1
    part: str = ""
    wanted: tuple[bool, ...] = ()
    held: ReachableState | None = None


@dataclass(slots=True)
class Operation:
    """A torch function that the loop calls outside its models, as for the loss. ``with_grad``: autograd was enabled."""

    name: str
    function: TorchFunction
    args: Args
    kwargs: Kwargs
    autocast: Autocast
    outputs: list[int]
    in_place: bool = False
    with_grad: bool = True


@dataclass(slots=True)
class Backward:
    """``loss.backward()``. ``slot`` is None for a loss that the program cannot compute. ``value`` is without the scale.

    ``gradient``, ``retain`` (``retain_graph``) and ``inputs`` are the arguments of the call.
    """

    slot: int | None
    value: Tensor
    scale_at: float | Tensor = 1.0
    gradient: object = None
    retain: bool = False
    inputs: object = None

    @property
    def scale(self) -> float:
        """The loss scale. On a GPU this waits for the device."""
        return float(self.scale_at)


@dataclass(slots=True)
class ZeroGrad:
    """Drops all gradients of the optimizer with this number; None: of all optimizers and the roots."""

    optimizer: int | None


@dataclass(slots=True)
class Multiply:
    """Multiplies the gradients of the parameters with these numbers (None: all) by ``factor`` (None: does nothing)."""

    parameters: list[int] | None
    factor: Tensor | float | None


@dataclass(slots=True)
class ClipGradients:
    """A clip by norm, by value or adaptively ("agc") at a threshold; or by a ``function`` of the user ("custom")."""

    by: str
    at: float
    parameters: list[int]
    function: Callable[..., None] | None = None


@dataclass(slots=True)
class OptimizerStep:
    """The update. ``groups`` are the hyperparameters of each group.

    In a step to be examined, ``weights`` and ``gradients`` are sums before the update, and ``left`` are sums of the
    weights after it (see ``live_sums``). They are None in other steps.
    """

    optimizer: int
    groups: list[Kwargs]
    grad_scale: Tensor | None = None
    weights: Tensor | None = None
    gradients: Tensor | None = None
    left: Tensor | None = None


Instruction = Call | Operation | Backward | ZeroGrad | Multiply | ClipGradients | OptimizerStep


NOT_RECORDED = "the loop calls the model many times a step, so that most of its steps are not recorded"


@dataclass(slots=True)
class RecordedStep:
    """One recorded optimizer step. ``ids`` are the sample ids of each batch that it read.

    ``losses`` are the tensors on which backward was called, without a loss scale. Without any they are ``grad_losses``,
    on which torch.autograd.grad was called; otherwise these are inner losses. ``loss`` is their mean if the engine
    reported it, else None. ``events`` are (kind, value) in order. ``values`` are further facts by name.

    ``blind`` is the reason why the step cannot be replayed; None if it can. ``num_bytes`` is the memory that its
    tensors keep. ``trained`` identifies the parameters that ``grad_norm`` covers, by a key of the optimizer and the
    number of its gradients. ``is_light``: only its losses and its update were recorded. ``inputs`` are the arguments of
    a deferred step, from which the engine can record its program later; None for other steps.
    """

    step: int
    program: list[Instruction] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    grad_losses: list[Tensor] = field(default_factory=list)
    loss: Tensor | float | None = None
    grad_norm: Tensor | float | None = None
    trained: tuple[int, int] = (0, 0)
    lr: float = 0.0
    num_bytes: int = 0
    ended_s: float = 0.0
    blind: str | None = None
    is_light: bool = False
    inputs: object = None
    values: Facts = field(default_factory=dict)

    @property
    def not_replayable(self) -> str | None:
        """The reason why the step cannot be replayed; None if it can."""
        return self.blind or (NOT_RECORDED if self.is_light and self.inputs is None else None)

    @property
    def calls(self) -> list[Call]:
        return [each for each in self.program if isinstance(each, Call)]

    @property
    def updates(self) -> list[OptimizerStep]:
        return [each for each in self.program if isinstance(each, OptimizerStep)]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events, in order."""
        return [kind for kind, _ in self.events]


def alive(program: list[Instruction], slots: Iterable[int] = ()) -> list[Instruction]:
    """Returns the program without operations, such as an accuracy, whose results reach neither a loss nor ``slots``."""
    needed = set(slots)
    kept: list[Instruction] = []

    def need(value: object) -> None:
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


def constants_of(value: object) -> list[Constant]:
    """Returns all Constants in nested containers, in order."""
    found: list[Constant] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is Constant:
            found.append(each)
        elif isinstance(each, tuple | list):
            waiting.extend(reversed(each))
        elif isinstance(each, Mapping):
            waiting.extend(reversed([each[key] for key in each]))
    return found


def mapped(value: object, change: Callable[[Any], object]) -> Any:
    """Returns ``value`` with every leaf replaced. Containers are rebuilt; objects of other classes are leaves."""
    if type(value) is tuple:
        return tuple([mapped(item, change) for item in value])
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return tuple(items) if (make := getattr(value, "_make", None)) is None else make(items)  # __new__ may be custom
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "keys"):  # HF's BatchEncoding and ModelOutput
        return {key: mapped(value[key], change) for key in value}
    return change(value)


def others_in(value: object) -> list[tuple[str, object]]:
    """Returns the leaves of nested containers that are neither tensors nor plain values, with their class names."""
    found: list[tuple[str, object]] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor | Constant | Slot):
            continue
        if isinstance(each, tuple | list):
            waiting.extend(reversed(each))
        elif isinstance(each, Mapping) and hasattr(each, "keys"):
            waiting.extend(reversed([each[key] for key in each]))
        elif is_followed(each):
            found.append((type(each).__name__, each))
    return found


def others_of(program: Iterable[Instruction]) -> list[tuple[str, object]]:
    """Returns, by name, the user's functions in a program, and arguments of operations that may hold state."""
    found: list[tuple[str, object]] = []
    for each in program:
        if isinstance(each, Operation):
            found += others_in((each.args, each.kwargs))
        if isinstance(each, Operation | ClipGradients) and _is_users(each.function):
            found.append((str(getattr(each.function, "__qualname__", "a function")), each.function))
    return found


def _is_users(function: object) -> bool:
    """Returns True if a function belongs neither to torch nor to an experiment."""
    if isinstance(function, types.MethodType):  # ``apply`` of an autograd Function
        function = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
    is_written = isinstance(function, types.FunctionType | type)
    return is_written and not str(function.__module__).startswith(("torch.", "trainwright."))


def tensors_of(value: object, depth: int = 6) -> list[Tensor]:
    """Return the tensors in a value, such as the output of a model, always in the same order.

    Each container, dataclass or object within ``depth`` levels is read once, however often it is referenced.
    """
    found: list[Tensor] = []
    _find_tensors(value, depth, found, {})
    return found


def _find_tensors(value: object, depth: int, found: list[Tensor], walked: dict[int, tuple[object, int]]) -> None:
    """Appends the tensors in ``value``. ``walked`` maps an id to its object, so that it stays in use, and to ``depth``.

    Not a nested function of ``tensors_of``: a recursive closure is a reference cycle, which would keep the tensors.
    """
    if isinstance(value, Tensor):
        found.append(value)
    elif depth and value is not None and not isinstance(value, str | bytes | int | float):
        _, reached = walked.get(id(value), (None, 0))
        if reached >= depth:
            return
        walked[id(value)] = value, depth
        for item in _items_of(value):  # a second visit reaches deeper; the tensors directly in it were already found
            if not (reached and isinstance(item, Tensor)):
                _find_tensors(item, depth - 1, found, walked)


def _items_of(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [value[key] for key in value]
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) or type(value).__module__ not in ("builtins", "torch"):
        return list(getattr(value, "__dict__", {}).values())
    return ()
