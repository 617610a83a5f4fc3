"""Values attached to tensors by identity, which keep no tensor alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class TensorNotes(Generic[T]):
    """A value for each of some tensors. It is dropped when the tensor is freed, before its id is reused."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def __setitem__(self, tensor: Tensor, note: T) -> None:
        # a strong reference would be a cycle, and would keep values that are tensors alive
        key, weak_self = id(tensor), weakref.ref(self)

        def drop(_: weakref.ref[Tensor]) -> None:
            if (notes := weak_self()) is not None:
                notes._notes.pop(key, None)

        self._notes[key] = weakref.ref(tensor, drop), note

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._notes

    def __getitem__(self, tensor: Tensor) -> T:
        return self._notes[id(tensor)][1]

    def __bool__(self) -> bool:
        return bool(self._notes)

    def get(self, tensor: object) -> T | None:
        known = self._notes.get(id(tensor))
        return None if known is None else known[1]

    def tensors(self) -> Iterator[tuple[Tensor, T]]:
        """Yields the tensors that are alive, with their values."""
        alive = [(reference(), note) for reference, note in self._notes.values()]
        return ((tensor, note) for tensor, note in alive if tensor is not None)

    def clear(self) -> None:
        self._notes.clear()
