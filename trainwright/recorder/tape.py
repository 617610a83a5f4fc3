"""Records the torch functions that a loop calls between the outputs of a model and the loss."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from trainwright.recorder.callers import caller
from trainwright.recorder.listener import inside
from trainwright.recorder.pausable import PausableMode, without_users_modes
from trainwright.recorder.plain_tensors import num_bytes as bytes_of
from trainwright.recorder.plain_tensors import version_of
from trainwright.recorder.program import (
    Autocast,
    Constant,
    Instruction,
    Operation,
    Slot,
    alive,
    constants_of,
    mapped,
    tensors_of,
)
from trainwright.recorder.shared_memory import PrivateCopies, is_of_worker
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

_SIMPLE = frozenset({int, float, bool, str, type(None), torch.dtype})
_LIKE = frozenset({"rand_like", "randn_like", "randint_like", "zeros_like", "ones_like", "full_like", "empty_like"})
READS_GRADIENT = operator.attrgetter("grad.__get__")(Tensor)
"""Reads ``.grad`` of a DTensor. Not recorded, because ``zero_grad`` between output and backward pass calls it, too."""
_WANTS_GRADIENT = operator.attrgetter("requires_grad")
_NO_AUTOCAST: Autocast = (False, torch.float32, True)
SMALL = 16  # elements; copying so few is cheaper than detecting a write


def autocast_now(device_type: str) -> Autocast:
    """Returns the current state of autocast for a type of device."""
    if not torch.is_autocast_enabled(device_type):
        return _NO_AUTOCAST
    return (True, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())


def is_cut(args: Args, made: Iterable[Tensor]) -> bool:
    """Returns True if a tensor with a graph is an argument of a function whose results have none."""
    return not any(map(_WANTS_GRADIENT, made)) and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _as_index(leaf: object) -> object:
    """Returns a tensor for an array of NumPy, such as ``np.where`` returns, and anything else unchanged."""
    return torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf


_Begun: TypeAlias = tuple[list[Instruction], int, Tensor | None]
"""Before a call of an autograd Function: the operations so far, their number, and the state of the CPU generator."""


FunctionListener: TypeAlias = Callable[[str, Args, Kwargs, object], None]
"""Called with the name of a torch function, its arguments and its result. It must not raise."""


class Tape(PausableMode):
    """While it runs, every torch function that the loop calls and that returns a tensor is added to ``operations``.

    ``listener`` is called with every torch function, for observations during the computation.

    Tensors of the program are known by identity and not kept alive, because their graph belongs to the loop.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._copies = PrivateCopies()
        self._next = self._reads = 0
        self.num_bytes = 0  # size of the tensors that were recorded as constants
        self.leaves = False  # a leaf that requires a gradient was used outside of the models
        self.grafted = False  # a tensor with an unknown graph was used
        self.operations: list[Instruction] = []
        self.failed: tuple[str, object, str | None] | None = None  # a function that raised, its arguments and its line
        self.is_careful = False
        self.listener: FunctionListener | None = None
        self._has_workers = False  # a batch from a DataLoader worker was recorded
        self.lines: dict[tuple[str, str], None] = {}  # lines of operations, in careful mode
        self._off: list[Operation] = []  # consecutive operations without autograd, up to now
        self._made_off: dict[int, list[Operation]] = {}  # by slot number: the ``_off`` in which it was made
        self._applied: list[_Begun] = []  # running calls of autograd Functions

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if not self.running or inside.listeners or torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        try:
            result = function(*args, **(kwargs or {}))
        except Exception:
            with without_users_modes():
                self.failed = (getattr(function, "__name__", "?"), self.write((args, kwargs or {})), caller())
            raise
        if self.listener is not None:
            self._tell(self.listener, function, args, kwargs or {}, result)
        made: list[Tensor] = []
        if isinstance(result, Tensor):
            made = [result] if function != READS_GRADIENT else []
        elif isinstance(result, tuple | list):
            made = [each for each in result if isinstance(each, Tensor)]
        if made and _len_torch_dispatch_stack():
            with without_users_modes():
                self._note(function, args, kwargs or {}, made)
        elif made:
            self._note(function, args, kwargs or {}, made)
        return result

    def _tell(
        self, listener: FunctionListener, function: TorchFunction, args: Args, kwargs: Kwargs, result: object
    ) -> None:
        if _len_torch_dispatch_stack():
            with without_users_modes():
                listener(getattr(function, "__name__", "?"), args, kwargs, result)
        else:
            listener(getattr(function, "__name__", "?"), args, kwargs, result)

    def _note(self, function: TorchFunction, args: Args, kwargs: Kwargs, made: list[Tensor]) -> None:
        name = getattr(function, "__name__", "?")
        in_place = bool(args) and id(args[0]) in map(id, made)
        before = self._reads
        if name == "__getitem__":
            args = mapped(args, _as_index)
        positional, by_name = self.write(args), self.write(kwargs)
        is_free = self._reads == before or name in _LIKE
        if is_free and not any(map(_WANTS_GRADIENT, made)):
            return  # values that the loop computes from data, or draws, become constants at their use
        if self.is_careful and (line := caller()) is not None:
            self.lines[name, line] = None
            if torch.is_grad_enabled() and is_cut(args, made):
                self.lines["cut", line] = None
        autocast, with_grad = autocast_now(self._device_type), torch.is_grad_enabled()
        operation = Operation(name, function, positional, by_name, autocast, self.slots(made), in_place, with_grad)
        self.operations.append(operation)
        if with_grad:
            if self._off:
                self._off = []
        else:
            self._off.append(operation)
            self._made_off.update(dict.fromkeys(operation.outputs, self._off))

    def begin_apply(self) -> None:
        """Called before a custom autograd Function."""
        state = torch.default_generator.get_state() if self.running else None
        self._applied.append((self.operations, len(self.operations), state))

    def end_apply(self, apply: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        """Ends the call. It becomes one operation with its own backward pass, instead of the operations inside it.

        A Function that called a model or drew random numbers keeps its operations, because its graph is not known.
        """
        if not self._applied:  # it began before the tape, or the step ended within it
            return
        operations, number, state = self._applied.pop()
        made = tensors_of(result)
        if not self.running or state is None or not any(map(_WANTS_GRADIENT, made)):
            return
        if operations is not self.operations or not torch.equal(state, torch.default_generator.get_state()):
            self.grafted = True
            return
        del self.operations[number:]
        self._note(apply, args, kwargs, made)

    def write(self, value: object) -> Any:
        """Returns ``value`` with its tensors as Slots or Constants."""
        if type(value) is tuple:  # by far the most frequent case, and cheaper without the traversal
            written: list[object] = []
            for each in value:
                if type(each) in _SIMPLE:
                    written.append(each)
                else:
                    written.append(self._written(each) if isinstance(each, Tensor) else mapped(each, self._written))
            return tuple(written)
        if type(value) is dict and (not value or _SIMPLE.issuperset(map(type, value.values()))):
            return value
        return mapped(value, self._written)

    def _written(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if (number := self.slot_of(leaf)) is not None:
            self._reads += 1
            return Slot(number)
        if leaf.grad_fn is None and (leaf.requires_grad or leaf.numel() > SMALL):
            return self._constant(leaf)
        self.grafted |= leaf.grad_fn is not None
        copy = leaf.detach().clone() if leaf.numel() <= SMALL else leaf.detach()
        return Constant(copy, version_of(copy), leaf.grad_fn is not None)

    def _constant(self, leaf: Tensor) -> Constant:
        """Returns the constant of a tensor that depends on no weight. The tensor is held, not copied."""
        if leaf.requires_grad:
            self.leaves = True
        else:
            self.num_bytes += bytes_of(leaf)
            if type(leaf) is Tensor and is_of_worker(leaf):
                self._has_workers = True
                leaf = self._copies.of(leaf)
        return Constant(leaf, version_of(leaf))

    def slots(self, made: Iterable[Tensor]) -> list[int]:
        """Returns new slots for tensors that the program made."""
        numbers = []
        for tensor in made:
            self._slots[id(tensor)] = (weakref.ref(tensor), self._next)
            numbers.append(self._next)
            self._next += 1
        return numbers

    def outputs(self, output: object) -> list[int]:
        """Returns new slots for the tensors in the output of a model."""
        return self.slots([output] if isinstance(output, Tensor) else tensors_of(output))

    def last_scalar(self) -> Tensor | None:
        """Returns the newest recorded scalar with a graph: the loss, if backward was not called yet."""
        made = [tensor for reference, _ in self._slots.values() if (tensor := reference()) is not None]
        return next((t for t in reversed(made) if t.numel() == 1 and t.grad_fn is not None), None)

    def slot_of(self, tensor: Tensor) -> int | None:
        known = self._slots.get(id(tensor))
        if known is None or known[0]() is not tensor:  # the id was reused
            return None
        number = known[1]
        if tensor.requires_grad and number in self._made_off:  # it was made inside an autograd Function
            for operation in self._made_off.pop(number):
                operation.with_grad = True
        return number

    def drop_dead(self) -> None:
        """Drops operations whose results the loop has freed. No later loss can depend on them."""
        self._slots = {key: known for key, known in self._slots.items() if known[0]() is not None}
        kept = alive(self.operations, {number for _, number in self._slots.values()})
        left = set(map(id, kept))
        for each in self.operations:
            if isinstance(each, Operation) and id(each) not in left:
                held = [c.tensor for c in constants_of((each.args, each.kwargs)) if not c.was_cut]
                self.num_bytes -= sum(bytes_of(t) for t in held if t.numel() > SMALL and not t.requires_grad)
        self.operations = kept

    def forget(self) -> None:
        """Drops all tensors."""
        self._slots.clear()
        self._off, self._made_off, self._applied = [], {}, []
        if self._has_workers:
            self._copies.forget()
        self.leaves = False
        self.operations, self.lines = [], {}
