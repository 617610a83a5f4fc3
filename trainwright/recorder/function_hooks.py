"""Reports calls of autograd Functions that the user's code defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.function import _SingleLevelFunction

from trainwright.recorder.listener import has_listeners, inside, tell


def hear_functions() -> Callable[[], None]:
    """Calls the listeners around each call of a custom Function. Returns a function that ends this.

    ``Function.apply`` may be bound to a name long before a loop is watched. It looks up the method of its base class at
    each call, and that method is replaced.
    """
    ours = classmethod(_apply)
    setattr(_SingleLevelFunction, "apply", ours)  # noqa: B010  it has none of its own

    def undo() -> None:
        if vars(_SingleLevelFunction).get("apply") is ours:
            delattr(_SingleLevelFunction, "apply")

    return undo


def _apply(cls: type[Any], /, *args: object, **kwargs: object) -> object:
    original = super(_SingleLevelFunction, cls).apply
    is_own = cls.__module__.startswith(("torch.", "trainwright."))
    if is_own or inside.backward or not has_listeners():
        return original(*args, **kwargs)
    tell("on_apply")
    result = None
    try:
        result = original(*args, **kwargs)
    finally:
        tell("on_applied", cls.apply, args, kwargs, result)
    return result
