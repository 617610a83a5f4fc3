"""The built-in losses, and the two forms that a loss function may have."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.engine.plain import cut, gradients
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Loss, as_loss_fn, takes_model
from trainwright.engine.losses import cross_entropy, hf_causal_lm, language_model, mse
from trainwright.engine.step import make_step
from trainwright.errors import DataError, UsageError


def test_cross_entropy_is_the_sum_and_the_count() -> None:
    model = nn.Linear(4, 5)
    x, y = torch.randn(6, 4), torch.tensor([0, 4, -100, 2, -100, 1])
    loss = cross_entropy(model, (x, y))
    torch.testing.assert_close(loss.total / loss.weight, F.cross_entropy(model(x), y, ignore_index=-100))
    assert int(loss.weight) == 4


def test_cross_entropy_of_dense_labels() -> None:
    model = nn.Conv2d(3, 5, 1)
    x, mask = torch.randn(2, 3, 4, 6), torch.randint(5, (2, 4, 6))
    mask[1, 2:] = -100
    loss = cross_entropy(model, (x, mask))
    torch.testing.assert_close(loss.total / loss.weight, F.cross_entropy(model(x), mask, ignore_index=-100))
    assert int(loss.weight) == 24 + 12
    assert int(loss.metrics["accuracy"]) == int((model(x).argmax(1) == mask).sum())
    mask[0, 0, 0] = 5
    with pytest.raises(DataError, match=r"0\.\.4 or -100") as caught:
        cross_entropy(model, (x, mask))
    assert list(caught.value.sample_ids) == [0]


@pytest.mark.parametrize(
    ("logits", "labels", "remedy"),
    [
        ((6, 5), (6, 5), "one-hot"),
        ((6, 5), (6, 1), "squeeze"),
        ((2, 5, 4, 6), (2, 1, 4, 6), "squeeze"),
        ((2, 7, 5), (2, 7), "transpose"),
        ((6,), (6,), "one logit for each class"),
        ((6, 5), (7,), "one for each sample"),
        ((2, 5, 4, 6), (2, 4, 3), "one for each sample"),
    ],
)
def test_labels_of_another_shape(logits: tuple[int, ...], labels: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(UsageError, match="the logits have shape") as caught:
        cross_entropy(nn.Identity(), (torch.randn(logits), torch.zeros(labels, dtype=torch.long)))
    assert remedy in caught.value.remedy


def test_language_model_and_hf_count_tokens() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    ids, target = torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    target[0, 2:] = -100
    expected = F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), ignore_index=-100)

    class Output(nn.Module):
        def forward(self, input_ids: Tensor) -> object:
            return type("Output", (), {"logits": model(input_ids)})

    for loss in (language_model(model, (ids, target)), hf_causal_lm(Output(), (ids, target))):
        torch.testing.assert_close(loss.total / loss.weight, expected)
        assert int(loss.weight) == 12


def test_the_sum_is_in_float32_under_autocast() -> None:
    model = nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model, (torch.randn(6, 4), torch.zeros(6, dtype=torch.long)))
    assert loss.total.dtype == torch.float32


@pytest.mark.parametrize("label", [3, -1, 99])
def test_a_label_out_of_range_names_its_samples_through_the_engine(label: int) -> None:
    x, y = torch.randn(10, 4), torch.zeros(10, dtype=torch.long)
    y[5] = y[7] = label
    model = nn.Linear(4, 3)
    state = TrainState(model, SGD(model.parameters(), lr=0.1), step=6)
    with pytest.raises(DataError, match=rf"label {label} is out of range.*0\.\.2 or -100") as caught:
        make_step(cross_entropy)(state, cut((x, y), 4, first_id=500))
    assert caught.value.sample_ids == (505, 507)
    assert "micro-batch 1 of step 7, samples [505, 507]" in caught.value.message
    assert caught.value.remedy


def test_a_token_out_of_range_names_its_sequence_once() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    ids, target = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)
    target[1, 2:] = 7
    with pytest.raises(DataError) as caught:
        gradients(model, language_model, cut((ids, target), 4, first_id=20))
    assert caught.value.sample_ids == (21,)


def test_mse_is_per_element_and_refuses_to_broadcast() -> None:
    model = nn.Linear(4, 1)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    loss = mse(model, (x, y))
    torch.testing.assert_close(loss.total / loss.weight, F.mse_loss(model(x), y))
    with pytest.raises(UsageError, match=r"\(6, 1\) and the target \(6,\)") as caught:
        mse(model, (x, y.squeeze(1)))
    assert "squeeze" in caught.value.remedy


def by_model(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).sum(), 1.0)


class Custom(nn.Module):
    def forward(self, model: nn.Module, batch: Tensor) -> Loss:
        return by_model(model, batch)


def test_the_two_forms_of_a_loss_function() -> None:
    assert takes_model(by_model)
    assert takes_model(Custom())
    assert takes_model(functools.partial(by_model))
    assert not takes_model(F.cross_entropy)
    assert not takes_model(nn.CrossEntropyLoss(label_smoothing=0.1))
    assert not takes_model(lambda output, target: output)
    assert not takes_model(max)
    bilinear = nn.Bilinear(3, 2, 1)
    a, b, target = torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 1)
    loss = as_loss_fn(F.mse_loss)(bilinear, (a, b, target))  # (*inputs, target)
    assert isinstance(loss, Tensor)
    torch.testing.assert_close(loss, F.mse_loss(bilinear(a, b), target))


@pytest.mark.parametrize("batch", [{"x": 1}, torch.ones(2), (torch.ones(2),)])
def test_a_batch_that_is_no_pair(batch: object) -> None:
    with pytest.raises(UsageError, match=r"needs batches of \(input, target\)") as caught:
        as_loss_fn(F.mse_loss)(nn.Linear(1, 1), batch)
    assert "def loss(model, batch)" in caught.value.remedy
