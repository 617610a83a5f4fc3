"""The objects of a loop inside of what Accelerate, Lightning, Fabric, DeepSpeed or the user put around them."""

from __future__ import annotations

from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from trainwright.recorder.optimizers import held_in

_SCHEDULERS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)


def unwrapped(given: object) -> object:
    """The DataLoader or scheduler that a wrapper was made from; anything else as it is.

    A loader that wraps another over the same data set reads its batches from it.
    """
    if isinstance(given, _SCHEDULERS):
        return given
    inner: list[object] = [*held_in(given, DataLoader, depth=1)]
    if isinstance(given, DataLoader):
        inner = [each for each in inner if getattr(each, "dataset", None) is given.dataset]
    found = inner or [each for kind in _SCHEDULERS for each in held_in(given, kind, depth=1)]
    return unwrapped(found[0]) if found else given
