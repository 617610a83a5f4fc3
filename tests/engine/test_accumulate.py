"""Any split of a global batch gives the gradient of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.plain import assert_same_bits, bits, cut, gradients, one_micro, relative_error
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.scaler import LossScaler, NoScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Loss
from trainwright.engine.losses import language_model
from trainwright.engine.step import make_step
from trainwright.errors import UsageError
from trainwright.optim.clip import ClipName, make_clip

ROWS, LENGTH, VOCAB = 13, 9, 11
LENGTHS = (9, 1, 4, 7, 2, 9, 3, 1, 8, 5, 6, 1, 9)  # counted tokens of each sample


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, VOCAB))


def sequences(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(VOCAB, (len(lengths), LENGTH), generator=generator)
    target_BT = torch.randint(VOCAB, (len(lengths), LENGTH), generator=generator)
    for row, length in enumerate(lengths):
        target_BT[row, length:] = -100
    return ids_BT, target_BT


def per_sample(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Each sequence weighs the same, whatever its length."""
    ids_BT, target_BT = batch
    token_BT = F.cross_entropy(model(ids_BT).mT, target_BT, reduction="none", ignore_index=-100)
    return Loss((token_BT.sum(1) / (target_BT != -100).sum(1)).sum(), float(len(ids_BT)))


def whole(kind: str, model: nn.Module, ids_BT: Tensor, target_BT: Tensor) -> Tensor:
    """The gradient of the undivided batch, by autograd alone."""
    logits = model(ids_BT)
    if kind == "token":
        loss = F.cross_entropy(logits.flatten(0, 1), target_BT.flatten(), ignore_index=-100)
    elif kind == "sample":
        rows = [F.cross_entropy(logits[i, :n], target_BT[i, :n]) for i, n in enumerate(LENGTHS)]
        loss = torch.stack(rows).mean()
    else:
        loss = F.mse_loss(logits, torch.ones_like(logits))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def plain_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.mse_loss(logits, torch.ones_like(logits))


@pytest.mark.parametrize("micro", [1, 2, 3, 8, ROWS])
@pytest.mark.parametrize(("kind", "loss"), [("token", language_model), ("sample", per_sample), ("mean", plain_mean)])
def test_any_split_has_the_gradient_of_the_whole_batch(kind: str, loss: object, micro: int) -> None:
    model, (ids_BT, target_BT) = network(), sequences()
    expected = whole(kind, model, ids_BT, target_BT)
    got = gradients(model, loss, cut((ids_BT, target_BT), micro))
    assert relative_error(got, expected) < 1e-6


def test_a_mean_of_means_would_be_caught() -> None:
    """The reference above tells token weighting from the usual mistake."""
    model, (ids_BT, target_BT) = network(), sequences()
    wrong = gradients(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100),
        cut((ids_BT, target_BT), 3),
    )
    assert relative_error(wrong, whole("token", model, ids_BT, target_BT)) > 1e-2


@pytest.mark.parametrize("as_float", [False, True])
def test_a_first_micro_batch_that_counts_nothing(as_float: bool) -> None:
    model, (ids_BT, target_BT) = network(), sequences()
    target_BT[:4] = -100
    expected = whole("token", model, ids_BT, target_BT)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        total, weight, *_ = language_model(model, batch)
        return Loss(total, float(weight) if as_float else weight)

    for micro in (1, 3, 4):
        assert relative_error(gradients(model, loss, cut((ids_BT, target_BT), micro)), expected) < 1e-6


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("micro", [ROWS, 4])
def test_a_batch_that_counts_nothing_is_skipped_and_says_why(micro: int, as_float: bool) -> None:
    model, (ids_BT, target_BT) = network(), sequences()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        total, weight, *_ = language_model(model, batch)
        return Loss(total, float(weight) if as_float else weight)

    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    advance, before = make_step(loss), bits(model)
    result = advance(state, cut((ids_BT, torch.full_like(target_BT, -100)), micro, first_id=40))
    assert bool(result.skipped)
    assert_same_bits(bits(model), before)
    assert state.ledger.total == 1
    entry = state.ledger.entries[0]
    assert entry.reason == "nothing was counted: the weight of the whole batch is 0"
    assert entry.step == state.step == 1
    assert entry.sample_ids == tuple(range(40, 40 + ROWS))
    assert not bool(advance(state, cut((ids_BT, target_BT), micro)).skipped)  # the run goes on
    assert state.ledger.total == 1


