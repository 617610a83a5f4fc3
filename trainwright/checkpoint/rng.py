"""All random number generators that training draws from: Python's, NumPy's, and torch's on CPU and CUDA.

The states of Python's and NumPy's Mersenne Twister are read from memory, because a copy takes 0.3 and 1 us, but
``random.getstate`` 20 us and ``MT19937.state`` 25 us.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import os
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree

_NUM_WORDS = 624
_WORDS = np.dtype(np.uint32)
_SIZE = (_NUM_WORDS + 1) * _WORDS.itemsize


class TwisterState(NamedTuple):
    """The words of a Mersenne Twister and its position in them."""

    memory: bytes

    @classmethod
    def of(cls, twister: np.random.MT19937) -> TwisterState:
        """Copy the state of a generator."""
        return _copied(twister) if _LIES_IN_MEMORY else _packed(twister)

    def as_dict(self) -> dict[str, Any]:
        """Return the state in the format of ``np.random.get_state(legacy=False)``, without a cached normal number."""
        *key, place = np.frombuffer(self.memory, _WORDS)
        state = {"key": np.array(key, dtype=_WORDS), "pos": int(place)}
        return {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}


def _copied(twister: np.random.MT19937) -> TwisterState:
    return TwisterState(ctypes.string_at(twister.ctypes.state_address, _SIZE))


def _packed(twister: np.random.MT19937) -> TwisterState:
    state: Any = twister.state["state"]
    return TwisterState(np.append(state["key"], _WORDS.type(state["pos"])).astype(_WORDS).tobytes())


def _has_known_layout() -> bool:
    """Return True if the memory layout of this NumPy is the one that ``_copied`` assumes."""
    twister = np.random.MT19937(0)
    twister.random_raw(3)
    return _copied(twister) == _packed(twister)


_LIES_IN_MEMORY = _has_known_layout()


_INDEX_AND_WORDS = struct.Struct("=i624I")
_VERSION = 3
"""Version of the tuples of ``random.getstate``, since Python 3.2."""


class PythonState(NamedTuple):
    """Index and words of the Mersenne Twister, and the number that ``random.gauss`` has cached, if any."""

    memory: bytes
    gauss: float | None

    @classmethod
    def of(cls, state: tuple[Any, ...]) -> PythonState:
        """Convert the result of ``random.getstate``."""
        _, numbers, gauss = state
        return cls(_INDEX_AND_WORDS.pack(numbers[-1], *numbers[:-1]), gauss)

    def as_tuple(self) -> tuple[Any, ...]:
        """Return the state in the format of ``random.setstate``."""
        index, *words = _INDEX_AND_WORDS.unpack(self.memory)
        return _VERSION, (*words, index), self.gauss


def _memory_of(generator: random.Random) -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of index and words, which CPython stores after the object header; None if it is not there."""
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < head + _INDEX_AND_WORDS.size:
        return None
    memory = (ctypes.c_char * _INDEX_AND_WORDS.size).from_address(id(generator) + head)
    return memory if memory.raw == PythonState.of(generator.getstate()).memory else None


# the generator of the module's functions
_live: random.Random = random.random.__self__  # type: ignore[attr-defined]
_memory = _memory_of(_live)


def read_python() -> PythonState:
    """Return the state of the global generator."""
    if _memory is None:
        return PythonState.of(random.getstate())
    return PythonState(_memory.raw, _live.gauss_next)  # type: ignore[attr-defined]


def write_python(state: PythonState) -> None:
    """Set the state of the global generator."""
    if _memory is None:
        random.setstate(state.as_tuple())
        return
    _memory.raw = state.memory
    _live.gauss_next = state.gauss  # type: ignore[attr-defined]


def seed_all(seed: int) -> None:
    """Seed every generator of this process; ``seed`` is any non-negative integer."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # includes CUDA and other devices


_seed_python, _seed_numpy = random.seed, np.random.seed  # before the recorder replaces them to observe the user's seeds


def reseed(seed: int) -> None:
    """Seed the generators in use. Fast enough for each sample (10 us instead of 200 us for ``seed_all``)."""
    _seed_python(seed)
    _seed_numpy(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_of(text: str) -> int:
    """Return a seed that follows from ``text`` alone, on any machine: 63 bits, because torch takes a signed number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class TorchGenerators(NamedTuple):
    """The states of torch's default generators, of the CPU and of a GPU (None without one)."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> TorchGenerators:
        """Copy the states. Takes 2 us, and more on a GPU."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.default_generator.get_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.default_generator.set_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def cuda_states() -> tuple[Tensor, ...]:
    """Return the state of the generator of each visible GPU; none before CUDA is used."""
    return tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def set_cuda_states(states: Sequence[Tensor]) -> None:
    """Restore the states; there may be fewer GPUs than before."""
    for index, state in enumerate(states[: torch.cuda.device_count()] if states else ()):
        torch.cuda.set_rng_state(state, index)


