"""The house plan: which room may import which, held for every file, function bodies included."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.house import HOUSE, TEMPLATES, files, imports, runtime_imports, shown

pytestmark = pytest.mark.slow  # the first of them parses every file


MAY_IMPORT: dict[str, set[str]] = {
    "runs": set(),
    "models": set(),
    "recipe": {"runs"},
    "trials": {"runs"},
    "plan": {"recipe"},
    "distributed": {"plan", "recipe"},
    "checkpoint": {"runs", "distributed"},
    "optim": {"recipe", "plan", "distributed", "checkpoint"},
    "data": {"recipe", "plan", "checkpoint"},
    "engine": {"runs", "checkpoint", "distributed", "optim"},
    "finetune": {"recipe", "runs", "distributed", "checkpoint", "data", "engine", "models"},
    "assembly": {"recipe", "plan", "distributed", "checkpoint", "models", "data", "optim", "finetune"},
    "plan/trace": {
        *("recipe", "plan", "distributed", "checkpoint", "models", "data", "optim", "engine", "assembly", "finetune"),
    },
    "monitoring": {"recipe", "runs", "distributed", "checkpoint", "engine"},
    "recorder": {"runs", "distributed", "checkpoint", "optim", "engine"},
    "replay": {"runs", "distributed", "checkpoint", "optim", "engine", "recorder"},
    "doctor": {"runs"},
    "doctor/measure": {"runs", "distributed", "checkpoint", "optim", "engine", "recorder", "replay", "doctor"},
    "report": {"recipe", "plan", "runs", "doctor"},
    "profiling": {"plan", "plan/trace", "runs"},
    "watching": {
        *("recipe", "runs", "checkpoint", "engine", "monitoring", "recorder", "replay", "doctor", "doctor/measure"),
        *("report", "profiling", "plan/trace"),
    },
    "adapters": {"runs", "watching"},
    "training": {
        *("recipe", "plan", "plan/trace", "models", "data", "optim", "assembly", "distributed", "engine", "checkpoint"),
        *("runs", "monitoring", "recorder", "watching", "report", "finetune"),
    },
    "commands": {
        *("recipe", "plan", "plan/trace", "models", "data", "optim", "assembly", "distributed", "engine", "checkpoint"),
        *(
            "runs",
            "monitoring",
            "recorder",
            "replay",
            "watching",
            "doctor",
            "doctor/measure",
            "report",
            "profiling",
            "training",
            "trials",
            "finetune",
        ),
    },
    "agent": {"recipe", "runs", "doctor", "report"},
    "cli": {"recipe", "plan", "runs", "monitoring", "doctor", "report", "training", "commands", "agent"},
}
ROOT = {"__init__", "__main__", "version", "errors"}
"""The files that lie in the root. Every room may import ``errors`` and ``version``."""
WITHOUT_TORCH = {
    "__init__",
    "errors",
    "version",
    "recipe",
    "runs",
    "plan",
    "doctor",
    "report",
    "cli",
    "trials",
    "agent",
}


def row_of(path: Path, house: Path = HOUSE) -> str:
    """The row of the table for a file: its room. What measures or traces has a row of its own."""
    return _row(path.relative_to(house).with_suffix("").parts)


def _row(parts: Sequence[str]) -> str:
    if parts[0] == "doctor" and not {"measure", "remedies", "remedy"}.isdisjoint(parts[1:3]):
        return "doctor/measure"
    return "plan/trace" if tuple(parts[:2]) == ("plan", "trace") else parts[0]


def breach(path: Path, house: Path = HOUSE) -> str | None:
    """Return the import that the room of a file may not have; None if there is none."""
    if path.parent == house:
        return None
    room = row_of(path, house)
    allowed = MAY_IMPORT[room] | {room, "errors", "version"}
    ours = {_row(name.split(".")[1:]) for name in imports(path) if name.startswith("trainwright.")}
    reached = sorted(ours - allowed)
    return f"{room}/{path.name} imports {reached}; {room} may import {sorted(allowed)}" if reached else None


def test_the_root_holds_four_files_and_each_folder_has_a_row() -> None:
    assert {path.stem for path in HOUSE.glob("*.py")} == ROOT
    folders = {row_of(path) for path in files() if path.parent != HOUSE}
    assert folders == set(MAY_IMPORT), "draw the room into the plan first; take out one that is gone"


def test_imports_go_one_way() -> None:
    found = {shown(path): found for path in files() if (found := breach(path))}
    assert found == {}


def test_the_tree_in_the_docs_lists_the_rooms() -> None:
    page = (HOUSE.parent / "docs/concepts/architecture.md").read_text()
    tree = page[page.index("```\ntrainwright/\n") :].removeprefix("```\ntrainwright/\n").split("```")[0]
    inside = [line.split()[0] for line in itertools.takewhile(lambda line: line.startswith("  "), tree.splitlines())]
    rooms = [*(room for room in MAY_IMPORT if "/" not in room), TEMPLATES.name]
    assert sorted(name for name in inside if name.endswith("/")) == sorted(f"{room}/" for room in rooms)
    assert {name.removesuffix(".py") for name in inside if not name.endswith("/")} <= ROOT


def test_rooms_that_load_without_torch() -> None:
    heavy = {"torch", "transformers", "sklearn"}
    loaded = {
        shown(path): {name.split(".")[0] for name in imports(path, at_module=True)} & heavy
        for path in files()
        if row_of(path) in WITHOUT_TORCH
    }
    assert {path: names for path, names in loaded.items() if names} == {}


def test_the_table_finds_a_breach(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    file = tmp_path / "engine" / "step.py"
    file.write_text("def f():\n    from trainwright.recipe import load\n")
    assert "imports ['recipe']" in (breach(file, tmp_path) or "")
    (tmp_path / "doctor" / "ranks").mkdir(parents=True)
    for name, found in (("check", True), ("measure", False)):
        file = tmp_path / "doctor" / "ranks" / f"{name}.py"
        file.write_text("from trainwright.recorder import hooks\n")
        assert (breach(file, tmp_path) is not None) == found
    for name, line, breached in (
        ("remedy", "from trainwright.watching import watch", "watching"),
        ("facts", "from trainwright.doctor.ranks.measure import replica", "doctor/measure"),
    ):
        file = tmp_path / "doctor" / "ranks" / f"{name}.py"
        file.write_text(f"{line}\n")
        assert f"imports ['{breached}']" in (breach(file, tmp_path) or "")


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, in order; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if found := visit(target, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_module_loads_itself_over_others() -> None:
    graph = runtime_imports()
    assert sum(map(len, graph.values())) > 500, "the graph is read"
    assert cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
