"""A checkpoint made to harm: sums that fit, and a content that would execute code were it ever unpickled."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainwright.checkpoint.checkpoint import load_checkpoint, mismatches, read_run_metadata, save_checkpoint
from trainwright.checkpoint.manifest import file_entry, verify, write_manifest
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import read_weights
from trainwright.errors import CheckpointError


class Touches:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.file,)  # type: ignore[return-value]


def fresh() -> TrainState:
    model = nn.Linear(3, 3)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=4)


PAPERS: dict[str, dict[str, object]] = {"recipe": {}, "plan": {}, "provenance": {}}


@pytest.mark.parametrize("file", ["model.safetensors", "rest.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["pickle", "torch.save", "both"])
def test_a_pickle_is_refused_and_not_executed(tmp_path: Path, file: str, how: str) -> None:
    harm = tmp_path / "harm"
    path, _ = save_checkpoint(fresh(), tmp_path, PAPERS)
    if how == "pickle":
        (path / file).write_bytes(pickle.dumps(Touches(harm)))
    else:
        torch.save({"weight": Touches(harm)}, path / file)
    if how == "both":  # and one that lies beside what is read
        torch.save(Touches(harm), path / "model.pt")
    (path / "manifest.json").unlink()
    write_manifest(path, 4)
    verify(path)
    for read in (lambda: load_checkpoint(fresh(), path), lambda: _all_readers(path)):
        with pytest.raises(CheckpointError, match="no checkpoint of Trainwright") as caught:
            read()
        assert caught.value.remedy
    assert not harm.exists()
    pickle.loads(pickle.dumps(Touches(harm)))
    assert harm.exists(), "the trap works"


def _all_readers(path: Path) -> None:
    read_run_metadata(path)
    mismatches(fresh(), path)
    read_weights(path, average=True)
    raise CheckpointError("it was read: no checkpoint of Trainwright")


@pytest.mark.parametrize(
    "state", [[], {}, {"model": {"weight": {"__tensor__": "nowhere"}}, "rest": {}}, {"model": {}, "rest": []}, 5, None]
)
def test_a_state_that_says_nothing(tmp_path: Path, state: object) -> None:
    path, _ = save_checkpoint(fresh(), tmp_path, PAPERS)
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").unlink()
    write_manifest(path, 4)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(fresh(), path)
    assert caught.value.remedy


def test_only_files_of_the_manifest_are_opened(tmp_path: Path) -> None:
    """Others were not verified, and may be links, pipes or devices."""
    path, _ = save_checkpoint(fresh(), tmp_path, PAPERS)
    before = read_weights(path)["weight"].clone()
    os.mkfifo(path / "pipe.safetensors")
    (path / "shards.json").write_text("{}")
    save_file({"weight": torch.full((3, 3), 7.0)}, path / "frozen.safetensors")
    assert torch.equal(read_weights(path)["weight"], before)
    (path / "frozen.safetensors").unlink()
    for file in ("pipe.safetensors", "..", "../other.safetensors"):
        forge_shards(path, [{"file": file, "offset": [0, 0], "shape": [3, 3]}])
        with pytest.raises(CheckpointError, match="is not in the manifest"):
            read_weights(path)


@pytest.mark.parametrize("size", [1, 2])
def test_a_part_is_not_spread_over_more_than_its_file_holds(tmp_path: Path, size: int) -> None:
    path, _ = save_checkpoint(fresh(), tmp_path, PAPERS)
    save_file({"weight": torch.ones(size, 3), "bias": torch.ones(3)}, path / "part.safetensors")
    forge_shards(path, [{"file": "part.safetensors", "offset": [0, 0], "shape": [3, 3]}])
    with pytest.raises(CheckpointError, match="no checkpoint of Trainwright"):
        read_weights(path)


@pytest.mark.parametrize("begins", [(0, 0), (0, 1), (1, 1)])
def test_parts_do_not_overlap(tmp_path: Path, begins: tuple[int, int]) -> None:
    """Else the rest of the tensor would be memory that nobody has written."""
    path, _ = save_checkpoint(fresh(), tmp_path, PAPERS)
    save_file({"weight": torch.ones(1, 3), "bias": torch.ones(3)}, path / "one.safetensors")
    save_file({"weight": torch.ones(2, 3)}, path / "two.safetensors")
    first, second = ({"offset": [begin, 0], "shape": [rows, 3]} for begin, rows in zip(begins, (1, 2)))
    forge_shards(path, [{"file": "one.safetensors", **first}, {"file": "two.safetensors", **second}])
    if begins == (0, 1):
        assert torch.equal(read_weights(path)["weight"], torch.ones(3, 3))
        return
    with pytest.raises(CheckpointError, match="no checkpoint of Trainwright"):
        read_weights(path)


def forge_shards(path: Path, parts: list[dict[str, object]]) -> None:
    """Make the checkpoint one that ranks wrote, with these parts of the weight."""
    listed = ("model.safetensors", "rest.safetensors", "one.safetensors", "two.safetensors", "part.safetensors")
    for name in ("shards.json", "manifest.json"):
        (path / name).unlink(missing_ok=True)
    there = next((name for name in ("one.safetensors", "part.safetensors") if (path / name).exists()), listed[0])
    bias = {"dtype": "float32", "shape": [3], "parts": [{"file": there, "offset": [0], "shape": [3]}]}
    weight = {"dtype": "float32", "shape": [3, 3], "parts": parts}
    (path / "shards.json").write_text(json.dumps({"model": {"weight": weight, "bias": bias}, "rest": {}}))
    held = {name: file_entry(path / name) for name in listed if (path / name).exists()}
    pipe = path / "pipe.safetensors"
    is_there = pipe.exists()
    pipe.unlink(missing_ok=True)
    write_manifest(path, 4, durable=held)
    if is_there:
        os.mkfifo(pipe)
