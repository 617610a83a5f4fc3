"""The state of NumPy's Mersenne Twister, read from memory: a copy takes 1 us, its ``state`` 25 us."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

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
        """Return the state in the format of the global generator, without a spare number."""
        *key, place = np.frombuffer(self.memory, _WORDS)
        state = {"key": np.array(key, dtype=_WORDS), "pos": int(place)}
        return {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}


def _copied(twister: np.random.MT19937) -> TwisterState:
    return TwisterState(ctypes.string_at(twister.ctypes.state_address, _SIZE))


def _packed(twister: np.random.MT19937) -> TwisterState:
    state: Any = twister.state["state"]
    return TwisterState(np.append(state["key"], _WORDS.type(state["pos"])).astype(_WORDS).tobytes())


def _lies_in_memory() -> bool:
    """Return True if the memory layout of this NumPy is the one that ``_copied`` assumes."""
    twister = np.random.MT19937(0)
    twister.random_raw(3)
    return _copied(twister) == _packed(twister)


_LIES_IN_MEMORY = _lies_in_memory()
