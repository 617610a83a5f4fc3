"""Observers read each step after it is done, and may stop the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple, Protocol

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError


class Stop(NamedTuple):
    """The reason for which an observer ends the run.

    Attributes:
        reason: Shown to the user.
        save: False if the state must not be saved, for example because weights are NaN.
        exit_code: Exit code of the process.
        by_signal: True if this process or another rank received the signal that ``reason`` names.
    """

    reason: str
    save: bool = True
    exit_code: int = 0
    by_signal: bool = False


class Observer(Protocol):
    """Reads each step after it is done, without changing anything. ``close``, if present, is called at the end."""

    def observe(self, result: StepResult, state: TrainState) -> Stop | None: ...
    def close(self) -> None: ...


class FunctionObserver:
    """Adapts a function of ``(result, state)`` to an observer."""

    def __init__(self, function: Callable[[StepResult, TrainState], Stop | None]) -> None:
        self.function = function

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        return self.function(result, state)

    def close(self) -> None: ...


def as_observer(given: object) -> Observer:
    """Convert a function of ``(result, state)`` to an observer; return an object with ``observe`` unchanged.

    Raises:
        UsageError: The argument is neither.
    """
    if isinstance(given, type) or not (callable(getattr(given, "observe", None)) or callable(given)):
        name = getattr(given, "__name__", type(given).__name__)
        what = "a class" if isinstance(given, type) else "no object with a method observe(result, state)"
        raise UsageError(
            f"the observer {name} is {what}",
            remedy="give an object of a class that has this method, or a function of (result, state)",
        )
    if callable(getattr(given, "observe", None)):
        return given  # type: ignore[return-value]
    assert callable(given)
    try:
        inspect.signature(given).bind(None, None)
    except ValueError:  # a builtin without a signature
        pass
    except TypeError:
        shown = f"{getattr(given, '__name__', type(given).__name__)}{inspect.signature(given)}"
        raise UsageError(f"the observer {shown} does not take (result, state)", remedy="accept both") from None
    return FunctionObserver(given)


def as_stop(answer: object, observer: Observer) -> Stop:
    """Return the Stop that an observer returned. Raises UsageError for any other value."""
    if isinstance(answer, Stop):
        return answer
    owner = observer.function if isinstance(observer, FunctionObserver) else type(observer)
    name = f"{getattr(owner, '__name__', type(owner).__name__)}{'' if owner is not type(observer) else '.observe'}"
    raise UsageError(f"{name} returned {answer!r}", remedy="return None or a tw.Stop(why)")
