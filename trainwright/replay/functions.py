"""Types of torch functions and their arguments in a replay, and of handlers that observe or change calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from trainwright.recorder.program import mapped
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

OpHandler: TypeAlias = Callable[[TorchFunction, Args, Kwargs], object]
"""For ``Intervention.ops``: is called instead of every torch function, and returns the result of the call."""

InputHandler: TypeAlias = Callable[[int, Args, Kwargs], tuple[Args, Kwargs]]
"""For ``Intervention.inputs``: maps the number and arguments of a forward call to new arguments."""


def function_name(function: TorchFunction) -> str:
    """Returns the name of a torch function without its module; "?" if it has none."""
    return str(getattr(function, "__name__", "?"))


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: object) -> Any:
    """Returns one argument of a call, passed by position or by name; ``default`` if it was not passed."""
    return kwargs.get(name, args[position] if len(args) > position else default)


def change_leaves(change: Callable[[object], object]) -> InputHandler:
    """Returns an ``InputHandler`` that replaces every leaf of the arguments by ``change(leaf)``."""
    return lambda number, args, kwargs: (mapped(args, change), mapped(kwargs, change))
