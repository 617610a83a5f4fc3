"""Reports calls of autograd Functions that the user's code defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction

from trainwright.recorder.listener import has_listeners, inside, tell

OWNER = _SingleLevelFunction if isinstance(vars(Function)["apply"], classmethod) else Function
"""The class whose ``apply`` is replaced.

Until torch 2.13, ``Function.apply`` looks up ``apply`` of its base class at each call. Calls are therefore reported
even if the user stored ``MyFunction.apply`` in a variable before the watch. From torch 2.14 on ``apply`` is a C
function, and calls through such a variable are not reported. A replay of the step then does not give the recorded
gradients, so nothing is concluded from the replay.
"""


def listen_to_functions() -> Callable[[], None]:
    """Calls the listeners around each call of a custom Function. Returns a function that ends this."""
    before, ours = vars(OWNER).get("apply"), classmethod(_apply)
    setattr(OWNER, "apply", ours)  # noqa: B010

    def undo() -> None:
        if vars(OWNER).get("apply") is not ours:
            return
        if before is None:
            delattr(OWNER, "apply")
        else:
            setattr(OWNER, "apply", before)  # noqa: B010

    return undo


def _apply(cls: type[Any], /, *args: object, **kwargs: object) -> object:
    original = super(OWNER, cls).apply
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
