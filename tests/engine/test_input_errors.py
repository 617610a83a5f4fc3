"""A batch that does not fit the model or the loss: it is said what torch was given, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.input_errors import explaining
from trainwright.errors import DataError, UsageError

X = torch.randn(6, 4)
LABELS = torch.tensor([0, 1, 1, 0, 1, 0])
IDS = torch.tensor([[1, 2], [3, 14], [0, 1]])
PICTURES = torch.rand(2, 8, 8, 3)


def head(outputs: int = 2) -> nn.Linear:
    return nn.Linear(4, outputs)


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))


def in_place() -> nn.Sequential:
    return nn.Sequential(head(), nn.Sigmoid(), nn.ReLU(inplace=True))


CE, BINARY = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()
ROWS: dict[str, tuple[Callable[[], nn.Module], Tensor, nn.Module, Tensor, str, str]] = {
    "double input": (head, X.double(), CE, LABELS, "Linear cannot work with input float64 (6, 4)", "to(torch.float32)"),
    "whole numbers": (head, X.long(), CE, LABELS, "input int64 (6, 4)", "x.float() in the data"),
    "bytes": (conv, PICTURES.permute(0, 3, 1, 2).mul(255).byte(), CE, LABELS[:2], "uint8", "x.float() / 255"),
    "channels last": (conv, PICTURES, CE, LABELS[:2], "Conv2d ('0' of the model)", "x.permute(0, 3, 1, 2)"),
    "no channel": (lambda: nn.Conv2d(1, 2, 3), X.view(2, 3, 4), CE, LABELS, "input float32 (2, 3, 4)", "unsqueeze(1)"),
    "other channels": (conv, torch.rand(2, 5, 8, 8), CE, LABELS[:2], "(2, 5, 8, 8)", "the input has 5 channels"),
    "other features": (head, X[:, :3], CE, LABELS, "input float32 (6, 3)", "ends in 3 features"),
    "not flattened": (head, X.view(6, 2, 2), CE, LABELS, "input float32 (6, 2, 2)", "nn.Flatten()"),
    "one row": (lambda: nn.BatchNorm1d(4), X[:1], CE, LABELS[:1], "input float32 (1, 4)", "drop_last"),
    "labels of floats": (head, X, CE, LABELS.float(), "cross_entropy cannot work with", "y.long()"),
    "labels of 32 bits": (head, X, CE, LABELS.int(), "target int32 (6,)", "y.long()"),
    "one-hot labels": (head, X, CE, torch.eye(2).long()[LABELS], "target int64 (6, 2)", "y.argmax(1)"),
    "labels in a column": (head, X, CE, LABELS[:, None], "target int64 (6, 1)", "y.squeeze(1)"),
    "labels from 1": (head, X, CE, LABELS + 1, "Target 2", "the model has outputs 0 to 1"),
    "classes come last": (head, torch.randn(6, 5, 4), CE, LABELS[:, None].expand(6, 5), "(6, 5, 2)", "movedim(-1, 1)"),
    "fewer labels": (head, X, CE, LABELS[:4], "target int64 (4,)", "6 rows of scores and 4 labels"),
    "binary labels": (lambda: head(1), X, BINARY, LABELS[:, None], "target int64 (6, 1)", "y.float()"),
    "binary loss of classes": (lambda: head(3), X, BINARY, LABELS.float(), "target float32 (6,)", "y.long()"),
    "binary shape": (lambda: head(1), X, BINARY, LABELS.float(), "target float32 (6,)", "y.view_as(output)"),
    "no sigmoid": (lambda: head(1), 9 * X, nn.BCELoss(), LABELS[:, None].float(), "0 and 1", "BCEWithLogitsLoss"),
    "large ids": (lambda: nn.Embedding(9, 4), IDS, CE, LABELS, "input int64 (3, 2)", "from 0 to 14"),
    "ids of floats": (lambda: nn.Embedding(9, 4), IDS.float(), CE, LABELS, "embedding cannot work", "ids.long()"),
    "overwritten": (in_place, X, CE, LABELS, "overwritten", "inplace=True"),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_what_torch_was_given_and_what_to_do(name: str) -> None:
    make, x, loss, y, said, remedy = ROWS[name]
    model = make()
    with pytest.raises(UsageError) as raised, explaining(model):
        loss(model(x), y).backward()
    assert said in raised.value.message
    assert remedy in raised.value.remedy
    assert isinstance(raised.value.__cause__, RuntimeError | ValueError | IndexError)  # with the line that raised it


class Picky(nn.Module):
    """A module of a user's own, whose input has another dtype than its weights on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(15, 2))

    def forward(self, ids: Tensor) -> Tensor:
        if int(ids.max()) > 9:
            raise ValueError("no such colour")
        return self.weight[ids].sum(1)


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    model = Picky()
    with pytest.raises(ValueError, match="no such colour") as raised, explaining(model):
        model(IDS)
    assert type(raised.value) is ValueError


