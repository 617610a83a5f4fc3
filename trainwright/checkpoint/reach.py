"""Captures the Python state that a step can reach, so that the step can be replayed and everything restored.

``ReachableState`` walks from objects through attributes, containers, closures, default arguments, class attributes and
the global names that the user's functions use. ``put_back`` restores the captured contents of the same objects.
``gaps`` names objects that cannot be captured, such as an iterator, an open file or a thread: code that reaches one of
these must not be replayed.

Limits of the walk: global names of installed packages are not followed, nor is state that an extension written in C
holds outside of its objects.
"""

from __future__ import annotations

import array
import builtins
import concurrent.futures
import contextvars
import datetime
import decimal
import dis
import enum
import fractions
import functools
import io
import mmap
import operator
import pathlib
import pickle
import queue
import random
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import types
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer, optimizer

from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.effects import acts_outside
from trainwright.checkpoint.shards import is_divided

SAMPLED_ELEMENTS = 256  # elements that are compared of a tensor or array too large to be copied
MAX_PICKLED_BYTES, MAX_PICKLE_S = 65536, 2e-3


class StatePart(ABC):
    """The captured content of one object, ``owner``."""

    owner: Any

    @property
    def is_empty(self) -> bool:
        """True if there was nothing to capture."""
        return False

    @property
    def key(self) -> Hashable:
        """Key of the object, equal for two parts of one object. The part keeps the object alive, so no id is reused."""
        return type(self), id(self.owner)

    @abstractmethod
    def put_back(self) -> bool:
        """Restore the content of the object if it has changed. Returns True if the object has the content now."""

    def again(self) -> StatePart:
        """Capture the current content of the same object."""
        return type(self)(self.owner)  # type: ignore[call-arg]


class _Marker: ...


ABSENT, LEFT = _Marker(), _Marker()
"""Placeholders for a name without a value, and for a value that is not captured and that ``put_back`` leaves unchanged.
"""


class Bindings(StatePart):
    """Names bound to values. This class handles global names of a Python module, subclasses handle other namespaces."""

    def __init__(self, owner: Any, names: Sequence[str] = ("",)) -> None:
        self.owner, self.names = owner, names
        self.saved: dict[Any, Any] = {name: self.read(name) for name in names}

    @property
    def key(self) -> Hashable:
        return type(self), id(self.owner), self.names

    @property
    def is_empty(self) -> bool:
        return all(value is ABSENT or isinstance(value, _CONSTANT) for value in self.saved.values())

    def read(self, name: str) -> Any:
        return self.owner.get(name, ABSENT)

    def write(self, name: str, value: Any) -> None:
        self.owner[name] = value

    def delete(self, name: str) -> None:
        del self.owner[name]

    def leave(self, name: object) -> None:
        """Exclude the value of ``name``."""
        if name in self.saved:
            self.saved[name] = LEFT

    def put_back(self) -> bool:
        for name, value in self.saved.items():
            if value is LEFT or self.read(name) is value:
                continue
            if value is ABSENT:
                self.delete(name)
            else:
                self.write(name, value)
        return True

    def again(self) -> Bindings:
        return type(self)(self.owner, self.names)


_CONSTANT = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, staticmethod, classmethod, property)
"""Types of values that usually stay bound to their name, so a name with such a value counts as empty."""


