"""Faults of a checkpoint while it is written and on the disk."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW

from tests.disks import small_disk
from trainwright.checkpoint.checkpoint import capture, commit, load_checkpoint, read_run_metadata, save_checkpoint
from trainwright.checkpoint.cursor import Cursor
from trainwright.checkpoint.ledger import SkippedStep
from trainwright.checkpoint.manifest import verify, write_manifest
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.store import newest_valid
from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import CheckpointError, StorageError


def state_at(step: int, width: int = 4) -> TrainState:
    model = nn.Linear(width, width)
    nn.init.constant_(model.weight, float(step))
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, step=step, data=Cursor(1, step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    state = state_at(400)
    path, num_bytes = save_checkpoint(state, tmp_path / "new" / "checkpoints")
    assert path == tmp_path / "new" / "checkpoints" / "step-00000400"
    assert names(path) == ["manifest.json", "model.safetensors", "rest.safetensors", "state.json"]
    assert num_bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    weights = load_file(path / "model.safetensors")  # under the model's own names: other tools can read it
    assert weights.keys() == state.model.state_dict().keys()
    assert torch.equal(weights["weight"], state.model.weight)  # type: ignore[arg-type]


def test_counters_cursor_scaler_and_ledger_come_back(tmp_path: Path) -> None:
    state = state_at(3)
    state.scaler = LossScaler()
    state.scaler.scale.fill_(512.0)
    state.scaler.clean_steps.fill_(17)
    state.num_samples, state.num_tokens, state.elapsed_s, state.fraction = 5, 2**40, 0.1, 1 / 3
    entry = SkippedStep(2, "why", float("nan"), float("inf"), 1, (4, 5), 1024.0)
    state.ledger.entries.append(entry)
    save_checkpoint(state, tmp_path)
    loaded = state_at(0)
    loaded.scaler = LossScaler()
    load_checkpoint(loaded, tmp_path / "step-00000003")
    assert (loaded.step, loaded.num_samples, loaded.num_tokens) == (3, 5, 2**40)
    assert (loaded.elapsed_s, loaded.fraction, loaded.data) == (0.1, 1 / 3, Cursor(1, 3))
    assert loaded.scaler.state_dict() == {"scale": 512.0, "clean_steps": 17}
    assert repr(loaded.ledger.entries) == repr([entry])


def test_extra_state_of_a_module_comes_back(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        seen: object = None

        def get_extra_state(self) -> object:
            return {"scales": torch.arange(3.0), "count": 7}

        def set_extra_state(self, state: object) -> None:
            self.seen = state

    model = Extra(2, 2)
    state = TrainState(model, SGD(model.parameters(), lr=0.1))
    path, _ = save_checkpoint(state, tmp_path)
    load_checkpoint(state, path)
    assert isinstance(model.seen, dict)
    assert model.seen["count"] == 7
    assert torch.equal(model.seen["scales"], torch.arange(3.0))


def test_killed_between_the_two_renames_the_replaced_one_is_still_found(tmp_path: Path) -> None:
    path, _ = save_checkpoint(state_at(5), tmp_path)
    path.rename(tmp_path / "step-00000005.old")  # where the second rename would have followed
    found, broken = newest_valid(tmp_path)
    assert found is not None
    assert broken == []
    load_checkpoint(state_at(0), found)
    save_checkpoint(state_at(5), tmp_path)
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("file", ["model.safetensors", "rest.safetensors", "state.json", "manifest.json"])
def test_one_flipped_byte_is_found_and_stepped_over(tmp_path: Path, file: str) -> None:
    save_checkpoint(state_at(1), tmp_path)
    newest, _ = save_checkpoint(state_at(2), tmp_path)
    whole = (newest / file).read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(len(whole), size=40, replace=False):
        torn = bytearray(whole)
        torn[at] ^= 1 << int(rng.integers(8))
        (newest / file).write_bytes(bytes(torn))
        found, broken = newest_valid(tmp_path)
        assert found == tmp_path / "step-00000001"
        assert len(broken) == 1
        assert str(newest) in broken[0]
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(state_at(0), newest)
        assert caught.value.remedy


def test_a_newer_format_is_told_from_damage_and_no_older_checkpoint_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(state_at(1), tmp_path)
    path, _ = save_checkpoint(state_at(2), tmp_path)
    monkeypatch.setattr("trainwright.checkpoint.manifest.FORMAT", 99)
    write_manifest(path, 2)
    monkeypatch.undo()
    for read in (lambda: verify(path), lambda: newest_valid(tmp_path)):
        with pytest.raises(CheckpointError, match="format 99") as caught:
            read()
        assert "the version of Trainwright that wrote it" in caught.value.remedy
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 98}))
    assert newest_valid(tmp_path)[0] == tmp_path / "step-00000001", "a flipped bit is damage"


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    """A new folder of a user who is not root, as whom the test runs: root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        root = not os.geteuid()
        if root:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder) / "checkpoints"
        finally:
            if root:
                os.seteuid(0)