def test_the_reported_loss_and_metrics_are_means_over_the_whole_batch() -> None:
    model, (ids_BT, target_BT) = network(), sequences()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        total, weight, *_ = language_model(model, batch)
        hits = (model(batch[0]).argmax(-1) == batch[1]).sum()
        return Loss(total, weight, {"accuracy": hits})

    logits = model(ids_BT)
    expected = F.cross_entropy(logits.flatten(0, 1), target_BT.flatten(), ignore_index=-100)
    accuracy = (logits.argmax(-1) == target_BT).sum() / sum(LENGTHS)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    result = make_step(loss)(state, cut((ids_BT, target_BT), 3))
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(result.metrics["accuracy"], accuracy)
    assert int(result.weight) == sum(LENGTHS)
    assert (state.num_samples, state.num_tokens) == (ROWS, ROWS * LENGTH)


def test_each_micro_batch_draws_its_own_dropout_mask() -> None:
    masks: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        masks.append(out.detach() == 0)
        return out.sum()

    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    data = torch.ones(1, 4)
    batch = StepBatch(tuple(MicroBatch(data, torch.arange(1).numpy()) for _ in range(3)))
    torch.manual_seed(0)
    gradients(model, loss, batch)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_a_weight_that_carries_a_gradient_does_not_leak_into_the_loss() -> None:
    model = nn.Linear(1, 1, bias=False)
    got = gradients(
        model, lambda model, x: Loss(model(x).sum(), model.weight.sum() + 2), one_micro(torch.ones(2, 1), 2)
    )
    expected = 2 / (model.weight.detach().sum() + 2)
    torch.testing.assert_close(got[0], expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: torch.tensor(model(x).mean().item()),
        lambda model, x: model(x).mean().detach(),
        lambda model, x: Loss(model(x).sum().detach(), 2.0),
    ],
)
def test_a_loss_cut_off_from_the_model_is_named(loss: object) -> None:
    with pytest.raises(UsageError, match=r"no parameter of the optimizer got a gradient(?s:.)*\.detach\(\)"):
        gradients(nn.Linear(1, 1), loss, one_micro(torch.ones(2, 1), 2))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x: model(x), r"a tensor of shape \(2, 1\)"),
        (lambda model, x: {"loss": model(x).mean()}, "a dict"),
        (lambda model, x: (model(x).sum(), 2), "a tuple"),
        (lambda model, x: Loss(model(x).squeeze(), 2.0), r"a tensor of shape \(2,\)"),
    ],
)
def test_a_loss_that_is_no_number_is_a_usage_error(loss: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        gradients(nn.Linear(1, 1), loss, one_micro(torch.ones(2, 1), 2))


@pytest.mark.parametrize("clip", ["norm", "value", "agc", "none"])
@pytest.mark.parametrize("micro", [ROWS, 4])
@pytest.mark.parametrize("scaler", [NoScaler, LossScaler])
def test_nothing_counted_and_no_gradient_is_a_skipped_step(
    clip: ClipName, micro: int, scaler: type[LossScaler]
) -> None:
    model, (ids_BT, target_BT) = network(), sequences()
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), scaler())
    before = bits(model)
    advance = make_step(lambda model, batch: Loss(torch.tensor(0.0), 0), clip=make_clip(clip))
    result = advance(state, cut((ids_BT, target_BT), micro))
    assert bool(result.skipped)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_bits(bits(model), before)
    assert state.ledger.total == 1
    assert state.ledger.entries[0].reason == "nothing was counted: the weight of the whole batch is 0"
