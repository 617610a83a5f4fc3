"""Finds the source line for a finding that has none: where the affected object is made or called.

The user's source is parsed only for findings without a line. A line is returned only if exactly one is possible.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from trainwright.runs.records import Found

_NOT_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_MADE = ("model.init_", "model.pretrained", "model.excess_dropout", "optim.params_")
"""Findings about how a module was made. All other findings on a module are about how it is used."""
_SCHEDULES, _OPTIMIZERS = ("schedule.",), ("optim.", "precision.eps_underflow", "precision.lost_updates")
_SCHEDULER_NAMES = frozenset(torch.optim.lr_scheduler.__all__)
_INPUTS = ("input", "label")


class SourceFile:
    """The syntax tree of a class, a function or a file, with the line numbers of its file."""

    def __init__(self, name: str, text: str, first_line: int = 1) -> None:
        self.name, self._first_line = Path(name).name, first_line
        try:
            self.tree: ast.AST = ast.parse(textwrap.dedent(text))
        except SyntaxError:  # a line of a notebook, or a file that has changed since
            self.tree = ast.Module(body=[], type_ignores=[])

    @classmethod
    def of(cls, thing: type | CodeType) -> SourceFile | None:
        """Return the source of a class or function of the user; None for library code or without a file."""
        try:
            name = inspect.getsourcefile(thing) or ""
            lines, first = inspect.getsourcelines(thing)
        except (TypeError, OSError):
            return None
        if name.startswith(_NOT_USERS) or "site-packages" in name:
            return None
        return cls(name, "".join(lines), max(1, first))

    def line(self, nodes: Iterator[ast.expr | ast.stmt]) -> str | None:
        """Return the line of the nodes, such as ``train.py:44``; None unless there is exactly one."""
        lines = {node.lineno for node in nodes}
        return f"{self.name}:{lines.pop() + self._first_line - 1}" if len(lines) == 1 else None

    def sets(self, names: Set[str]) -> Iterator[ast.expr]:
        """Yield assignments to attributes with these names, of any object."""
        every = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        return (node for node in every if isinstance(node.ctx, ast.Store) and node.attr in names)

    def calls(self, names: Set[str]) -> Iterator[ast.expr]:
        """Yield calls of functions with these names, such as ``torch.optim.AdamW(...)`` for ``AdamW``."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _last(node.func) in names)

    def assigned(self, name: str) -> Iterator[ast.stmt]:
        """Yield assignments to ``self.name``."""
        for node in ast.walk(self.tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            yield from (node for target in targets if _is_own(target) and _last(target) == name)  # type: ignore[misc]

    def function(self, name: str) -> Iterator[ast.stmt]:
        """Yield the functions with this name."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


class SourcePlaces:
    """The source of a loop and of its objects. ``code`` returns the function that contains the loop."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[object],
        schedulers: Sequence[object] = (),
        loaders: Sequence[object] = (),
        code: Callable[[], CodeType | None] = lambda: None,
    ) -> None:
        self._roots, self._optimizers, self._schedulers, self._loaders = roots, optimizers, schedulers, loaders
        self._code = code

    def line_of(self, found: Found) -> str | None:
        """Return the line of the object that a finding concerns; None if it is unknown or ambiguous."""
        with suppress(Exception):  # objects of the user may raise anything when they are read
            return self._line_of(found)
        return None

    def _line_of(self, found: Found) -> str | None:
        where, code = found.where, found.code
        if where.rank is not None:
            return None
        if code.startswith(_SCHEDULES):
            return self._line_that_makes(self._schedulers, _SCHEDULER_NAMES)
        if code == "loop.attribute_without_effect":
            attributes = {str(each.seen) for each in found.evidence}
            return self._in_loop(lambda source: source.sets(attributes))
        if where.module:
            return self._line_of_module(where.module, where.op, is_made=code.startswith(_MADE))
        if code.startswith(_OPTIMIZERS):
            return self._line_that_makes(self._optimizers)
        if code.startswith("data.") and found.stage in _INPUTS:
            return self._line_of_dataset()
        if code.startswith("model.") and len(self._roots) == 1:
            return self._in_class(self._roots[0], lambda source: source.function("forward"))
        return None

    @cached_property
    def _loop(self) -> tuple[SourceFile, ...]:
        """The function that contains the loop, then its file."""
        code = self._code()
        function = SourceFile.of(code) if code is not None else None
        if code is None or function is None:
            return ()
        try:
            return function, SourceFile(code.co_filename, Path(code.co_filename).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return (function,)

    def _in_loop(self, nodes: Callable[[SourceFile], Iterator[ast.expr]]) -> str | None:
        return next((line for source in self._loop if (line := source.line(nodes(source)))), None)

    def _line_that_makes(self, objects: Sequence[object], kinds: frozenset[str] = frozenset()) -> str | None:
        """Return the line that makes the objects or, if none are known, an object of these ``kinds``."""
        names = {type(each).__name__ for each in objects} or kinds
        is_one = len(names) == 1 or not objects
        return self._in_loop(lambda source: source.calls(names)) if is_one else None

    def _line_of_dataset(self) -> str | None:
        """Return the ``__getitem__`` of the user's dataset, else the line that makes the loader."""
        datasets = [getattr(each, "dataset", None) for each in self._loaders[:1]]
        for each in datasets:
            if line := self._in_class(each, lambda source: source.function("__getitem__")):
                return line
        return self._line_that_makes(self._loaders[:1])

    def _line_of_module(self, path: str, op: str | None, *, is_made: bool) -> str | None:
        """Return the line that makes a module, or calls it or its ``op``, in the innermost user class around it."""
        for root in self._roots:
            parts = path.split(".")
            if path and path not in dict(root.named_modules()):
                parts = parts[:-1]  # a parameter
            for depth in range(len(parts), -1, -1):
                owner = root.get_submodule(".".join(parts[:depth]))
                name = next((part for part in parts[depth : depth + 1]), "")
                wanted = _op_or_call(name, op if depth == len(parts) else None)
                made = self._in_class(owner, partial(SourceFile.assigned, name=name)) if name else None
                used = self._in_class(owner, wanted) if wanted is not None else None
                if line := (made or used) if is_made else (used or made):
                    return line
        return None

    def _in_class(
        self, thing: object, nodes: Callable[[SourceFile], Iterator[ast.expr] | Iterator[ast.stmt]]
    ) -> str | None:
        source = None if thing is None else SourceFile.of(type(thing))
        return None if source is None else source.line(nodes(source))


def _op_or_call(name: str, op: str | None) -> Callable[[SourceFile], Iterator[ast.expr]] | None:
    """Return a function that finds the calls of an operation, or of ``self.name``, in a class."""
    if op is not None:
        return lambda source: source.calls({op})
    if not name:
        return None
    return lambda source: (node for node in source.calls({name}) if _is_own(getattr(node, "func", node)))
