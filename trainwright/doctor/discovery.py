"""Finds the checks: each module in ``checks`` has one."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from trainwright.doctor import checks
from trainwright.doctor.check import Check
from trainwright.errors import UsageError, suggest

DEFAULT = "default"


@cache
def all_checks() -> tuple[Check, ...]:
    """Returns every check, sorted by code."""
    found: list[Check] = []
    for module in pkgutil.walk_packages(checks.__path__, f"{checks.__name__}."):
        if not module.ispkg:
            made = getattr(import_module(module.name), module.name.rpartition(".")[2])
            assert isinstance(made, Check), module.name
            found.append(made)
    return tuple(sorted(found, key=lambda each: each.code))


def choose_checks(names: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks that ``names`` select: ``default`` (all of them), a topic, or a code.

    Args:
        names: The selection.

    Raises:
        UsageError: A name is none of these. The error suggests the nearest one.
    """
    chosen: dict[str, Check] = {}
    for name in names:
        some = [each for each in all_checks() if name in (DEFAULT, each.code, each.topic)]
        if not some:
            known = [DEFAULT, *{each.topic: None for each in all_checks()}, *(each.code for each in all_checks())]
            raise UsageError(f"checks: there is no check {name!r}", remedy=suggest(name, known))
        chosen |= {each.code: each for each in some}
    return tuple(chosen.values())


def check_of(code: str) -> Check | None:
    """Returns the check with this code; None without one."""
    return next((each for each in all_checks() if each.code == code), None)
