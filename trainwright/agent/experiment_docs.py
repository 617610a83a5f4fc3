"""Descriptions of experiments and of their fields, from the docstrings and comments of ``doctor/facts``."""

from __future__ import annotations

import inspect
import pkgutil
import re
from functools import cache
from importlib import import_module

from trainwright.doctor import facts

MAX_CHARS = 60
_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(.*))?")
_COMMENT = re.compile(r"    #\s*(.*)")


@cache
def _kinds() -> dict[str, type]:
    """Return the classes of facts by the names of their experiments."""
    modules = [import_module(f"{facts.__name__}.{each.name}") for each in pkgutil.iter_modules(facts.__path__)]
    classes = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
    return {str(vars(each)["experiment"]): each for each in classes if "experiment" in vars(each)}


def described(experiment: str, limit: int = MAX_CHARS) -> str:
    """Return the first sentence about an experiment, shortened; "" for one that has no class."""
    kind = _kinds().get(experiment)
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()) if kind is not None else ""
    return _shortened(re.split(r"(?<=[.:;]) ", text)[0].rstrip(".:;"), limit)


def described_fields(experiment: str) -> dict[str, str]:
    """Return the comments on the fields of an experiment: at the end of the line, or in the lines before it."""
    found: dict[str, str] = {}
    kind, before = _kinds().get(experiment), ""
    for line in inspect.getsource(kind).splitlines() if kind is not None else ():
        if comment := _COMMENT.fullmatch(line):
            before = f"{before} {comment[1]}".strip()
            continue
        if (field := _FIELD.fullmatch(line)) and (text := field[2] or before):
            found[field[1]] = _shortened(text, 2 * MAX_CHARS)
        before = ""
    return found


def _shortened(text: str, limit: int) -> str:
    text = text.replace("`", "")
    return text if len(text) <= limit else f"{text[:limit].rpartition(' ')[0]} ..."
