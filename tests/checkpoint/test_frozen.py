"""Frozen weights are one file on disk for all checkpoints of a run, and each checkpoint is complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.checkpoint.checkpoint import load_checkpoint, mismatches, save_checkpoint
from trainwright.checkpoint.manifest import verify
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import read_weights
from trainwright.errors import CheckpointError


class Adapted(nn.Module):
    """A large frozen layer with a statistic, and a small trained one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2)
        self.register_buffer("seen", torch.zeros(3))


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))


def saved(state: TrainState, folder: Path, step: int) -> Path:
    state.step = step
    return save_checkpoint(state, folder)[0]


def test_checkpoints_share_one_file(tmp_path: Path) -> None:
    state = state_of(Adapted())
    first, second = saved(state, tmp_path, 1), saved(state, tmp_path, 2)
    files = [each / "frozen.safetensors" for each in (first, second)]
    assert files[0].stat().st_ino == files[1].stat().st_ino and files[0].stat().st_nlink == 2
    assert (second / "model.safetensors").stat().st_size < files[0].stat().st_size / 4
    shutil.rmtree(first)
    verify(second)
    other = state_of(Adapted())
    with torch.no_grad():
        for each in other.model.parameters():
            each.zero_()
    assert mismatches(other, second) == []
    load_checkpoint(other, second)
    for name, each in state.model.state_dict().items():
        assert other.model.state_dict()[name].equal(each) and read_weights(second)[name].equal(each)


def test_frozen_weights_that_change_are_written_again(tmp_path: Path) -> None:
    state = state_of(Adapted())
    saved(state, tmp_path, 1)
    with torch.no_grad():
        state.model.base.weight.data[0, 0] += 1
    second = saved(state, tmp_path, 2)
    assert (second / "frozen.safetensors").stat().st_nlink == 1
    assert read_weights(second)["base.weight"].equal(state.model.base.weight)


def test_a_damaged_file_is_not_linked(tmp_path: Path) -> None:
    state = state_of(Adapted())
    first = saved(state, tmp_path, 1)
    with (first / "frozen.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\1" * 8)
    second = saved(state, tmp_path, 2)
    verify(second)
    with pytest.raises(CheckpointError, match=r"frozen.safetensors is damaged"):
        verify(first)


def test_without_links_the_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **options: object) -> None:
        raise PermissionError("the file system has no links")

    state = state_of(Adapted())
    saved(state, tmp_path, 1)
    monkeypatch.setattr("os.link", no_links)
    second = saved(state, tmp_path, 2)
    verify(second)
    assert (second / "frozen.safetensors").stat().st_nlink == 1


def test_a_model_that_is_trained_has_one_file_in_the_format_of_earlier_versions(tmp_path: Path) -> None:
    path = saved(state_of(Adapted().requires_grad_(True)), tmp_path, 1)
    assert not (path / "frozen.safetensors").exists()
    assert json.loads((path / "manifest.json").read_text())["format"] == 2
