"""Provenance from real git trees, and from places where there is nothing to know."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import linecache
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainwright.runs.provenance import _name_and_version, environment, module_of, modules_of, provenance, sources


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def state_of(folder: Path) -> Any:
    return provenance(data_fingerprints={}, seeds={}, command=[], folder=folder)["git"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_tree(tree: Path) -> None:
    assert state_of(tree) == {"commit": git(tree, "rev-parse", "HEAD"), "dirty": False, "diff_sha256": None}


def test_uncommitted_changes_have_a_hash_of_their_own(tree: Path) -> None:
    hashes = []
    for text in ("lr = 2\n", "lr = 3\n"):
        (tree / "train.py").write_text(text)
        assert state_of(tree)["dirty"] is True
        hashes.append(state_of(tree)["diff_sha256"])
    assert len(set(hashes)) == 2
    assert None not in hashes


def test_an_untracked_file_makes_it_dirty(tree: Path) -> None:
    (tree / "new.py").touch()
    assert state_of(tree)["dirty"] is True


def test_a_tree_without_commits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert state_of(tmp_path) == {"commit": None, "dirty": False, "diff_sha256": None}


COMMANDS = {  # settings that name a program
    "core.fsmonitor": "touch {}/fsmonitor; false",
    "diff.external": "touch {}/external",
    "diff.mine.command": "touch {}/driver",
    "diff.mine.textconv": "touch {}/textconv; cat",
    "filter.mine.clean": "touch {}/clean; cat",
    "core.sshCommand": "touch {}/ssh; false",
    "core.pager": "touch {}/pager; cat",
}


def plant(tree: Path, ran: Path, commands: dict[str, str]) -> None:
    """Configures the repository so that looking at it runs ``commands``, each of which leaves a file in ``ran``."""
    ran.mkdir()
    (tree / ".gitattributes").write_text("* diff=mine filter=mine\n")
    hook = tree / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {ran}/hook\n")
    hook.chmod(0o755)
    for key, command in commands.items():
        git(tree, "config", key, command.format(ran))
    (tree / "train.py").write_text("lr = 2\n")


def test_nothing_runs_that_a_repository_names(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path_factory.mktemp("elsewhere") / "ran"
    plant(tree, ran, COMMANDS)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {ran}/variable")
    commit = git(tree, "rev-parse", "HEAD")
    assert state_of(tree) == {"commit": commit, "dirty": None, "diff_sha256": None}  # a filter: git would run it
    assert list(ran.iterdir()) == []
    git(tree, "status")
    git(tree, "diff", "--ext-diff")
    assert {"fsmonitor", "clean", "hook"} < {each.name for each in ran.iterdir()}  # those would have run


def test_a_repository_without_filters_is_looked_at_all_the_same(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ran = tmp_path_factory.mktemp("elsewhere") / "ran"
    plant(tree, ran, {key: value for key, value in COMMANDS.items() if not key.startswith("filter")})
    state = state_of(tree)
    assert state["dirty"] is True and len(state["diff_sha256"]) == 64
    assert list(ran.iterdir()) == []


def test_nothing_runs_that_a_submodule_names(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    ran, inner = tmp_path_factory.mktemp("elsewhere") / "ran", tmp_path_factory.mktemp("inner")
    git(inner, "init", "-q")
    (inner / "train.py").write_text("lr = 1\n")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "first")
    git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    git(tree, "commit", "-q", "-m", "second")
    clean = state_of(tree)
    git(tree / "sub", "config", "core.fsmonitor", f"mkdir -p {ran}; touch {ran}/fsmonitor; false")
    git(tree / "sub", "config", "filter.mine.clean", f"mkdir -p {ran}; touch {ran}/clean; cat")
    (tree / "sub" / ".gitattributes").write_text("* filter=mine\n")
    (tree / "sub" / "train.py").write_text("lr = 3\n")
    assert state_of(tree) == clean
    assert not ran.exists()
    git(tree, "status")
    assert ran.exists()


def test_nothing_is_fetched_for_a_clone_that_lacks_objects(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """git asks the remote of a partial clone by itself, and the address of a remote may be a command."""
    ran = tmp_path_factory.mktemp("elsewhere")
    blob = git(tree, "rev-parse", "HEAD:train.py")
    (tree / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (tree / "train.py").write_text("lr = 2\n")
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "protocol.ext.allow": "always",
    }
    settings |= {"remote.origin.promisor": "true", "remote.origin.url": f"ext::touch {ran}/fetched"}
    for key, value in settings.items():
        git(tree, "config", key, value)
    assert state_of(tree)["dirty"] is True
    assert list(ran.iterdir()) == []
    subprocess.run(["git", "diff", "HEAD"], cwd=tree, capture_output=True, check=False)
    assert [each.name for each in ran.iterdir()] == ["fetched"]


def test_the_repository_is_the_one_around_the_folder(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that a git hook of another repository has started."""
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    here = state_of(tree)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert state_of(tree) == here
    assert here["commit"] is not None


def test_no_git_tree_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state_of(tmp_path) is None


def test_the_whole_is_json_and_names_what_matters(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"data_fingerprints": {"train": "sha256:1"}, "seeds": {"model": 1}, "command": ("a", "b")}
    whole: Any = provenance(**facts, folder=tmp_path)
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    assert whole["packages"]["versions"]["torch"].startswith("2.")
    assert len(whole["packages"]["sha256"]) == 64
    assert (whole["data"], whole["seeds"], whole["command"]) == (
        {"train": "sha256:1"},
        {"model": 1},
        ["a", "b"],
    )