@pytest.mark.parametrize("name", [".", "step-00000002", "step-00000002/manifest.json", "step-00000002/state.json"])
def test_what_may_not_be_read_is_not_taken_for_missing(folder_of_nobody: Path, name: str) -> None:
    save_checkpoint(state_at(1), folder_of_nobody)
    save_checkpoint(state_at(2), folder_of_nobody)
    (folder_of_nobody / name).chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        newest_valid(folder_of_nobody)
    (folder_of_nobody / name).chmod(0o700)
    assert "chmod -R u+rwX" in caught.value.remedy


def test_a_checkpoint_of_another_model_or_optimizer_says_so(tmp_path: Path) -> None:
    path, _ = save_checkpoint(state_at(1), tmp_path)
    two_groups = state_at(1)
    model = two_groups.model
    two_groups.optimizer = SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    for other in (state_at(1, width=5), two_groups):
        with pytest.raises(CheckpointError, match="does not fit") as caught:
            load_checkpoint(other, path)
        assert "recipe" in caught.value.remedy


def test_what_a_killed_save_left_is_swept(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000009.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert newest_valid(tmp_path) == newest_valid(tmp_path / "none") == (None, [])
    save_checkpoint(state_at(1), tmp_path)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("name", ["step-00000001", "step-00000001.old"])
@pytest.mark.parametrize("what", ["folder", "another run's", "damaged", "link"])
def test_what_is_not_of_this_run_is_not_replaced(tmp_path: Path, name: str, what: str) -> None:
    there = tmp_path / name
    if what == "link":
        (tmp_path / "theirs").mkdir()
        there.symlink_to("theirs")
    elif what == "folder":
        there.mkdir()
    else:
        commit(capture(state_at(1)), tmp_path, run="b" * 16 if what == "another run's" else "a" * 16)
        (tmp_path / "step-00000001").rename(there)
    if what == "damaged":
        (there / "manifest.json").write_text("torn")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=f"{name} is in the way: it is no checkpoint of this run") as caught:
        commit(capture(state_at(1)), tmp_path, run="a" * 16)
    assert "move it away" in caught.value.remedy and sorted(path for path in tmp_path.rglob("*")) == before


def test_a_checkpoint_of_this_run_is_replaced(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        state = state_at(1)
        torch.nn.init.constant_(state.model.weight, value)  # type: ignore[arg-type]
        path, _ = commit(capture(state), tmp_path, run="a" * 16)
    assert names(tmp_path) == ["step-00000001"]
    assert load_file(path / "model.safetensors")["weight"].unique().tolist() == [2.0]


def assert_fails_and_keeps_the_older(folder: Path, big: TrainState) -> None:
    with pytest.raises(StorageError, match=r"could not be written|disk of .* has") as caught:
        save_checkpoint(big, folder)
    assert "older checkpoints" in caught.value.remedy and "are intact" in caught.value.remedy
    assert names(folder) == ["step-00000001"]  # nothing half-written stays behind
    assert newest_valid(folder) == (folder / "step-00000001", [])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 100, 10_000, 300_000])
def test_a_file_that_cannot_be_written(tmp_path: Path, num_bytes: int) -> None:
    save_checkpoint(state_at(1), tmp_path)
    big = state_at(2, width=300)
    with largest_file(num_bytes):
        assert_fails_and_keeps_the_older(tmp_path, big)
    save_checkpoint(big, tmp_path)
    assert newest_valid(tmp_path) == (tmp_path / "step-00000002", [])


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m"):
        folder = tmp_path / "disk" / "checkpoints"
        save_checkpoint(state_at(1), folder)
        assert_fails_and_keeps_the_older(folder, state_at(2, width=600))
        filler = tmp_path / "disk" / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        assert_fails_and_keeps_the_older(folder, state_at(2))
        filler.unlink()
        save_checkpoint(state_at(2), folder)
        assert newest_valid(folder) == (folder / "step-00000002", [])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not be written"):
        save_checkpoint(state_at(1), tmp_path / "file" / "checkpoints")


def test_the_metadata_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    metadata = {"recipe": {"seed": 1}, "plan": {}, "provenance": {}}
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"model": {}, "papers": metadata}))
    assert read_run_metadata(folder) == metadata
