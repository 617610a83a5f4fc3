"""What a loop calls the places of a tuple: of ``shown = evaluate(model)`` with ``{"loss": shown[0]}`` further down."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from trainwright.doctor.program.measure.written import program_of
from trainwright.recorder.probes import WatchedObjects


class NumbersByName:
    """The numbers of the loop; ``shown.0`` is ``shown.loss`` where all that reads the place calls it so.

    The source is read with the first number that has no other name.
    """

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._names: Mapping[str, str] | None = None

    def __call__(self) -> dict[str, float]:
        numbers = self._watched.numbers()
        if self._names is None and any(re.fullmatch(r"\w+\.\d+", name) for name in numbers):
            program = program_of(self._watched.code())
            self._names = {} if program is None else names_of_places(program.loop.node)
        names = self._names or {}
        return {names.get(name, name): value for name, value in numbers.items()}


def names_of_places(function: ast.AST) -> dict[str, str]:
    """``shown.0`` to ``shown.loss``: by keys, keywords, the text in front of it, and names that it is unpacked to."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(function):
        for place, name in _named(node):
            found[place].add(name)
    named = {place: next(iter(names)) for place, names in found.items() if len(names) == 1}
    return {place: f"{place.partition('.')[0]}.{name}" for place, name in named.items()}


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Places, and what this node calls them."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values)
        yield from (
            (_place(v), k.value)
            for k, v in pairs
            if isinstance(k, ast.Constant) and isinstance(k.value, str) and _place(v)
        )
    elif isinstance(node, ast.keyword) and node.arg and _place(node.value):
        yield _place(node.value), node.arg
    elif isinstance(node, ast.JoinedStr):
        for before, part in zip(node.values, node.values[1:]):
            words = re.findall(r"[A-Za-z_]\w*", str(before.value)) if isinstance(before, ast.Constant) else []
            if words and isinstance(part, ast.FormattedValue) and _place(part.value):
                yield _place(part.value), words[-1]
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and isinstance(node.targets[0], ast.Tuple):
        names = [each.id if isinstance(each, ast.Name) else "_" for each in node.targets[0].elts]
        yield from ((f"{node.value.id}.{n}", name) for n, name in enumerate(names) if name != "_")
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _place(node.value):
        yield _place(node.value), node.targets[0].id


def _place(value: ast.expr) -> str:
    """``shown.0`` for ``shown[0]``, also rounded or made a float; "" for anything else."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("float", "round"):
        if not value.args:
            return ""
        value = value.args[0]
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name):
        return ""
    number = value.slice.value if isinstance(value.slice, ast.Constant) else None
    return f"{value.value.id}.{number}" if type(number) is int and number >= 0 else ""
