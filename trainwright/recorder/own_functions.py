"""The functions of the user's that live objects hold, call or are made of: by closures, global names and classes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType, MethodType

from torch import nn

MOST = 512
"""Functions that are found, and items of a container that are followed."""
_INSTALLED = tuple(f"{sysconfig.get_path(each)}/" for each in ("stdlib", "purelib", "platlib"))
_OURS = f"{Path(__file__).parents[1]}/"


def own_functions(values: Iterable[object]) -> list[CodeType]:
    """Those of files that neither Python, an installed package nor Trainwright brings."""
    waiting, seen, found = list(values), set[int](), list[CodeType]()
    while waiting and len(found) < MOST:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        function = _function_of(value)
        if function is None:
            waiting += _parts_of(value)
        elif _is_own(function.__code__.co_filename):
            found.append(function.__code__)
            waiting += _used_by(function)
    return found


def _function_of(value: object) -> FunctionType | None:
    while isinstance(value, partial | MethodType | staticmethod | classmethod):
        value = value.func if isinstance(value, partial) else value.__func__
    if not isinstance(value, FunctionType):
        return None
    inner = unwrap(value)  # of @torch.no_grad()
    return inner if isinstance(inner, FunctionType) else value


def _used_by(function: FunctionType) -> Iterator[object]:
    """What it closes over, and what its global names stand for."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from (function.__globals__.get(name) for name in _names_in(function.__code__))


def _names_in(code: CodeType) -> set[str]:
    """The global names that it reads, also in functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _parts_of(value: object) -> list[object]:
    """The items of a container, the methods of a class, the class of an object, those of a model."""
    if type(value) is dict:
        return list(value.values())[:MOST]
    if isinstance(value, list | tuple):
        return list(value[:MOST])
    if isinstance(value, type):
        return [*vars(value).values(), *value.__bases__]
    classes: list[object] = [type(value)]
    return classes + [type(each) for each in value.modules()] if isinstance(value, nn.Module) else classes


def _is_own(file: str) -> bool:
    return file.endswith(".py") and not file.startswith((*_INSTALLED, _OURS))
