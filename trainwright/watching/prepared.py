"""The objects of a loop inside of what Accelerate's ``prepare`` puts around them."""

from __future__ import annotations

_INSIDE = ("base_dataloader", "scheduler", "optimizer")
"""Where its wrappers keep what they were made from."""


def unprepared(given: object) -> object:
    """The loader, scheduler or optimizer that a wrapper of Accelerate was made from; anything else as it is."""
    if type(given).__module__.partition(".")[0] != "accelerate":
        return given
    return next((vars(given)[name] for name in _INSIDE if name in vars(given)), given)