class Slots(Bindings):
    """Attributes of an object that are not in its ``__dict__``."""

    def read(self, name: str) -> Any:
        try:
            return object.__getattribute__(self.owner, name)
        except AttributeError:
            return ABSENT

    def write(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def delete(self, name: str) -> None:
        object.__delattr__(self.owner, name)


class ClassAttributes(Bindings):
    """The data attributes of a class."""

    @classmethod
    def of(cls, owner: type) -> ClassAttributes:
        names = [name for name, value in vars(owner).items() if is_data(name, value)]
        return cls(owner, tuple(names))

    def read(self, name: str) -> Any:
        return vars(self.owner).get(name, ABSENT)

    def write(self, name: str, value: Any) -> None:
        type.__setattr__(self.owner, name, value)

    def delete(self, name: str) -> None:
        type.__delattr__(self.owner, name)

    def put_back(self) -> bool:
        new = [name for name, value in vars(self.owner).items() if is_data(name, value) and name not in self.saved]
        for name in new:
            self.delete(name)
        return super().put_back()


def is_data(name: str, value: object) -> bool:
    """Return True if an attribute of a class is neither code nor created by Python."""
    return not (name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__"))


class Cell(Bindings):
    """A variable of an enclosing function."""

    def read(self, name: str) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return ABSENT

    def write(self, name: str, value: Any) -> None:
        self.owner.cell_contents = value

    def delete(self, name: str) -> None:
        del self.owner.cell_contents


class ContextVariable(Bindings):
    """A context variable. A variable that was not set before is not reset."""

    def read(self, name: str) -> Any:
        return self.owner.get(ABSENT)

    def write(self, name: str, value: Any) -> None:
        self.owner.set(value)

    def delete(self, name: str) -> None: ...


class Gradient(Bindings):
    """The gradient of a leaf tensor."""

    def read(self, name: str) -> Any:
        return self.owner.grad

    def write(self, name: str, value: Any) -> None:
        self.owner.grad = value


class OwnedItems(StatePart):
    """The items of a dict, in order: attributes of an object, or a container."""

    def __init__(self, owner: dict[Any, Any]) -> None:
        self.owner = owner
        self.saved = _items(owner)
        self._has_left = False

    @property
    def is_empty(self) -> bool:
        return not self.saved

    def leave(self, name: object) -> None:
        """Exclude the value of ``name``."""
        if name in self.saved:
            self.saved[name], self._has_left = LEFT, True

    def put_back(self) -> bool:
        owner, saved = self.owner, self.saved
        kind = OrderedDict if isinstance(owner, OrderedDict) else dict
        if self._has_left:
            now = _items(owner)
            saved = {key: now.get(key, LEFT) if value is LEFT else value for key, value in saved.items()}
            saved = {key: value for key, value in saved.items() if value is not LEFT}
        if len(owner) == len(saved) and all(map(operator.is_, kind.__iter__(owner), saved)):
            for key, value in saved.items():
                if dict.__getitem__(owner, key) is not value:
                    kind.__setitem__(owner, key, value)
            return True
        kind.clear(owner)
        for key, value in saved.items():
            kind.__setitem__(owner, key, value)
        return True


def _items(owner: dict[Any, Any]) -> dict[Any, Any]:
    """Return a plain dict of the items, without calling methods of a subclass."""
    if isinstance(owner, OrderedDict):
        return {key: dict.__getitem__(owner, key) for key in OrderedDict.__iter__(owner)}
    return dict.copy(owner)


class EmptyDicts(StatePart):
    """Empty dicts, such as the hook dicts of most modules."""

    is_empty = True

    def __init__(self, owner: Sequence[dict[Any, Any]]) -> None:
        self.owner = owner

    def put_back(self) -> bool:
        for each in self.owner:
            if each:
                each.clear()
        return True

    def again(self) -> StatePart:
        """Return a capture of the items, because the dicts may no longer be empty."""
        return DictsOnceEmpty(self.owner)


class DictsOnceEmpty(StatePart):
    """The items of dicts that were empty at an earlier capture. Both captures have the same key."""

    def __init__(self, owner: Sequence[dict[Any, Any]]) -> None:
        self.owner = owner
        self._items = [OwnedItems(each) for each in owner]

    @property
    def key(self) -> Hashable:
        return EmptyDicts, id(self.owner)

    def put_back(self) -> bool:
        for each in self._items:
            each.put_back()
        return True


class Sequenced(StatePart):
    """The elements of a list or deque, in order."""

    def __init__(self, owner: list[Any] | deque[Any]) -> None:
        kind: Any = list if isinstance(owner, list) else deque  # methods of a subclass are not called
        self.owner = owner
        self._kind = kind
        self.saved: list[Any] = list(kind.__iter__(owner))

    @property
    def is_empty(self) -> bool:
        return not self.saved

    def put_back(self) -> bool:
        owner = self.owner
        kind = self._kind
        saved = self.saved
        if len(owner) != len(saved) or not all(map(operator.is_, kind.__iter__(owner), saved)):
            kind.clear(owner)
            kind.extend(owner, saved)
        return True


class Elements(StatePart):
    """The elements of a set."""

    def __init__(self, owner: set[Any]) -> None:
        self.owner = owner
        self.saved = set.copy(owner)

    @property
    def is_empty(self) -> bool:
        return not self.saved

    def put_back(self) -> bool:
        if not set.__eq__(self.owner, self.saved):
            set.clear(self.owner)
            set.update(self.owner, self.saved)
        return True


class Length(StatePart):
    """The length and the last item of a long container, to which items are only appended."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.length = len(owner)
        self.last = next(reversed(owner)) if hasattr(owner, "__reversed__") else None

    def put_back(self) -> bool:
        while len(self.owner) > self.length and isinstance(self.owner, list | deque):
            self.owner.pop()
        last = next(reversed(self.owner), None) if hasattr(self.owner, "__reversed__") else None
        return len(self.owner) == self.length and last is self.last

    def again(self) -> StatePart:
        kinds: tuple[tuple[type, Callable[[Any], StatePart]], ...] = ((dict, OwnedItems), (set, Elements))
        make = next((make for kind, make in kinds if isinstance(self.owner, kind)), Sequenced)
        return make(self.owner)


class Content(StatePart):
    """The content of an object, as ``read`` returns it. ``write`` restores it; None: it can only be compared."""

    def __init__(
        self, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], object] | None = None
    ) -> None:
        self.owner = owner
        self._read, self._write = read, write
        self.saved = read(owner)

    def put_back(self) -> bool:
        if self._read(self.owner) == self.saved:
            return True
        if self._write is None:
            return False
        self._write(self.owner, self.saved)
        return True

    def again(self) -> Content:
        return Content(self.owner, self._read, self._write)


def _write_values(owner: Any, values: Any) -> None:
    owner[:] = values


def _read_memory_file(file: io.BytesIO | io.StringIO) -> tuple[bytes | str, int]:
    return file.getvalue(), file.tell()


def _write_memory_file(file: Any, content: tuple[bytes | str, int]) -> None:
    file.seek(0)
    file.truncate()
    file.write(content[0])
    file.seek(content[1])


def _read_generator(owner: Any) -> bytes:
    if isinstance(owner, torch.Generator):
        return owner.get_state().numpy().tobytes()
    if isinstance(owner, np.random.BitGenerator):
        return pickle.dumps(owner.state)
    is_legacy = isinstance(owner, np.random.RandomState)
    return pickle.dumps(owner.get_state(legacy=False) if is_legacy else random.Random.getstate(owner))


def _write_generator(owner: Any, state: bytes) -> None:
    if isinstance(owner, torch.Generator):
        owner.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    found = pickle.loads(state)  # noqa: S301  made by _read_generator
    if isinstance(owner, np.random.BitGenerator):
        owner.state = found
    elif isinstance(owner, np.random.RandomState):
        owner.set_state(found)
    else:
        random.Random.setstate(owner, found)


class TensorData(StatePart):
    """The elements of a tensor and its autograd metadata. Autograd must not notice that the elements were written."""

    def __init__(self, owner: Tensor) -> None:
        self.owner = owner
        self._version = owner._version
        self._is_leaf = owner.is_leaf
        self._wants_gradient = owner.requires_grad
        self.saved = memory_of(owner).detach().clone()

    @torch.no_grad()
    def put_back(self) -> bool:
        if self._is_leaf and not self.owner.is_leaf:  # a result with a graph was written into it
            self.owner.detach_()
        if self.owner.is_leaf and self.owner.requires_grad != self._wants_gradient:
            self.owner.requires_grad_(self._wants_gradient)
        data = memory_of(self.owner)
        if data.shape != self.saved.shape:
            return False
        if data.layout != torch.strided or not same_bits(data, self.saved):
            data.copy_(self.saved)
        if self.owner._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.owner,), (self._version,))
        return True


def memory_of(tensor: Tensor) -> Tensor:
    """Return a writable view of a tensor; overlapping elements (``expand``) are contained once."""
    if tensor.layout != torch.strided:
        return tensor  # detaching a sparse tensor creates another one with separate values
    if tensor.numel() == 0:
        return tensor.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach() if tensor.numel() <= span else tensor.detach().as_strided((span,), (1,))


class ArrayData(StatePart):
    """The elements of a NumPy array."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self.owner = owner
        self.saved = owner.copy()

    def put_back(self) -> bool:
        if self.owner.tobytes() != self.saved.tobytes():
            self.owner[...] = self.saved
        return True


def sample_of(value: Any) -> object:
    """Return some elements of a large tensor or array, and the version of a tensor."""
    if isinstance(value, np.ndarray):
        every = max(1, value.size // SAMPLED_ELEMENTS)
        return np.asarray(value.flat[::every]).tobytes()
    data = memory_of(value) if value.layout == torch.strided else value.detach().to_dense()
    few = data.flatten()[:: max(1, data.numel() // SAMPLED_ELEMENTS)].cpu().contiguous()
    return value._version, few.view(torch.uint8).numpy().tobytes()


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_PICKLED_BYTES:
            raise _TooLargeError
        return super().write(data)


class _TooLargeError(Exception): ...


_types_too_slow_to_pickle: set[type] = set()
"""Types of objects that are too large or take too long to be pickled. These objects are not compared."""


def pickled(value: Any) -> object:
    """Return the pickled state of an object of an extension; None for a type that is too large or too slow to pickle.

    Raises any error that the class of the object raises.
    """
    if type(value) in _types_too_slow_to_pickle:
        return None
    begin_s, file = time.perf_counter(), _Limited()
    try:
        pickle.Pickler(file, 4).dump(value)
    except _TooLargeError:
        _types_too_slow_to_pickle.add(type(value))
        return None
    if time.perf_counter() - begin_s > MAX_PICKLE_S:
        _types_too_slow_to_pickle.add(type(value))
        return None
    return file.getvalue()


class Settings(StatePart):
    """Process-wide settings of torch."""

    is_empty = True
    key = "settings"

    def __init__(self) -> None:
        self.saved = _settings()

    def put_back(self) -> bool:
        now = _settings()
        for name, value in self.saved.items():
            if now[name] != value:
                _SETTERS[name](value)
        return True

    def again(self) -> Settings:
        return Settings()


def _settings() -> Mapping[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }


_SETTERS: dict[str, Callable[[Any], object]] = {
    "dtype": torch.set_default_dtype,
    "deterministic": lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    "threads": torch.set_num_threads,
    "matmul": torch.set_float32_matmul_precision,
    "benchmark": lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    "anomaly": lambda value: torch.autograd.set_detect_anomaly(*value),
}


# the walk

MAX_OBJECTS = 50_000
MAX_COPIED_BYTES = 128 * 2**20
"""Maximum total size of copied tensors and arrays. Beyond it, only a sample of the elements is kept and compared."""
MAX_FOLLOWED_ITEMS = 1024
"""Items of containers with more items are not followed, because a long container is a history or data."""

Trail: TypeAlias = "tuple[Trail | None, str]"
"""The path to an object: the trail to the object that refers to it, and the name of the reference."""


class Reference(NamedTuple):
    """A reference from a captured object to ``value``. If ``part`` is set, its entry ``name`` can be excluded."""

    name: str
    value: object
    part: OwnedItems | Bindings | None = None


class ReachableState:
    """The captured contents of everything that was reached. ``gaps`` describes what could not be captured.

    Args:
        roots: Objects where the walk starts, with their names.
        known: Objects that are neither captured nor followed, because their state is stored elsewhere.
        is_brief: The capture is stored for many steps. Contents of long containers are not copied, and values with an
            autograd graph are excluded, because the graph would be kept alive.
        copies: Copy tensors and arrays. If False, they are only compared.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, object]],
        known: Iterable[object] = (),
        *,
        is_brief: bool = False,
        copies: bool = True,
    ) -> None:
        self.roots = list(roots)
        self.gaps: list[str] = []
        self.num_bytes = 0
        self.is_brief, self._copies = is_brief, copies
        self._parts: dict[Hashable, tuple[StatePart, Trail]] = {}
        self._walked: dict[int, object] = {id(each): each for each in known}  # kept alive, so that no id is reused
        self._entry: _Entry | None = None
        self._under: dict[_Entry, list[Hashable]] = {}
        self._left: set[_Entry] = set()
        self.add(Settings(), (None, "a setting of torch"))
        self.include(self.roots)
        if is_brief:
            self._walked, self._under = {}, {}

    def include(self, roots: Iterable[tuple[str, object]]) -> list[StatePart]:
        """Capture further objects in their current state. Returns their parts."""
        before = set(self._parts)
        waiting: list[tuple[object, Trail, _Entry | None]] = [(value, (None, name), None) for name, value in roots]
        while waiting:
            value, trail, self._entry = waiting.pop()
            handler = _handler_of(type(value))
            if handler is None or id(value) in self._walked or self._entry in self._left:
                continue
            if len(self._walked) > MAX_OBJECTS:
                self.gaps.append(f"{words(trail)} and what refers to it are more than {MAX_OBJECTS:,} objects")
                break
            self._walked[id(value)] = value
            is_trainers = _is_of_a_trainer(type(value))
            for name, found, part in handler(self, value, trail):
                if _handler_of(type(found)) is not None and not (is_trainers and _is_of_the_loop(found)):
                    waiting.append((found, (trail, name), self._entry if part is None else (part, name)))
        return [part for key, (part, _) in self._parts.items() if key not in before]

    def include_parts_of(self, other: ReachableState) -> None:
        """Capture the current state of the objects that ``other`` has captured."""
        for key, (part, trail) in other._parts.items():
            if key not in self._parts:
                self._parts[key] = part.again(), trail

    def put_back(self) -> list[str]:
        """Restore the captured contents of all objects. Returns descriptions of objects that cannot be restored."""
        return [words(trail) for part, trail in self._parts.values() if not part.put_back()]

    def knows(self, other: ReachableState) -> bool:
        """Return True if this has captured every object for which ``other`` has captured any content."""
        return all(part.is_empty or key in self._parts for key, (part, _) in other._parts.items())

    def saved_attributes(self, owner: object) -> dict[str, Any]:
        """Return the captured attributes of an object."""
        found = self._parts.get((OwnedItems, id(vars(owner))))
        return found[0].saved if found is not None and isinstance(found[0], OwnedItems) else {}

    def saved_data(self, tensor: Tensor) -> Tensor | None:
        """Return the captured elements of a tensor; None if they were not copied."""
        found = self._parts.get((TensorData, id(tensor)))
        return found[0].saved if found is not None and isinstance(found[0], TensorData) else None

    # used by the handlers

    def add(self, part: StatePart, trail: Trail) -> None:
        self._parts[part.key] = part, trail
        if self.is_brief and self._entry is not None:
            self._under.setdefault(self._entry, []).append(part.key)

    def add_gap(self, trail: Trail, what: str) -> None:
        self.gaps.append(f"{words(trail)} is {what}")

    def leave_entry(self) -> None:
        """Exclude the entry through which the current object was reached, and all that was reached through it."""
        if self._entry is None:
            return
        part, name = self._entry
        part.leave(name)
        self._left.add(self._entry)
        for key in self._under.pop(self._entry, ()):
            self._parts.pop(key, None)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return True if ``num_bytes`` more bytes may be copied, and add them to the total."""
        if not self._copies or self.num_bytes + num_bytes > MAX_COPIED_BYTES:
            return False
        self.num_bytes += num_bytes
        return True


_Entry: TypeAlias = tuple[OwnedItems | Bindings, str]
_Handler: TypeAlias = Callable[[ReachableState, Any, Trail], Iterable[Reference]]
"""Captures one object and returns its references."""


def words(trail: Trail) -> str:
    """Return the path to an object, such as ``model.blocks.noise``."""
    names: list[str] = []
    at: Trail | None = trail
    while at is not None:
        names.append(at[1])
        at = at[0]
    return ".".join([name for name in reversed(names) if name and name != "_modules"])


def hooks_of_the_process() -> list[tuple[str, object]]:
    """Return the hooks that torch calls for every module and every optimizer."""
    dicts = [value for name, value in vars(torch_module).items() if name.startswith("_global_")]
    dicts += [value for name, value in vars(optimizer).items() if name.startswith("_global_")]
    return [("a hook on all modules or optimizers", each) for each in dicts if isinstance(each, dict) and each]


def hooks_of_tensors(tensors: Iterable[Tensor]) -> list[tuple[str, object]]:
    """Return the hooks on the gradients of these tensors."""
    return [
        ("a hook on a gradient", hooks)
        for tensor in tensors
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        if hooks
    ]


def _is_of_the_loop(value: object) -> bool:
    """Return True if an object that a trainer refers to belongs to the loop: callbacks, loaders, signal handlers."""
    if isinstance(value, list | tuple | deque | set | frozenset):
        return any(map(_is_of_the_loop, islice(value, MAX_FOLLOWED_ITEMS)))
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return any(map(_is_of_the_loop, islice(value.values(), MAX_FOLLOWED_ITEMS)))
    is_plain = isinstance(value, Tensor | nn.Module | np.ndarray | types.FunctionType | types.MethodType)
    return _handler_of(type(value)) is not None and not is_plain and not _is_of_a_trainer(type(value))


def is_followed(value: object) -> bool:
    """Return True if an object may hold state, so that it is captured or followed."""
    return _handler_of(type(value)) is not None


# selection of the handler of an object

_IMMUTABLE = (
    int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, re.Pattern, re.Match, datetime.date,
    datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction, pathlib.PurePath,
    uuid.UUID, enum.Enum, property, BaseException,
)  # fmt: skip
_NOT_FOLLOWED: tuple[type, ...] = (
    types.CodeType, types.FrameType, types.TracebackType, types.ModuleType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.GenericAlias, types.UnionType, np.ufunc, weakref.ReferenceType,
    weakref.ProxyType, weakref.CallableProxyType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
    weakref.WeakSet, type({}.keys()), type({}.values()), type({}.items()), operator.itemgetter, operator.attrgetter,
    operator.methodcaller, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event,
    threading.Semaphore, random.SystemRandom,
)  # fmt: skip
_NOT_FOLLOWED_MODULES = (
    "torch._", "torch.fx", "torch.jit", "torch.utils.data", "torch.export", "torch.profiler", "torch.autograd.profiler",
    "torch.autograd.function", "torch.cuda", "torch.distributed", "triton", "pybind11_builtins", "logging", "typing",
    "abc", "inspect", "importlib", "trainwright.",
)  # fmt: skip
"""Objects of these modules and of the types above hold no state that a step changes."""
_GAPS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), "an iterator"),
    ((socket.socket, mmap.mmap), "a connection"),
    ((threading.Thread, concurrent.futures.Executor), "a thread"),
    ((subprocess.Popen,), "a process"),
    ((queue.SimpleQueue, queue.Queue), "a queue"),
)


T = TypeVar("T")


def _once_for_each_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Cache a function of a class. Unlike with ``functools.cache``, the class need not be hashable."""
    known: dict[int, tuple[type, T]] = {}

    def call(kind: type) -> T:
        found = known.get(id(kind))
        if found is None:
            found = known[id(kind)] = (kind, function(kind))
        return found[1]

    return call


@_once_for_each_class
def _is_of_a_trainer(kind: type) -> bool:
    """Return True if a class belongs to a training library. Its instances are followed only to the user's objects."""
    return kind.__module__.startswith(_TRAINERS) and not issubclass(kind, nn.Module)


_TRAINERS = ("lightning.", "pytorch_lightning.", "accelerate.", "transformers.trainer")


@_once_for_each_class
def _handler_of(kind: type) -> _Handler | None:
    """Return the handler of the objects of a class; None if they are neither captured nor followed."""
    if issubclass(kind, nn.Module):
        return _module
    if issubclass(kind, type):
        return _class
    if issubclass(kind, _IMMUTABLE + _NOT_FOLLOWED) or kind.__name__ == "PyCapsule":
        return None
    for kinds, handler in _HANDLERS:
        if issubclass(kind, kinds):
            return handler
    if kind.__module__.startswith(_NOT_FOLLOWED_MODULES):
        return None
    for kinds, what in _GAPS:
        if issubclass(kind, kinds):
            return functools.partial(_gap, what)
    if kind.__module__.startswith("multiprocessing."):
        return functools.partial(_gap, "shared with other processes")
    if _is_written_in_python(kind):
        return _instance
    return functools.partial(_gap, "an iterator") if hasattr(kind, "__next__") else _foreign


def _is_written_in_python(kind: type) -> bool:
    """Return True if the size of an instance in memory leaves no room for more than its attributes."""
    num_slots = len(_slots_of(kind))
    has_attributes = kind.__dictoffset__ != 0 or num_slots > 0 or kind.__basicsize__ == object.__basicsize__
    return has_attributes and kind.__basicsize__ <= object.__basicsize__ + 8 * (2 + num_slots)


@_once_for_each_class
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(
        [
            name
            for base in kind.__mro__
            for name, value in vars(base).items()
            if type(value) is types.MemberDescriptorType
        ]
    )


# the handlers


def _gap(what: str, state: ReachableState, value: object, trail: Trail) -> Iterable[Reference]:
    state.add_gap(trail, what)
    return ()


def _foreign(state: ReachableState, value: object, trail: Trail) -> Iterable[Reference]:
    """Capture the pickle of an object of an extension, which can be compared but not restored; else add a gap."""
    try:
        content = Content(value, pickled)
        is_read = content.put_back()
    except Exception:  # the class may raise any error
        is_read = False
    if is_read:
        state.add(content, trail)
    else:
        state.add_gap(trail, f"a {type(value).__name__}, whose state cannot be read")
    return ()


def _attributes(state: ReachableState, value: Any, trail: Trail) -> Iterator[Reference]:
    names = _slots_of(type(value))
    if names:
        slots = Slots(value, names)
        state.add(slots, trail)
        yield from [Reference(name, found) for name, found in slots.saved.items()]
    if type(value).__dictoffset__:
        items = OwnedItems(vars(value))
        state.add(items, trail)
        yield from [Reference(str(name), found) for name, found in items.saved.items()]


def _instance(state: ReachableState, value: object, trail: Trail) -> Iterator[Reference]:
    yield from _attributes(state, value, trail)
    yield Reference("", type(value))


def _module(state: ReachableState, value: nn.Module | Optimizer, trail: Trail) -> Iterator[Reference]:
    items, empty = OwnedItems(vars(value)), []
    state.add(items, trail)
    for name, found in items.saved.items():
        if type(found) in (dict, OrderedDict) and not found:
            empty.append(found)
        else:
            yield Reference(name, found, items)
    state.add(EmptyDicts(empty), trail)
    yield Reference("", type(value))


def _dict(state: ReachableState, value: dict[Any, Any], trail: Trail) -> Iterator[Reference]:
    if type(value) not in (dict, OrderedDict):
        yield from _attributes(state, value, trail)
    if len(value) > MAX_FOLLOWED_ITEMS:
        state.add(Length(value) if state.is_brief else OwnedItems(value), trail)
        return
    items = OwnedItems(value)
    state.add(items, trail)
    for key, found in items.saved.items():
        yield Reference(key if type(key) is str else "", found)
        yield Reference("", key)


def _sequence(state: ReachableState, value: list[Any] | deque[Any], trail: Trail) -> Iterator[Reference]:
    if type(value) not in (list, deque):
        yield from _attributes(state, value, trail)
    if len(value) > MAX_FOLLOWED_ITEMS:
        state.add(Length(value) if state.is_brief else Sequenced(value), trail)
        return
    items = Sequenced(value)
    state.add(items, trail)
    yield from [Reference("", found) for found in items.saved]


def _set(state: ReachableState, value: set[Any], trail: Trail) -> Iterator[Reference]:
    if type(value) is not set:
        yield from _attributes(state, value, trail)
    is_long = len(value) > MAX_FOLLOWED_ITEMS
    state.add(Length(value) if is_long and state.is_brief else Elements(value), trail)
    yield from [] if is_long else [Reference("", found) for found in set.copy(value)]


def _tuple(state: ReachableState, value: Any, trail: Trail) -> Iterator[Reference]:
    if type(value).__dictoffset__:
        yield from _attributes(state, value, trail)
    if len(value) <= MAX_FOLLOWED_ITEMS:
        yield from [Reference("", found) for found in value]


def _content(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> _Handler:
    """Return a handler for an object without references, see ``Content``."""

    def handler(state: ReachableState, value: object, trail: Trail) -> Iterable[Reference]:
        state.add(Content(value, read, write), trail)
        return ()

    return handler


def _tensor(state: ReachableState, value: Tensor, trail: Trail) -> Iterator[Reference]:
    if state.is_brief and value.grad_fn is not None:
        state.leave_entry()
        return
    yield from [Reference(name, found) for name, found in hooks_of_tensors([value])]
    if value.is_inference() or value.is_meta or value.numel() == 0:
        return
    if is_divided(value):
        value = value.to_local().detach()
    try:
        room = state.has_room_for(value.nbytes if value.layout == torch.strided else 0)
        state.add(TensorData(value) if room else Content(value, sample_of), trail)
    except (RuntimeError, NotImplementedError, TypeError):
        state.add_gap(trail, f"a {type(value).__name__} that cannot be copied")
        return
    if value.requires_grad and value.is_leaf:
        gradient = Gradient(value)
        state.add(gradient, trail)
        yield Reference("grad", gradient.saved[""])


def _array(state: ReachableState, value: np.ndarray[Any, Any], trail: Trail) -> Iterable[Reference]:
    if not value.flags.writeable or value.size == 0:
        return ()
    state.add(ArrayData(value) if state.has_room_for(value.nbytes) else Content(value, sample_of), trail)
    is_long = value.dtype != object or value.size > MAX_FOLLOWED_ITEMS
    return () if is_long else [Reference("", found) for found in value.flat]


def _memory_file(state: ReachableState, value: Any, trail: Trail) -> Iterable[Reference]:
    if not value.closed:
        state.add(Content(value, _read_memory_file, _write_memory_file), trail)
    return ()


def _file(state: ReachableState, value: Any, trail: Trail) -> Iterable[Reference]:
    if value not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) and not value.closed:
        state.add_gap(trail, "an open file")
    return ()


def _context_variable(state: ReachableState, value: contextvars.ContextVar[Any], trail: Trail) -> Iterable[Reference]:
    variable = ContextVariable(value)
    state.add(variable, trail)
    return [Reference("", variable.saved[""])]


def _thread_local(state: ReachableState, value: Any, trail: Trail) -> Iterator[Reference]:
    items = OwnedItems(vars(value))
    state.add(items, trail)
    yield from [Reference(str(name), found) for name, found in items.saved.items()]


def _proxy(state: ReachableState, value: Any, trail: Trail) -> Iterable[Reference]:
    return [Reference("", found) for found in value.values()]


def _refers(*names: str) -> _Handler:
    """Return a handler for an object that holds nothing but references, in these attributes."""

    def handler(state: ReachableState, value: object, trail: Trail) -> Iterable[Reference]:
        return [Reference("", found) for name in names if (found := getattr(value, name, None)) is not None]

    return handler


def _builtin(state: ReachableState, value: types.BuiltinFunctionType, trail: Trail) -> Iterable[Reference]:
    if acts_outside(value):
        state.add_gap(trail, f"os.{value.__name__}")
    return [Reference("", value.__self__)]


def _function(state: ReachableState, value: types.FunctionType, trail: Trail) -> Iterator[Reference]:
    owner = _owner_of(value.__module__)
    if owner == "trainwright":
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        variable = Cell(cell)
        state.add(variable, trail)
        yield Reference(name, variable.saved[""], variable)
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    yield from [Reference("", each) for each in defaults]
    if owner != "user":
        return
    attributes = OwnedItems(vars(value))
    state.add(attributes, trail)
    yield from [Reference(str(name), each) for name, each in attributes.saved.items()]
    names, attribute_names = names_of(value.__code__)
    yield from _names(state, value.__globals__, names, trail)
    for name in names:
        module = value.__globals__.get(name)
        if isinstance(module, types.ModuleType) and _owner_of(module.__name__) == "user":
            yield from _names(state, vars(module), tuple([n for n in attribute_names if n in vars(module)]), trail)


def _names(
    state: ReachableState, namespace: dict[str, Any], names: tuple[str, ...], trail: Trail
) -> Iterator[Reference]:
    bound = Bindings(namespace, tuple([name for name in names if name in namespace or not hasattr(builtins, name)]))
    state.add(bound, trail)
    yield from [Reference(name, found, bound) for name, found in bound.saved.items()]


@cache
def names_of(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the global names and attribute names used in a function and in its nested functions."""
    found: set[str] = set()
    attributes = set(code.co_names)
    for each in dis.get_instructions(code):
        if each.opname in _GLOBAL_OPCODES:
            found.add(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_attributes = names_of(constant)
            found.update(inner)
            attributes.update(inner_attributes)
    return tuple(sorted(found)), tuple(sorted(attributes))


_GLOBAL_OPCODES = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})


def _class(state: ReachableState, value: type, trail: Trail) -> Iterator[Reference]:
    owner = _owner_of(value.__module__)
    if owner in ("library", "trainwright") or not _can_be_written(value):
        return
    data = ClassAttributes.of(value)
    state.add(data, trail)
    yield from [Reference(name, found, data) for name, found in data.saved.items()]
    if owner == "user":
        for found in vars(value).values():
            yield from [Reference("", function) for function in _functions_of(found)]
    yield from [Reference("", base) for base in value.__bases__]


def _can_be_written(kind: type) -> bool:
    heap, immutable = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE
    return bool(kind.__flags__ & heap) and not kind.__flags__ & immutable


def _functions_of(attribute: Any) -> Iterable[object]:
    if isinstance(attribute, types.FunctionType):
        return (attribute,)
    if isinstance(attribute, staticmethod | classmethod):
        return (attribute.__func__,)
    if isinstance(attribute, property):
        return (attribute.fget, attribute.fset)
    return (attribute.func,) if isinstance(attribute, functools.cached_property) else ()


@cache
def _owner_of(module: str | None) -> Literal["user", "installed", "library", "trainwright"]:
    """Return the author of a Python module. Torch and NumPy count as the standard library."""
    name = module or "__main__"
    top = name.partition(".")[0]
    if top == "trainwright":
        return "trainwright"
    if top in _LIBRARIES:
        return "library"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "installed" if file.startswith(_INSTALLED) else "user"


_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}
_INSTALLED = tuple({path for key, path in sysconfig.get_paths().items() if key in ("purelib", "platlib")})

_GENERATORS = (torch.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_HANDLERS: tuple[tuple[tuple[type, ...], _Handler], ...] = (
    ((Tensor,), _tensor),
    ((np.ndarray,), _array),
    (
        (torch.Generator, np.random.BitGenerator, np.random.RandomState, random.Random),
        _content(_read_generator, _write_generator),
    ),
    ((np.random.Generator,), _refers("bit_generator")),
    ((types.FunctionType,), _function),
    ((types.MethodType,), _refers("__func__", "__self__")),
    ((types.BuiltinFunctionType,), _builtin),
    ((functools.partial,), _refers("func", "args", "keywords")),
    ((staticmethod, classmethod), _refers("__func__")),
    ((functools._lru_cache_wrapper, functools.cached_property), _refers("__wrapped__", "func")),
    ((Optimizer,), _module),
    ((dict,), _dict),
    ((list, deque), _sequence),
    ((set,), _set),
    ((tuple, frozenset), _tuple),
    ((bytearray, array.array), _content(operator.itemgetter(slice(None)), _write_values)),
    ((types.MappingProxyType,), _proxy),
    ((io.BytesIO, io.StringIO), _memory_file),
    ((io.IOBase,), _file),
    ((contextvars.ContextVar,), _context_variable),
    ((threading.local,), _thread_local),
)
