"""Finds the checks: each module in ``checks`` and ``contrib`` has one."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from trainwright.doctor import checks, contrib
from trainwright.doctor.check import Check
from trainwright.errors import UsageError, suggest

DEFAULT = "default"


@cache
def all_checks() -> tuple[Check, ...]:
    """Returns every check, sorted by code, packs last."""
    return tuple(sorted((*_in(checks), *_in(contrib)), key=lambda each: (each.pack or "", each.code)))


def _in(package: ModuleType) -> Iterator[Check]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.ispkg:
            made = getattr(import_module(found.name), found.name.rpartition(".")[2])
            assert isinstance(made, Check), found.name
            yield made


def default_checks() -> tuple[Check, ...]:
    """Returns the default checks: all but those of the packs."""
    return tuple(each for each in all_checks() if each.pack is None)


def choose_checks(names: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks that ``names`` select: ``default``, a topic, a pack, or a code.

    Args:
        names: The selection.

    Raises:
        UsageError: A name is none of these. The error suggests the nearest one.
    """
    chosen: dict[str, Check] = {}
    for name in names:
        some = [each for each in all_checks() if name in (each.code, each.topic) or (name == DEFAULT and not each.pack)]
        if not some:
            known = [DEFAULT, *{each.topic: None for each in all_checks()}, *(each.code for each in all_checks())]
            raise UsageError(f"checks: there is no check {name!r}", remedy=suggest(name, known))
        chosen |= {each.code: each for each in some}
    return tuple(chosen.values())


def check_of(code: str) -> Check | None:
    """Returns the check with this code; None without one."""
    return next((each for each in all_checks() if each.code == code), None)
