"""The source of the package, parsed once, and queries for the tests of its structure."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "trainwright"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


TEMPLATES = HOUSE / "templates"
"""Templates that ``trainwright init`` copies. Nothing imports them: they import ``data`` and ``model`` beside them."""


@cache
def files(folder: Path = HOUSE) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*.py") if not path.is_relative_to(TEMPLATES)))


@cache
def tree(path: Path) -> ast.Module:
    """Returns the parsed file. Garbage collection, now and later, is avoided: it would take longer than parsing."""
    gc.disable()
    try:
        return ast.parse(path.read_text(), str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def _by_kind(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    """Returns all nodes of a file by class. Cached, because walking a tree takes as long as parsing it."""
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(tree(path)):
        found.setdefault(type(node), []).append(node)
    return found


def nodes(path: Path, *kinds: type[Node]) -> Iterator[Node]:
    """Yields the nodes of these classes, one class after the other."""
    for kind in kinds:
        yield from _by_kind(path).get(kind, ())  # type: ignore[misc]


def forget() -> None:
    """Drop the parsed sources, which take 160 MiB."""
    tree.cache_clear()
    _by_kind.cache_clear()


def shown(path: Path) -> str:
    """Returns the path relative to the root, for messages."""
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[Function]:
    return [*nodes(path, ast.FunctionDef), *nodes(path, ast.AsyncFunctionDef)]


def imports(path: Path, *, at_module: bool = False) -> set[str]:
    """Returns the dotted names that a file imports. ``at_module``: without function bodies and TYPE_CHECKING blocks."""
    return {name for node in _import_nodes(tree(path), at_module) for name in _dotted(node, path)}


def _import_nodes(node: ast.AST, at_module: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    if at_module and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if at_module and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _import_nodes(child, at_module)


def _dotted(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        assert node.level == 0, f"{path}: a relative import hides where it goes"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def modules() -> dict[str, Path]:
    """Returns the file of every module by its dotted name; for a package, its ``__init__``."""
    found = {}
    for path in files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def runtime_imports() -> dict[str, set[str]]:
    """Returns for each module the modules of the package that it imports at import time."""
    graph = {}
    for name, path in modules().items():
        wanted = imports(path, at_module=True)
        targets = {each if each in modules() else each.rpartition(".")[0] for each in wanted}
        graph[name] = (targets & set(modules())) - {name}
    return graph


def own_names(path: Path) -> dict[str, str]:
    """Returns the names under which a file imports parts of this package, with their dotted names."""
    found: dict[str, str] = {}
    for node in nodes(path, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "trainwright":
                found[alias.asname or "trainwright"] = alias.name
    for each in nodes(path, ast.ImportFrom):
        if (each.module or "").split(".")[0] == "trainwright":
            found.update({alias.asname or alias.name: f"{each.module}.{alias.name}" for alias in each.names})
    return found
