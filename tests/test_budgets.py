"""Sizes to be proud of: a reader holds one file, one function, one call in mind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "trainwright"
FILES = sorted(HOUSE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
PUBLIC = {"fit", "watch"}
"""Spell out every option with its type, however many there are."""


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def lines(function: Function) -> int:
    """Of code: the docstring is not counted."""
    has_doc = ast.get_docstring(function) is not None
    first = function.body[1] if has_doc and len(function.body) > 1 else function.body[0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1 if not (has_doc and len(function.body) == 1) else 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_a_file_fits_in_mind(path: Path) -> None:
    limit = 150 if path.relative_to(HOUSE).as_posix() == "engine/loop.py" else 400
    assert len(path.read_text().splitlines()) <= limit
    for function in functions(path):
        assert lines(function) <= 60, f"{function.name} has {lines(function)} lines"
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        own = arguments.args[0].arg in ("self", "cls") if arguments.args else False
        assert count - own <= 8 or function.name in PUBLIC, f"{function.name} has {count - own} parameters"


def test_nine_functions_in_ten_are_short() -> None:
    sizes = sorted(lines(function) for path in FILES for function in functions(path))
    short = sum(size <= 30 for size in sizes) / len(sizes)
    assert short >= 0.9, f"{short:.1%} of {len(sizes)} functions have at most 30 lines"


def test_no_room_for_leftovers() -> None:
    names = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert not names & {"utils", "util", "helpers", "misc", "common"}
    classes = [n.name for p in FILES for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ClassDef)]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Utils"))]


def test_every_file_says_what_it_is_for() -> None:
    assert [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))] == []
