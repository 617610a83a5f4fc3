"""Remedies that are tried on a recorded step before they are offered, by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.replay.session import ReplaySession

Try = Callable[..., str]
"""``(bench, **args)`` -> what came of it, in words with numbers."""


class NotTried(Exception):
    """A remedy cannot be tried on this step; says why."""


TRIALS: dict[str, Try] = {}


def trial(name: str) -> Callable[[Try], Try]:
    """Registers a function that tries a remedy."""

    def register(function: Try) -> Try:
        assert name not in TRIALS, name
        TRIALS[name] = function
        return function

    return register


def attempt(name: str, bench: ReplaySession, args: Mapping[str, Any]) -> str:
    """What came of a trial. Raises NotTried."""
    if name not in TRIALS:
        raise NotTried(f"there is no trial {name!r}")
    return TRIALS[name](bench, **args)


def load_all() -> None:
    """Imports every file of trials once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
