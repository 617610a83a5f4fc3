"""Optimizers and schedulers by what they do: whatever shares parameter groups with an optimizer is that optimizer.

Accelerate, Lightning, Fabric, DeepSpeed and users wrap optimizers. A wrapper writes to the same parameter groups, so
its learning rates, its ``zero_grad`` and its ``step`` are those of the optimizer inside of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader

T = TypeVar("T")
DEPTH = 3
"""Depth of nested objects that are searched."""

_watched: dict[int, Optimizer] = {}
"""Optimizers that a watch of this process was called with, by identity."""
_known: dict[int, tuple[weakref.ref[object], Optimizer]] = {}
"""Known wrappers of these, by identity."""


@contextmanager
def watching(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which ``same_optimizer`` returns these for their wrappers."""
    mine = {id(each): each for each in optimizers}
    _watched.update(mine)
    try:
        yield
    finally:
        for key in mine:
            _watched.pop(key, None)
        _known.clear()


def same_optimizer(optimizer: object) -> object:
    """Returns the watched optimizer that shares a parameter group with ``optimizer``; else ``optimizer`` itself."""
    key = id(optimizer)
    if key in _watched:
        return optimizer
    reference, known = _known.get(key, (None, None))
    if reference is not None and reference() is optimizer:
        return known
    groups = _groups_of(optimizer)
    for each in _watched.values():
        if groups & _groups_of(each):
            _known[key] = (weakref.ref(optimizer), each)
            return each
    return optimizer


def share_groups(one: object, other: object) -> bool:
    """Returns True if two objects hold the same parameter group, so that one uses what the other writes."""
    return one is other or bool(_groups_of(one) & _groups_of(other))


def _groups_of(optimizer: object) -> set[int]:
    groups = getattr(optimizer, "param_groups", None)
    return set(map(id, groups)) if isinstance(groups, list | tuple) else set()


class Updates(threading.local):
    """The current updates in this thread. A wrapper that steps and the optimizer in it make one update."""

    def __init__(self) -> None:
        self._by: dict[int, int] = {}  # by optimizer: the object with the outermost step

    def begins(self, optimizer: object, stepping: object) -> bool:
        """Returns True if an update begins with this call of ``stepping.step``."""
        by = self._by.setdefault(id(optimizer), id(stepping))
        return by == id(stepping)

    def ends(self, optimizer: object, stepping: object) -> bool:
        """Returns True if the update ends with this call."""
        is_outermost = self._by.get(id(optimizer)) == id(stepping)
        if is_outermost:
            del self._by[id(optimizer)]
        return is_outermost


def optimizers_in(given: object) -> list[Optimizer]:
    """Returns the optimizers whose ``step`` torch reports: ``given`` itself, or those that it wraps."""
    if isinstance(given, Optimizer) and getattr(type(given).step, "hooked", False):
        return [given]
    return [each for each in held_in(given, Optimizer) if getattr(type(each).step, "hooked", False)]


def held_in(given: object, kind: type[T], depth: int = DEPTH) -> list[T]:
    """Returns the nearest objects of a kind among the attributes of ``given``, or their attributes."""
    values = [each for each in getattr(given, "__dict__", {}).values() if each is not given]
    values += [item for each in values if isinstance(each, list | tuple) for item in each]
    found = {id(each): each for each in values if isinstance(each, kind)}
    if not found and depth > 1:
        deeper = [inner for each in values for inner in held_in(each, kind, depth - 1)]
        found = {id(each): each for each in deeper}
    return list(found.values())


_SCHEDULERS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)


def unwrapped(given: object) -> object:
    """Returns the DataLoader or scheduler that a wrapper was made from; any other object unchanged.

    A loader that wraps another over the same dataset reads its batches from it.
    """
    if isinstance(given, _SCHEDULERS):
        return given
    inner: list[object] = [*held_in(given, DataLoader, depth=1)]
    if isinstance(given, DataLoader):
        inner = [each for each in inner if getattr(each, "dataset", None) is given.dataset]
    found = inner or [each for kind in _SCHEDULERS for each in held_in(given, kind, depth=1)]
    return unwrapped(found[0]) if found else given
