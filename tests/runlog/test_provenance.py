"""Provenance from real git trees, and from places where there is nothing to know."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.runlog.provenance import environment, modules_of, provenance, sources


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


def test_no_git_tree_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state_of(tmp_path) is None


def test_the_whole_is_json_and_names_what_matters(tmp_path: Path) -> None:
    whole = provenance(data_fingerprints={"train": "sha256:1"}, seeds={"model": 1}, command=("a", "b"), folder=tmp_path)
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