@dataclass(frozen=True)
class RngBag:
    """The state of every generator at one instant. ``torch_cuda`` is empty before CUDA is used."""

    python: tuple[Tree, ...]
    numpy: Mapping[str, Tree]
    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...] = ()

    @classmethod
    def capture(cls) -> RngBag:
        """Copy the states. Costs a device-to-host copy of a few bytes for each CUDA device in use."""
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda_states())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(dict(self.numpy))
        torch.set_rng_state(self.torch_cpu)
        set_cuda_states(self.torch_cuda)

    def state_dict(self) -> StateDict:
        """Return plain values and tensors, for a checkpoint."""
        numpy_state = {
            **self.numpy,
            "state": {**self.numpy["state"], "key": self.numpy["state"]["key"].tolist()},
        }
        return {
            "python": self.python,
            "numpy": numpy_state,
            "torch_cpu": self.torch_cpu,
            "torch_cuda": list(self.torch_cuda),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tree]) -> RngBag:
        """Invert ``state_dict``. Raises the error of a generator that rejects its state."""
        inner = saved["numpy"]["state"]
        key = np.array(inner["key"], dtype=np.uint32)
        numpy_state = {**saved["numpy"], "state": {**inner, "key": key}}
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(saved["torch_cpu"])
        return cls(saved["python"], numpy_state, saved["torch_cpu"], tuple(saved["torch_cuda"]))


class _Borrowed(threading.local):
    """Functions that restore the generators, one for each active context of this thread, outermost first."""

    def __init__(self) -> None:
        self.give_back: list[Callable[[], None]] = []


_borrowed = _Borrowed()


def borrow(give_back: Callable[[], None]) -> None:
    """Register that the generators are borrowed; ``give_back`` restores the state that they had before.

    The borrower calls ``end_borrowing`` in a ``finally``. A signal handler may raise an exception inside that call, or
    right before it so that the call is skipped. Code that catches this exception calls ``give_back_to``.
    """
    _borrowed.give_back.append(give_back)


def end_borrowing(give_back: Callable[[], None]) -> None:
    """Call ``give_back``, unless it has been called."""
    if give_back in _borrowed.give_back:
        give_back()
        _borrowed.give_back.remove(give_back)


def num_borrowed() -> int:
    """Return the number of contexts of this thread that have borrowed the generators."""
    return len(_borrowed.give_back)


def give_back_to(depth: int) -> None:
    """Restore the generators for all but the ``depth`` outermost contexts, if a signal prevented ``end_borrowing``."""
    while num_borrowed() > depth:
        _borrowed.give_back[-1]()
        _borrowed.give_back.pop()


def _back_to_now() -> Callable[[], None]:
    """Return a function that restores the current state of every generator.

    Setting NumPy's state takes 65 us, so it is set only if it may have changed.
    """
    python = read_python()
    numpy_state = np.random.get_state(legacy=False)
    words = words_of_numpy()
    of_torch, cuda = torch.get_rng_state(), cuda_states()
    assert isinstance(numpy_state, dict)

    def give_back() -> None:
        write_python(python)
        # has_gauss: NumPy had a cached normal number, which may have been used since
        if words is None or words != words_of_numpy() or numpy_state["has_gauss"]:
            np.random.set_state(numpy_state)
        torch.set_rng_state(of_torch)
        set_cuda_states(cuda)

    return give_back


def words_of_numpy() -> TwisterState | None:
    """Return the words of NumPy's global generator, if it is a Mersenne Twister."""
    live = mtrand.get_bit_generator()
    return TwisterState.of(live) if isinstance(live, np.random.MT19937) else None


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Context that restores every generator at its end."""
    give_back = _back_to_now()
    borrow(give_back)
    try:
        yield
    finally:
        end_borrowing(give_back)


def set_deterministic() -> None:
    """Use only kernels that give the same bits each time, process-wide.

    Ops without such a kernel raise an error naming the op.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
