"""A checkpoint made to harm: sums that fit, and a content that would execute code were it ever unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.checkpoint.checkpoint import load_checkpoint, mismatches, read_run_metadata, save_checkpoint
from trainwright.checkpoint.manifest import verify, write_manifest
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


PAPERS = {"recipe": {}, "plan": {}, "provenance": {}}


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
