"""The captured content of one object, by kind of object: how it is copied, compared and restored."""

from __future__ import annotations

import array
import io
import pickle
import random
import time
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.checkpoint.codec import same_bits

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


class _Marker:
    """A placeholder value."""


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
        if len(owner) == len(saved) and all(map(is_, kind.__iter__(owner), saved)):
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
        if len(owner) != len(saved) or not all(map(is_, kind.__iter__(owner), saved)):
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


class Values(StatePart):
    """A bytearray or an array of Python's module ``array``."""

    def __init__(self, owner: bytearray | array.array[Any]) -> None:
        self.owner = owner
        self.saved = owner[:]

    def put_back(self) -> bool:
        if self.owner != self.saved:
            self.owner[:] = self.saved
        return True


class MemoryFile(StatePart):
    """An in-memory file."""

    def __init__(self, owner: io.BytesIO | io.StringIO) -> None:
        self.owner = owner
        self.saved = (owner.getvalue(), owner.tell())

    def put_back(self) -> bool:
        if (self.owner.getvalue(), self.owner.tell()) != self.saved:
            self.owner.seek(0)
            self.owner.truncate()
            self.owner.write(self.saved[0])
            self.owner.seek(self.saved[1])
        return True


class RandomState(StatePart):
    """A random number generator of torch, NumPy or Python."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.saved = _read_generator(owner)
        self._bytes = pickle.dumps(self.saved)

    def put_back(self) -> bool:
        if pickle.dumps(_read_generator(self.owner)) != self._bytes:
            _write_generator(self.owner, self.saved)
        return True


def _read_generator(owner: Any) -> Any:
    if isinstance(owner, torch.Generator):
        return owner.get_state().numpy().tobytes()
    if isinstance(owner, np.random.BitGenerator):
        return owner.state
    return owner.get_state(legacy=False) if isinstance(owner, np.random.RandomState) else random.Random.getstate(owner)


def _write_generator(owner: Any, state: Any) -> None:
    if isinstance(owner, torch.Generator):
        owner.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(owner, np.random.BitGenerator):
        owner.state = state
    elif isinstance(owner, np.random.RandomState):
        owner.set_state(state)
    else:
        random.Random.setstate(owner, state)


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
        if data.layout != torch.strided or not _are_same(data, self.saved):
            data.copy_(self.saved)
        if self.owner._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.owner,), (self._version,))
        return True


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the size of an element in bytes."""


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one shape and dtype hold the same bits. They are compared on their device."""
    kind = _INTEGERS.get(one.element_size())
    if kind is None or one.is_conj() or one.is_neg() or one.is_quantized:
        return same_bits(one, other)
    return torch.equal(one.view(kind), other.view(kind))


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


class Witness(StatePart):
    """An object that can be compared, but not restored. ``read`` returns the value to compare."""

    def __init__(self, owner: Any, read: Callable[[Any], object]) -> None:
        self.owner = owner
        self._read = read
        self.saved = read(owner)

    def put_back(self) -> bool:
        return self._read(self.owner) == self.saved

    def again(self) -> Witness:
        return Witness(self.owner, self._read)


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