def test_a_list_instead_of_a_tensor_comes_from_the_collate_function() -> None:
    model = nn.Embedding(9, 4)
    with pytest.raises(UsageError, match="a list instead of a tensor") as raised, explaining(model):
        model([IDS[:, 0], IDS[:, 1]])
    assert "with_format('torch')" in raised.value.remedy and "tw.pad()" in raised.value.remedy


def test_samples_of_three_parts_do_not_fit_a_model_of_one_input() -> None:
    with pytest.raises(UsageError, match=r"does not take 2 inputs: the batch has 3 parts, and the last is the target"):
        tw.fit(nn.Sequential(head()), (X, LABELS, LABELS), CE, steps=1, quiet=True)


def test_batch_norm_of_one_sample_in_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(head(), nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match="batch_norm cannot work with") as raised:
        tw.fit(model, (X[:5], LABELS[:5]), CE, batch=4, quiet=True)
    assert "drop_last" in raised.value.remedy


def test_sparse_tensors_are_to_be_converted() -> None:
    with pytest.raises(UsageError) as raised:
        tw.fit(head(), (X.to_sparse(), LABELS), CE, quiet=True)
    assert "to_dense()" in raised.value.remedy


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_run_says_it_before_the_first_step(part: str) -> None:
    good, bad = (X, LABELS), (X.double(), LABELS)
    data, val = (bad, good) if part == "train" else (good, bad)
    with pytest.raises(UsageError, match="Linear cannot work with input float64"):
        tw.fit(head(), data, CE, val=val, until="2steps", batch=3)


def test_predictions_say_it_too() -> None:
    with pytest.raises(UsageError, match="ends in 3 features"):
        tw.predict(head(), X[:, :3])


@pytest.mark.slow
def test_arrays_of_numpy_are_of_the_default_dtype() -> None:
    array = np.random.default_rng(0).normal(size=(6, 4))
    result = tw.fit(head(), (array, LABELS.numpy()), CE, until="2steps", batch=3)
    assert result.step == 2
    assert torch.equal(tw.predict(result, array), tw.predict(result, torch.from_numpy(array).float()))


class Positions(nn.Module):
    """A model with learned positions, as GPT-2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 4), nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.wte(ids) + self.wpe(torch.arange(ids.shape[1])[None])
        return found


def test_positions_are_no_token_ids() -> None:
    model = Positions()
    with (
        pytest.raises(UsageError, match=r"(?s)sequence has 12 tokens.*8 positions.*max_length: 8") as error,
        explaining(model),
    ):
        model(torch.ones(2, 12, dtype=torch.long))
    assert "num_embeddings" not in str(error.value)


@pytest.mark.parametrize("of", ["labels", "labels of tokens", "shifted labels", "ids"])
def test_ids_out_of_range_in_a_later_step_name_their_samples(of: str) -> None:
    ids, labels = torch.randint(0, 9, (24, 6)), torch.randint(0, 5, (24, 6))
    (ids if of == "ids" else labels)[17, 3] = 9
    model: nn.Module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if of == "labels":
            return CE(output[:, 0], target)  # type: ignore[no-any-return]
        first = int(of == "shifted labels")
        return CE(output[:, first:].flatten(0, 1), target[:, first:].flatten())  # type: ignore[no-any-return]

    data = (ids, labels[:, 3] if of == "labels" else labels)
    with pytest.raises(DataError, match=r"\(micro-batch 0 of step 3, samples \[17\]\)") as raised:
        tw.fit(model, data, loss, batch=8, accumulation=2, steps=3, settings={"data.shuffle": False})
    assert raised.value.sample_ids == (17,)
    assert "0 to " in raised.value.remedy


@pytest.mark.parametrize("loss", [CE, "cross_entropy"], ids=["module", "name"])
def test_labels_in_memory_are_examined_before_the_first_step(loss: nn.Module | str) -> None:
    x, labels = torch.randn(24, 4), torch.randint(0, 5, (24,))
    labels[[17, 20]] = torch.tensor([-100, 9])
    fit = partial(tw.fit, head(5), (x, labels), loss, batch=8, quiet=True)
    with pytest.raises(DataError, match=r"label 9 is out of range: the model has 5 outputs.*\(samples 20\)"):
        fit(epochs=2)
    assert fit(epochs=2, settings={"data.quarantine": [20]}).step == 6
    assert fit(steps=2, settings={"data.shuffle": False}).step == 2  # the run ends before this sample
