"""Finds the optimizer, scheduler or DataLoader inside of a wrapper. Optimizers are identified by parameter groups.

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
"""Levels of nested attributes that are searched."""

_watched: dict[int, Optimizer] = {}
"""Optimizers that are watched in this process, by ``id``."""
_known: dict[int, tuple[weakref.ref[object], Optimizer]] = {}
"""Known wrappers of the watched optimizers, by ``id``."""


@contextmanager
def watching(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which ``same_optimizer`` returns one of ``optimizers`` for its wrappers."""
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
    """Returns True if two objects share a parameter group: a learning rate that one sets applies to both."""
    return one is other or bool(_groups_of(one) & _groups_of(other))


def _groups_of(optimizer: object) -> set[int]:
    groups = getattr(optimizer, "param_groups", None)
    return set(map(id, groups)) if isinstance(groups, list | tuple) else set()


class Updates(threading.local):
    """The updates in progress in this thread. ``step`` of a wrapper and of the optimizer in it count as one update."""

    def __init__(self) -> None:
        self._by: dict[int, int] = {}  # id of an optimizer: id of the object whose step is outermost

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
    """Returns the objects of type ``kind`` among the attributes of ``given``; if there are none, one level deeper."""
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

    A DataLoader that holds another one of the same dataset is a wrapper of it.
    """
    if isinstance(given, _SCHEDULERS):
        return given
    inner: list[object] = [*held_in(given, DataLoader, depth=1)]
    if isinstance(given, DataLoader):
        inner = [each for each in inner if getattr(each, "dataset", None) is given.dataset]
    found = inner or [each for kind in _SCHEDULERS for each in held_in(given, kind, depth=1)]
    return unwrapped(found[0]) if found else given
