"""The copy that a save is written from."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.checkpoint.checkpoint import capture, tensors_of
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.staging import Staging, num_bytes, on_host
from trainwright.checkpoint.train_state import TrainState


def test_an_update_after_it_changes_nothing_of_the_copy() -> None:
    live = {"w": torch.randn(5, 7), "view": torch.randn(6, 4).t(), "n": torch.tensor(3), "empty": torch.empty(0, 2)}
    before = {name: tensor.clone() for name, tensor in live.items()}
    copies = Staging().copy(live)
    for tensor in live.values():
        tensor.add_(1)
    assert all(same_bits(copies[name], before[name]) for name in live)
    assert all(copy.is_contiguous() for copy in copies.values())


def test_the_memory_is_kept_from_save_to_save() -> None:
    staging = Staging()
    live = {"w": torch.randn(5, 7), "b": torch.randn(3)}
    staging.reserve(live)
    places = {name: copy.data_ptr() for name, copy in staging.copy(live).items()}
    assert {name: copy.data_ptr() for name, copy in staging.copy(live).items()} == places
    grown = {"w": torch.randn(9, 7), "b": live["b"]}  # an optimizer may replace its state by another shape
    copies = staging.copy(grown)
    assert copies["b"].data_ptr() == places["b"] and torch.equal(copies["w"], grown["w"])
    assert set(staging.copy({"b": live["b"]})) == {"b"}


def test_without_a_copy_only_what_no_file_could_take_is_copied() -> None:
    whole = torch.randn(10)
    live = {"own": torch.randn(4), "part": whole[:5], "other part": whole[5:], "turned": torch.randn(3, 2).t()}
    hosted = on_host(live)
    assert hosted["own"].data_ptr() == live["own"].data_ptr()
    assert all(torch.equal(hosted[name], live[name]) for name in live)
    assert len({each.untyped_storage().data_ptr() for each in hosted.values()}) == 4


def test_a_snapshot_has_a_copy_of_everything() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(4, 3)).sum().backward()
    state.optimizer.step()
    snapshot = capture(state, Staging())
    live = tensors_of(state)
    assert set(snapshot.tensors) == set(live)
    assert num_bytes(snapshot.tensors) == num_bytes(live)
    pointers = {tensor.data_ptr() for tensor in live.values()}
    assert not pointers & {tensor.data_ptr() for tensor in snapshot.tensors.values()}