def test_environment_leaves_out_secrets_and_what_does_not_matter() -> None:
    wanted = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "8",
        "NCCL_DEBUG": "INFO",
        "PYTORCH_ALLOC_CONF": "x",
    }
    secret = {
        "TORCH_TOKEN": "s",
        "NCCL_API_KEY": "s",
        "HF_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "CUDA_PASSWORD": "s",
    }
    assert environment({**wanted, **secret, "HOME": "/root", "RANKING": "1"}) == wanted


def test_the_modules_of_a_recipe() -> None:
    recipe = {
        "name": "run",
        "model": {"use": "mine.nets:Net", "args": {"use": "no:part", "inner": {"use": "none:either"}}, "lora": None},
        "data": {"train": {"use": "mine.data:train"}, "val": {"use": "mine.data:Sets.val"}, "workers": 2},
        "loss": {"use": "live:my_loss"},
        "optimizer": {"use": "adamw"},
    }
    assert modules_of(recipe) == ["mine.data", "mine.nets"]


def test_sources_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a_net_of_mine.py"
    file.write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("a_net_of_mine")
    asked = ["a_net_of_mine", "itertools", "never.imported", "trainwright.models.gpt", "__main__"]
    expected = hashlib.sha256(b"WIDTH = 1\n").hexdigest()
    found = provenance(data_fingerprints={}, seeds={}, command=[], folder=tmp_path, modules=asked)
    assert found["sources"] == {"a_net_of_mine": expected, "itertools": None, "never.imported": None}
    file.unlink()
    assert sources(["a_net_of_mine"]) == {"a_net_of_mine": None}
    del sys.modules["a_net_of_mine"]


LIVE = """\
import torch, torch.nn.functional as F
class Base(torch.nn.Module):
    def forward(self, x):
        return self.fc(x)
class Net(Base):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
def by_hand(output, target): return (output - target).abs().mean()
class Loss:
    def __call__(self, output, target): return 0
    def method(self, output, target): return 1
by_name = lambda output, target: output.mean()
def fit(loss, resume): return loss
inline = fit(lambda output, target: 1.0, resume="runs/a")
"""
NAMES = ("Net()", "by_hand", "Loss()", "Loss().method", "by_name", "inline", "Loss")


def texts(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str | None]]:
    """The sources of each of NAMES in a script of this text, as a process that was just started sees them."""
    (folder / "a_script.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("a_script", None)
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # one that is as old as an edit would be taken for it
    script = importlib.import_module("a_script")
    return {name: sources([], [eval(name, vars(script))]) for name in NAMES}


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        (("runs/a", "runs/another"), set()),
        (("import torch,", "import os\nimport torch,"), set()),
        (("self.fc(x)", "-self.fc(x)"), {"Net()"}),
        (("Linear(2, 2)", "Linear(2, 2, False)"), {"Net()"}),
        ((".abs()", ".square()"), {"by_hand"}),
        (("return 0", "return 9"), {"Loss()", "Loss().method", "Loss"}),
        (("output.mean()", "output.sum()"), {"by_name"}),
        ((": 1.0", ": 2.0"), {"inline"}),
    ],
)
def test_what_trains_is_told_from_what_starts_it(
    edit: tuple[str, str], changes: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = texts(LIVE, tmp_path, monkeypatch)
    assert all(found and None not in found.values() for found in before.values())
    assert set(before["Net()"]) == {"a_script.Net", "a_script.Base"}
    after = texts(LIVE.replace(*edit), tmp_path, monkeypatch)
    assert {name for name in NAMES if before[name] != after[name]} == changes
    assert [set(found) for found in before.values()] == [set(found) for found in after.values()]


def test_the_source_of_live_objects_where_there_is_little_to_know(tmp_path: Path) -> None:
    import torch

    assert sources([], [torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, torch.dist, print, [], 3]) == {}
    assert module_of(torch.dist) is None
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec("class Net: ...\ndef loss(): ...", typed)
    found = sources([], [typed["Net"](), typed["loss"], partial(partial(typed["loss"], 1), 2)])
    assert found == {"__main__.Net": None, "__main__.loss": None}
    nowhere: dict[str, Any] = {}
    exec("def loss(): ...", nowhere)
    assert list(sources([], [nowhere["loss"]]).values()) == [None]


def test_a_class_that_was_typed_into_a_notebook() -> None:
    found = []
    for cell in ("class Net:\n    def forward(self): return 1\n", "class Net:\n    def forward(self): return 2\n"):
        typed: dict[str, Any] = {"__name__": "a_notebook"}
        linecache.cache["<cell>"] = len(cell), None, cell.splitlines(keepends=True), "<cell>"
        exec(compile(cell, "<cell>", "exec"), typed)
        found.append(sources([], [typed["Net"]()])["a_notebook.Net"])
    assert None not in found and found[0] != found[1]


def test_a_file_that_is_hashed_whole_speaks_for_its_classes() -> None:
    class Here: ...

    assert module_of(Here()) == __name__
    assert list(sources([__name__], [Here()])) == [__name__]


def test_names_and_versions_of_packages_are_those_of_their_metadata() -> None:
    installed = list(importlib.metadata.distributions())
    assert len(installed) > 5
    assert [_name_and_version(dist) for dist in installed] == [
        (dist.metadata["Name"], dist.version) for dist in installed
    ]
