"""The house plan: which room may import which, held for every file, function bodies included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "trainwright"

MAY_IMPORT: dict[str, set[str]] = {
    "recipe": set(),
    "runlog": set(),
    "plan": {"recipe"},
    "world": {"plan"},
    "state": {"world"},
    "models": set(),
    "data": set(),
    "build": {"recipe", "plan", "world", "state", "models", "data"},
    "engine": {"state", "world"},
    "forecast": {"build", "engine", "plan", "recipe", "models", "state", "world"},
    "observe": {"engine", "state", "world", "runlog"},
    "recorder": {"engine", "state", "world", "runlog"},
    "replay": {"recorder", "engine", "state", "world", "runlog", "build"},
    "doctor": {"recipe", "plan", "runlog"},
    "report": {"plan", "runlog", "doctor"},
    "watching": {"recorder", "replay", "doctor", "report", "runlog", "observe", "engine", "state"},
    "adapters": {"watching", "runlog"},
}
MAY_IMPORT["training"] = {*MAY_IMPORT}
MAY_IMPORT["verbs"] = {*MAY_IMPORT}
MAY_IMPORT["cli"] = {*MAY_IMPORT}
ROOT = {"__init__", "__main__", "version", "errors"}
"""The files that lie in the root. Every room may import ``errors`` and ``version``."""
WITHOUT_TORCH = {"errors", "version", "recipe", "runlog", "plan", "doctor", "report", "cli", "__init__"}


def files() -> list[Path]:
    return sorted(HOUSE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports(path: Path, *, at_module: bool = False) -> set[str]:
    """Dotted names that a file imports; ``at_module`` leaves out function bodies and TYPE_CHECKING blocks."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_module and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if at_module and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if path.parent == HOUSE:
        return
    assert room in MAY_IMPORT, f"{room} is no room of the house: draw it into the plan first"
    allowed = MAY_IMPORT[room] | {room, "errors", "version"}
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("trainwright.")}
    assert ours <= allowed, f"{path.name} reaches into {sorted(ours - allowed)}; {room} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", [p for p in files() if room_of(p) in WITHOUT_TORCH], ids=lambda path: path.name)
def test_rooms_that_load_without_torch(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(path, at_module=True)} & {"torch", "transformers", "sklearn"}
    assert not heavy, f"{path} imports {heavy} when it is loaded"


def test_the_table_finds_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HOUSE", tmp_path)
    (tmp_path / "engine").mkdir()
    breach = tmp_path / "engine" / "step.py"
    breach.write_text("def f():\n    from trainwright.recipe import load\n")
    with pytest.raises(AssertionError, match="reaches into"):
        test_imports_go_one_way(breach)


def test_every_room_of_the_table_exists() -> None:
    rooms = {room_of(path) for path in files()}
    assert set(MAY_IMPORT) - rooms == set(), "a room of the table is missing"
