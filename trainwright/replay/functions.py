"""Torch functions as a replay calls them: the types of their arguments, and what may watch or change a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from trainwright.errors import text_of
from trainwright.recorder.program import mapped
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

OpHandler: TypeAlias = Callable[[TorchFunction, Args, Kwargs], object]
"""For ``Intervention.ops``: is called in place of every torch function, and returns what the call shall return."""

InputHandler: TypeAlias = Callable[[int, Args, Kwargs], tuple[Args, Kwargs]]
"""For ``Intervention.inputs``: the number of a forward call and its arguments to the arguments that are used."""


def function_name(function: TorchFunction) -> str:
    """The name of a torch function without its module; "?" where it has none."""
    return str(getattr(function, "__name__", "?"))


def error_text(error: BaseException | None) -> str | None:
    """The class and the message of an exception; None for none."""
    return None if error is None else text_of(error)


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: object) -> Any:
    """One argument of a call, whether it was passed by position or by name."""
    return kwargs.get(name, args[position] if len(args) > position else default)


def change_leaves(change: Callable[[object], object]) -> InputHandler:
    """An ``InputHandler`` that replaces every leaf of the arguments by ``change(leaf)``."""
    return lambda number, args, kwargs: (mapped(args, change), mapped(kwargs, change))
