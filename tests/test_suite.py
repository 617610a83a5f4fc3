"""The tests themselves: each can fail, none imports another, none changes where Python looks for modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

from tests.house import ROOT, Function, files, functions, nodes, shown, tree

pytestmark = pytest.mark.slow  # the first of them parses every file

TESTS, ZOO, BENCHMARKS = ROOT / "tests", ROOT / "zoo", ROOT / "benchmarks"


def all_tests() -> Iterator[tuple[Path, Function]]:
    for path in files(TESTS):
        yield from ((path, each) for each in functions(path) if each.name.startswith("test_"))


@cache
def helpers(path: Path) -> frozenset[str]:
    """Names of functions and classes that a module defines or has from another of the tests, and that assert."""
    found = {
        alias.asname or alias.name
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom) and (home := ROOT / f"{(node.module or '').replace('.', '/')}.py").exists()
        if home.is_relative_to(TESTS)
        for alias in node.names
        if alias.name in helpers(home)
    }
    own = [node for node in tree(path).body if isinstance(node, Function | ast.ClassDef)]
    while more := {node.name for node in own if asserts(node, found)} - found:
        found |= more
    return frozenset(found)


def asserts(node: ast.AST, known: Set[str]) -> bool:
    """By itself, by pytest, or by one of the ``known`` functions; those that are handed on count as called."""
    for each in (part for statement in getattr(node, "body", []) for part in ast.walk(statement)):
        if isinstance(each, ast.Assert) or (isinstance(each, ast.Name) and each.id in known):
            return True
        if isinstance(each, ast.Attribute) and ast.unparse(each) in ("pytest.raises", "pytest.warns", "pytest.fail"):
            return True
        if isinstance(each, ast.Attribute) and each.attr.startswith("assert_"):
            return True
    return False


def cannot_fail(test: Function) -> Iterator[str]:
    """Assertions that hold whatever the code does."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert) and (why := always_true(node.test)):
            yield f"line {node.lineno}: {why}"
        if isinstance(node, ast.ExceptHandler) and all(isinstance(each, ast.Pass) for each in node.body):
            names = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} if node.type else {""}
            if names & {"", "Exception", "BaseException", "AssertionError"}:
                yield f"line {node.lineno}: its own assertions are swallowed"


def always_true(claim: ast.expr) -> str | None:
    if isinstance(claim, ast.Constant | ast.Tuple | ast.List | ast.Dict | ast.JoinedStr | ast.Lambda):
        return "always true"
    if isinstance(claim, ast.BoolOp) and isinstance(claim.op, ast.Or):
        return "or True" if any(isinstance(each, ast.Constant) and each.value for each in claim.values) else None
    if isinstance(claim, ast.Compare):
        pairs = zip([claim.left, *claim.comparators], claim.ops, claim.comparators)
        same = [ast.dump(left) == ast.dump(right) and not has_call(left) for left, op, right in pairs if is_equal(op)]
        return "compares a thing with itself" if any(same) else None
    return None


def has_call(node: ast.expr) -> bool:
    """The same call twice may give two things: that is what such a test asks."""
    return any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(node))


def is_equal(op: ast.cmpop) -> bool:
    return isinstance(op, ast.Eq | ast.Is | ast.LtE | ast.GtE)


def test_every_test_asserts_something() -> None:
    tests = list(all_tests())
    assert len(tests) > 1000
    assert [f"{shown(path)} {test.name}" for path, test in tests if not asserts(test, helpers(path))] == []


def test_every_test_can_fail() -> None:
    assert [f"{shown(path)} {test.name}: {why}" for path, test in all_tests() for why in cannot_fail(test)] == []


@pytest.mark.parametrize(
    "body",
    [
        "assert True",
        "assert (x == 1, 'it is one')",
        "assert x.y == x.y",
        "assert x == 1 or True",
        "try:\n        assert x == 1\n    except Exception:\n        pass",
    ],
)
def test_what_cannot_fail_is_found(body: str) -> None:
    (test,) = (each for each in ast.walk(ast.parse(f"def test():\n    {body}\n")) if isinstance(each, Function))
    assert len(list(cannot_fail(test))) == 1


def test_no_test_module_is_imported_by_another() -> None:
    for path in (*files(TESTS), *files(ZOO), *files(BENCHMARKS)):
        for node in nodes(path, ast.Import, ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]  # type: ignore[attr-defined]
            assert not [name for name in names if name.rpartition(".")[2].startswith("test_")], shown(path)


def test_nobody_changes_where_modules_are_looked_for() -> None:
    for path in (*files(TESTS), *files(ZOO), *files(BENCHMARKS)):
        changed = [
            node.lineno
            for node in nodes(path, ast.Call)
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("sys.path.insert", "sys.path.append")
        ]
        assert not changed, f"{shown(path)}:{changed}"
