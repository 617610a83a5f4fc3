"""Packed and padding-free batches: bins, layouts, losses by hand, and runs that resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw
from tests.finetune.tiny import llama, supervised
from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.data.padding import TokenRows
from trainwright.data.unwrap import unwrap
from trainwright.engine.losses import hf_causal_lm
from trainwright.engine.token_batch import best_fit_decreasing, token_batch
from trainwright.errors import DataError, RecipeError, UsageError
from trainwright.finetune.packing import Packed, packed_rows

BFD = {"data.packing": {"by": "bfd", "max_length": 40}}
LAYOUTS = [{}, {"data.packing": "padding_free"}, BFD]


def batches() -> dict[str, Any]:
    data = supervised()
    return {
        "padded": TokenRows()(data),
        "padding_free": TokenRows(padding_free=True)(data),
        "packed": TokenRows()([*Packed(data, 40)]),
    }


def by_hand(model: Any, data: list[dict[str, Tensor]]) -> tuple[Tensor, int]:
    """The sum and number of labels, one sample at a time."""
    total, count = torch.zeros(()), 0
    for sample in data:
        logits_TV = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits_TV[:-1], sample["labels"][1:], reduction="sum", ignore_index=-100)
        count += int((sample["labels"][1:] != -100).sum())
    return total, count


@pytest.mark.parametrize("lengths", [[3, 9, 4, 6, 7, 1], [10, 10, 10], [1] * 25, [5, 0, 5, 6, 4], []])
def test_bins_hold_each_sample_once(lengths: list[int]) -> None:
    bins = best_fit_decreasing(lengths, 10)
    assert sorted(each for members in bins for each in members) == [i for i, n in enumerate(lengths) if n]
    assert all(sum(lengths[each] for each in members) <= 10 for members in bins)


def test_bins_are_the_best_fit() -> None:
    # 6 opens a bin, 5 another; 4 fits both and goes to the fuller one; 3 to the other
    assert best_fit_decreasing([3, 4, 5, 6], 10) == [[3, 1], [2, 0]]


def test_bins_equal_the_naive_search() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 51, (300,), generator=draw).tolist()
    rooms, bins = list[int](), list[list[int]]()
    for position in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= lengths[position]]
        if fitting:
            number = min(fitting)[1]
        else:
            number = len(bins)
            bins.append([])
            rooms.append(50)
        bins[number].append(position)
        rooms[number] -= lengths[position]
    found = best_fit_decreasing(lengths, 50)
    assert len(found) == len(bins)
    assert sorted(sum(lengths[i] for i in each) for each in found) == sorted(50 - room for room in rooms)


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(UsageError, match=r"2 of 3 samples are longer .* sample 2 has 12 tokens"):
        packed_rows([11, 3, 12], 10)


@pytest.mark.parametrize("layout", ["padded", "padding_free", "packed"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_loss_is_that_of_each_sample_alone(layout: str, chunked: bool) -> None:
    model = llama().double()
    expected, count = by_hand(model, supervised())
    loss = hf_causal_lm(model, batches()[layout], chunked=chunked)
    assert int(loss.weight) == count
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    found, wanted = (torch.autograd.grad(each, list(model.parameters())) for each in (loss.total, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "padding_free", "packed"])
def test_a_micro_batch_can_be_cut(layout: str) -> None:
    model, batch = llama(), batches()[layout]
    micro = MicroBatch(batch, torch.arange(len(batch["input_ids"])).numpy())
    pieces = [hf_causal_lm(model, piece.data) for piece in cut_micro(micro, 3)]
    assert len(pieces) > 1
    whole = hf_causal_lm(model, batch)
    assert sum(each.total.item() for each in pieces) == pytest.approx(whole.total.item(), rel=1e-5)
    assert sum(int(each.weight) for each in pieces) == int(whole.weight)


def test_padding_free_rows_are_no_longer_than_the_longest_sample() -> None:
    data = supervised()
    batch = TokenRows(padding_free=True)(data)
    called = token_batch(llama(), batch)
    tokens = sum(len(each["input_ids"]) for each in data)
    assert called.target.shape[1] == 18 and called.target.numel() < 1.2 * tokens < batch["labels"].numel()
    one = token_batch(llama(), batch, one_row=True)
    assert one.target.shape == (1, tokens)
    for (row, start), sample in zip(called.places, data, strict=True):
        there = slice(start, start + len(sample["input_ids"]))
        assert called.inputs["input_ids"][row, there].equal(sample["input_ids"])
        assert called.inputs["position_ids"][row, there].equal(torch.arange(len(sample["input_ids"])))
        assert called.target[row, there].equal(torch.cat([sample["labels"][1:], torch.tensor([-100])]))


def test_flash_attention_gets_one_row() -> None:
    model, batch = llama(), batches()["packed"]
    model.config._attn_implementation_internal = "flash_attention_2"
    called = token_batch(model, batch)
    assert called.inputs["position_ids"].shape == called.target.shape == (1, batch["input_ids"].numel())
    assert called.target.flatten().equal(token_batch(llama(), batch).target.flatten())


@pytest.mark.parametrize("layout", ["padded", "padding_free"])
def test_a_label_out_of_range_is_named(layout: str) -> None:
    data = supervised()
    data[2]["labels"][-1] = 99
    with pytest.raises(DataError, match="label 99 is out of range") as caught:
        hf_causal_lm(llama(), TokenRows(padding_free=layout == "padding_free")(data))
    assert list(caught.value.sample_ids) == [2]


def test_masks_of_the_pad_collation_are_used() -> None:
    data = supervised()
    loss = hf_causal_lm(llama(), tw.pad()(data))
    assert loss.total.item() == pytest.approx(hf_causal_lm(llama(), TokenRows()(data)).total.item(), rel=1e-6)


def test_a_batch_without_labels_names_the_remedy() -> None:
    with pytest.raises(UsageError, match="no labels"):
        hf_causal_lm(llama(), {"input_ids": torch.zeros(1, 4, dtype=torch.long)})


def test_lists_of_samples_are_padded_without_a_collate_function() -> None:
    assert isinstance(unwrap(supervised()).collate, TokenRows)
    assert not isinstance(unwrap([(torch.zeros(2), 1)]).collate, TokenRows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_dataset_is_padded_without_a_collate_function() -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{key: value.tolist() for key, value in each.items()} for each in supervised()])
    data = unwrap(rows)
    assert isinstance(data.collate, TokenRows)
    batch = data.collate([data.dataset[0], data.dataset[1]])
    assert batch["labels"].shape == batch["attention_mask"].shape == (2, 9)


def trained(settings: dict[str, Any], **more: Any) -> list[float]:
    losses: list[float] = []
    given = {"log.doctor": False, "optimizer.args": {"eps": 1e-4}, **settings}
    tw.fit(
        llama(),
        supervised(),
        "hf_causal_lm",
        **{"batch": 4, "steps": 6, "lr": 1e-3, "seed": 1, "quiet": True, "settings": given, **more},
        observers=[lambda result, state: losses.append(float(result.loss))],
    )
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("settings", LAYOUTS, ids=["padded", "padding_free", "bfd"])
def test_accumulation_does_not_change_the_losses(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = trained(settings)
    assert trained(settings, accumulation=4) == pytest.approx(whole, abs=1e-5)
    if settings == LAYOUTS[1]:
        assert trained({}) == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_a_packed_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**BFD, "loss.args": {"neftune_alpha": 5.0}}
    straight = trained(settings, steps=8)
    first = trained(settings, steps=3, name="part")
    rest = trained(settings, steps=8, name="part", resume="runs/part")
    assert first + rest == straight
    assert straight != trained(BFD, steps=8), "the noise changes the losses"


@pytest.mark.slow
def test_no_finding_and_a_note_on_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = tw.fit(llama(), supervised(), "hf_causal_lm", batch=4, steps=20, lr=1e-3, seed=1, quiet=True, settings=BFD)
    assert result.findings == ()
    notes = json.loads((Path(result.run) / "plan.json").read_text())["notes"]
    (note,) = [each for each in notes if each["topic"] == "packing"]
    assert "stays within each sample" in note["why"] and "of the rows" in note["choice"]


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([(torch.zeros(3), 1)] * 4, {"data.packing": "padding_free"}, "needs samples with the keys"),
        (lambda: iter([]), {"data.packing": "padding_free"}, "needs a dataset with __getitem__"),
        (supervised(), {"data.packing": "bfd"}, "is required by bfd"),
        (supervised(), {"data.packing": {"by": "bfd", "max_length": 10}}, "keeps them whole"),
        (supervised(), {"data.packing": {"by": "padding_free", "max_length": 10}}, "has no effect"),
        (DataLoader(supervised(), batch_size=4), BFD, "instead of the DataLoader"),
        (DataLoader(supervised(), batch_size=4, collate_fn=tw.pad()), {"data.packing": "padding_free"}, "collate_fn"),
    ],
)
def test_data_that_cannot_be_packed(data: object, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, UsageError)) as caught:
        tw.fit(llama(), data, "hf_causal_lm", steps=1, quiet=True, settings=settings)
    assert message in str(caught.value)
