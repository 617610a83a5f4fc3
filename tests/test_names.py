"""One name, one thing: classes are defined once, and nobody replaces what belongs to another module of ours."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.house import HOUSE, files, modules, nodes, own_names, shown, tree

pytestmark = pytest.mark.slow  # the first of them parses every file


def test_a_public_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in files():
        for node in nodes(path, ast.ClassDef):
            if not node.name.startswith("_") and "templates" not in path.parts:  # those are of other people's projects
                places[node.name].append(shown(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_room_for_leftovers() -> None:
    names = {path.stem for path in files()} | {path.parent.name for path in files()}
    assert not names & {"utils", "util", "helpers", "misc", "common"}
    classes = [node.name for path in files() for node in nodes(path, ast.ClassDef)]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Utils"))]


def test_every_file_says_what_it_is_for() -> None:
    checks = HOUSE / "doctor" / "checks", HOUSE / "doctor" / "contrib"  # the function of a check says it
    others = [path for path in files() if not any(path.is_relative_to(each) for each in checks)]
    assert [shown(path) for path in others if not ast.get_docstring(tree(path))] == []


REPLACING = (ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign, ast.Call, ast.Tuple, ast.List)


def patches(path: Path) -> Iterator[str]:
    """Where a file replaces an attribute of something of ours that it imported.

    That is an assignment to or a deletion of ``imported.name``; ``setattr`` of it, be it called or handed on; and a
    row of a table that names it beside one of its attributes, for a ``setattr`` elsewhere.
    """
    own = own_names(path)

    def is_own(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in own

    for node in nodes(path, *REPLACING):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        found = any(isinstance(each, ast.Attribute) and is_own(each.value) for each in targets)
        if isinstance(node, ast.Call):
            called = [node.func, *node.args]
            sets = [isinstance(each, ast.Name) and each.id in ("setattr", "delattr") for each in called]
            found |= any(first and is_own(second) for first, second in zip(sets, called[1:]))
        if isinstance(node, ast.Tuple | ast.List) and len(node.elts) > 2:  # owner, name, what takes its place
            texts = [isinstance(each, ast.Constant) and isinstance(each.value, str) for each in node.elts]
            found |= any(is_own(first) and second for first, second in zip(node.elts, texts[1:]))
        if found:
            yield f"{shown(path)}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def test_no_file_patches_what_is_ours() -> None:
    assert [found for path in files() for found in patches(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "step.clear_grads = heard",
        "del step.clear_grads",
        "LossScaler.scaled += 1",
        "setattr(step, name, heard)",
        "undo.callback(setattr, LossScaler, name, heard)",
        "TABLE = ((torch.Tensor, 'backward', wrap), (LossScaler, 'scaled', wrap))",
    ],
)
def test_a_patch_is_found(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.ROOT", tmp_path)
    file = tmp_path / "hooks.py"
    file.write_text(
        f"from trainwright.engine import step\nfrom trainwright.checkpoint.scaler import LossScaler\n\n{code}\n"
        "setattr(torch.Tensor, 'backward', heard)\nself.step = step\nnames = ('a', 'b')\n"
    )
    (found,) = patches(file)
    assert found.startswith("hooks.py:4:")


def ours() -> dict[str, object]:
    """Every function and class of our loaded modules, and the attributes of those classes, by name."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "trainwright":
            continue
        for key, value in vars(module).items():
            if inspect.isfunction(value) or inspect.isclass(value):
                found[f"{name}.{key}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                found.update({f"{name}.{key}.{each}": it for each, it in vars(value).items() if callable(it)})
    return found


def test_a_watched_loop_finds_our_names_as_they_are() -> None:
    for name in modules():
        if not name.endswith("__main__") and "adapters" not in name:  # those load whole training libraries
            importlib.import_module(name)
    before = ours()
    assert len(before) > 2000
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.watch(model, optimizer, out=None, quiet=True):
        for _ in range(2):
            inside = ours()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [name for name, value in inside.items() if before.get(name, value) is not value] == []
    assert [name for name, value in ours().items() if before.get(name, value) is not value] == []
