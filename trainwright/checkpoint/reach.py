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
import queue
import random
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer, optimizer

from trainwright.checkpoint.effects import acts_outside
from trainwright.checkpoint.shards import is_divided
from trainwright.checkpoint.state_parts import (
    ArrayData,
    Bindings,
    Cell,
    ClassAttributes,
    ContextVariable,
    Elements,
    EmptyDicts,
    Gradient,
    Length,
    MemoryFile,
    OwnedItems,
    RandomState,
    Sequenced,
    Settings,
    Slots,
    StatePart,
    TensorData,
    Values,
    Witness,
    pickled,
    sample_of,
)

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
        witness = Witness(value, pickled)
        is_read = witness.put_back()
    except Exception:  # the class may raise any error
        is_read = False
    if is_read:
        state.add(witness, trail)
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


def _values(state: ReachableState, value: Any, trail: Trail) -> Iterable[Reference]:
    state.add(Values(value), trail)
    return ()


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
        state.add(TensorData(value) if room else Witness(value, sample_of), trail)
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
    state.add(ArrayData(value) if state.has_room_for(value.nbytes) else Witness(value, sample_of), trail)
    is_long = value.dtype != object or value.size > MAX_FOLLOWED_ITEMS
    return () if is_long else [Reference("", found) for found in value.flat]


def _generator(state: ReachableState, value: object, trail: Trail) -> Iterable[Reference]:
    state.add(RandomState(value), trail)
    return ()


def _numpy_generator(state: ReachableState, value: np.random.Generator, trail: Trail) -> Iterable[Reference]:
    return [Reference("", value.bit_generator)]


def _memory_file(state: ReachableState, value: Any, trail: Trail) -> Iterable[Reference]:
    if not value.closed:
        state.add(MemoryFile(value), trail)
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

_HANDLERS: tuple[tuple[tuple[type, ...], _Handler], ...] = (
    ((Tensor,), _tensor),
    ((np.ndarray,), _array),
    ((torch.Generator, np.random.BitGenerator, np.random.RandomState, random.Random), _generator),
    ((np.random.Generator,), _numpy_generator),
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
    ((bytearray, array.array), _values),
    ((types.MappingProxyType,), _proxy),
    ((io.BytesIO, io.StringIO), _memory_file),
    ((io.IOBase,), _file),
    ((contextvars.ContextVar,), _context_variable),
    ((threading.local,), _thread_local),
)
