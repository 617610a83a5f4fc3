"""A model that lets packed samples see each other, or ignores their positions, is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.finetune.tiny import VOCAB, llama, supervised
from trainwright.data.padding import TokenRows
from trainwright.errors import RecipeError
from trainwright.finetune.isolation import compare_alone
from trainwright.finetune.packing import Packed


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Faulty(nn.Module):
    """A model of one layer: with positions from ``position_ids`` or from the place, and a mean over tokens so far."""

    def __init__(self, *, positions: bool, isolated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.isolated = positions, isolated
        self.embed, self.place, self.head = nn.Embedding(VOCAB, 8), nn.Embedding(512, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> Output:
        here_BT = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        positions_BT = here_BT if position_ids is None or not self.positions else position_ids
        x_BTD = self.embed(input_ids) + self.place(positions_BT)
        begins_BT = (here_BT if position_ids is None else position_ids) == 0
        sample_BT = begins_BT.cumsum(1) if self.isolated else torch.zeros_like(input_ids)
        sees_BTT = (sample_BT[:, :, None] == sample_BT[:, None, :]) & (here_BT[:, :, None] >= here_BT[:, None, :])
        return Output(self.head(sees_BTT.float() @ x_BTD / sees_BTT.sum(-1, keepdim=True)))


class WithoutPositions(nn.Module):
    def forward(self, input_ids: Tensor) -> Output:
        return Output(torch.zeros(*input_ids.shape, VOCAB))


def batches() -> list[dict[str, Any]]:
    return [TokenRows()([*Packed(supervised(), 40)]), TokenRows(padding_free=True)(supervised())]


@pytest.mark.parametrize("at", [0, 1], ids=["packed", "padding_free"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama_is_isolated(at: int, dtype: torch.dtype) -> None:
    found = compare_alone(llama().to(dtype), batches()[at])
    assert found.reason == "" and found.samples == 16 and found.exit_code == 0


@pytest.mark.parametrize("at", [0, 1], ids=["packed", "padding_free"])
def test_faults_are_told_apart(at: int) -> None:
    batch = batches()[at]
    assert compare_alone(Faulty(positions=True, isolated=True), batch).reason == ""
    leaks = compare_alone(Faulty(positions=True, isolated=False), batch)
    assert "see the tokens of other samples" in leaks.reason and leaks.exit_code == 1
    assert "ignores position_ids" in compare_alone(Faulty(positions=False, isolated=True), batch).reason
    assert "takes no position_ids" in compare_alone(WithoutPositions(), batch).reason


def test_a_label_across_samples_is_found() -> None:
    data = Packed(supervised(), 40)
    rows = [data[row] for row in range(len(data))]
    for row in rows:
        begins = row["position_ids"] == 0
        row["labels"][begins] = row["input_ids"][begins]
    assert "first token of the next sample" in compare_alone(llama(), TokenRows()(rows)).reason


@pytest.mark.parametrize("cached", [True, False])
def test_keys_and_values_that_a_model_keeps_do_not_join_samples(cached: bool) -> None:
    # transformers looks for packed samples only where no cache is used, which is not the default of a loaded model
    model = llama()
    model.config.use_cache = cached
    assert compare_alone(model, batches()[0]).reason == ""


def test_the_number_of_tokens_is_limited() -> None:
    packed, free = batches()
    assert compare_alone(llama(), packed, max_tokens=1).rows == 1
    assert compare_alone(llama(), free, max_tokens=1).samples == 2


def test_mode_and_random_state_stay() -> None:
    model, before = llama().train(), torch.get_rng_state()
    compare_alone(model, batches()[0])
    assert model.training and torch.get_rng_state().equal(before)


def test_nothing_shares_a_row() -> None:
    assert compare_alone(llama(), TokenRows()(supervised())).lines()[0].startswith("nothing to compare")


def test_a_run_refuses_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Faulty(positions=True, isolated=False)
    with pytest.raises(RecipeError, match="lets a sample see the tokens of other samples") as caught:
        tw.fit(
            model, supervised(), "hf_causal_lm", batch=4, steps=1, quiet=True, settings={"data.packing": "padding_free"}
        )
    assert caught.value.problems[0].path == "data.packing"
    assert not (tmp_path / "runs").exists()
