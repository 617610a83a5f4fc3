"""Sizes to be proud of: a reader holds one file, one class, one function, one call in mind."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator

import pytest

import trainwright as tw
from tests.house import Function, files, functions, modules, nodes, room_of, shown, tree

pytestmark = pytest.mark.slow  # the first of them parses every file


LOOP = "trainwright/engine/loop.py"
LINES_OF_A_FILE = {LOOP: 150}
ANY_PER_1000_LINES = 15


def lines(function: Function) -> int:
    """Of code: the docstring is not counted."""
    has_doc = ast.get_docstring(function) is not None
    first = function.body[1] if has_doc and len(function.body) > 1 else function.body[0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1 if not (has_doc and len(function.body) == 1) else 0


def parameters(function: Function) -> int:
    """Beside ``self``."""
    arguments = function.args
    count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
    return count - (bool(arguments.args) and arguments.args[0].arg in ("self", "cls"))


def public_functions() -> Iterator[Function]:
    """The functions of ``trainwright.__all__``, and the constructors of its classes."""
    for name in tw.__all__:
        home = inspect.getmodule(getattr(tw, name))
        path = modules().get(home.__name__) if home else None
        for node in tree(path).body if path else ():
            if isinstance(node, Function) and node.name == name:
                yield node
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from (each for each in node.body if isinstance(each, Function) and each.name == "__init__")


def verbs() -> Iterator[Function]:
    """The functions of the command line that have options for parameters."""
    for path in files():
        for each in functions(path):
            names = {ast.unparse(one.func) for one in each.decorator_list if isinstance(one, ast.Call)}
            if room_of(path) == "cli" and "verb" in names:
                yield each


def test_a_file_fits_in_mind() -> None:
    sizes = {shown(path): len(path.read_text().splitlines()) for path in files()}
    assert {path: size for path, size in sizes.items() if size > LINES_OF_A_FILE.get(path, 400)} == {}
    assert LOOP in sizes


def test_a_class_fits_in_mind() -> None:
    classes = [node for path in files() for node in nodes(path, ast.ClassDef)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes}
    assert len(sizes) > 200
    assert {name: size for name, size in sizes.items() if size >= 200} == {}


def test_a_function_fits_in_mind() -> None:
    sizes = {f"{shown(path)}:{each.lineno} {each.name}": lines(each) for path in files() for each in functions(path)}
    assert {name: size for name, size in sizes.items() if size > 60} == {}
    short = sum(size <= 30 for size in sizes.values()) / len(sizes)
    assert short >= 0.9, f"{short:.1%} of {len(sizes)} functions have at most 30 lines"


def test_a_call_fits_in_mind() -> None:
    """But for the public surface and the verbs, which spell out every option with its type, however many there are."""
    public = {*public_functions(), *verbs()}
    assert {"fit", "make_step"} < {each.name for each in public}
    counts = {
        f"{shown(path)}:{each.lineno} {each.name}": parameters(each)
        for path in files()
        for each in functions(path)
        if each not in public
    }
    assert {name: count for name, count in counts.items() if count > 8} == {}


def test_no_public_function_takes_whatever_comes() -> None:
    public = list(public_functions())
    assert len(public) > 10
    assert [each.name for each in public if each.args.vararg or each.args.kwarg] == []


def test_types_say_something() -> None:
    anys, sizes = Counter[str](), Counter[str]()
    for path in files():
        text = path.read_text()
        anys[room_of(path)] += len(re.findall(r"\bAny\b", text))
        sizes[room_of(path)] += text.count("\n")
    rate = 1000 * anys.total() / sizes.total()
    rooms = {room: round(1000 * anys[room] / sizes[room]) for room, _ in anys.most_common() if anys[room]}
    assert rate < ANY_PER_1000_LINES, f"Any {rate:.1f} times in 1,000 lines; by room: {rooms}"
