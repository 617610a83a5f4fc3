"""Evaluation and rehearsal leave no trace: the training is the same bits with and without them."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from tests.engine.plain import assert_same_bits, bits, cut
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.dry_run import Mode, dry_run
from trainwright.engine.evaluate import evaluate
from trainwright.engine.loss import Loss
from trainwright.engine.losses import cross_entropy, language_model
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.step import make_step
from trainwright.errors import DataError


class Noisy(nn.Module):
    """Draws from every global generator, in training and in evaluation."""

    draws_in_eval = 0

    def forward(self, x: Tensor) -> Tensor:
        self.draws_in_eval += not self.training
        return x + 0.01 * (torch.randn(()) + np.random.rand() + random.random())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        Noisy(),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.BatchNorm1d(16).eval(),
        nn.Linear(16, 3),
    )


def batch(step: int, rows: int = 12, micro: int = 6) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=generator)
    return cut((x, x[:, :3].argmax(1)), micro)


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


@pytest.mark.parametrize("between", ["evaluate", "rehearse"])
def test_training_is_the_same_bits_with_it_after_every_step(between: str) -> None:
    results = []
    for disturbed in (False, True):
        model = network()
        modes = [module.training for module in model.modules()]
        state = TrainState(model, AdamW(model.parameters(), lr=1e-2))
        advance = make_step(cross_entropy)
        seed()
        for step in range(10):
            if disturbed and between == "evaluate":
                first, second = (evaluate(model, cross_entropy, list(batch(99).micro)) for _ in range(2))
                assert first.loss == second.loss
            elif disturbed:
                gradients = [parameter.grad for parameter in model.parameters()]
                dry_run(
                    state,
                    batch(98),
                    cross_entropy,
                    modes=[Mode(Precision("fp32"), 1), Mode(Precision("bf16"), 1)],
                    budget_s=0,
                )
                assert all(p.grad is before for p, before in zip(model.parameters(), gradients, strict=True))
            assert [module.training for module in model.modules()] == modes
            advance(state, batch(step))
        assert model[2].draws_in_eval == (40 if disturbed and between == "evaluate" else 0)
        seen = {**bits(model), "rng": RngBag.capture().torch_cpu, "numpy": torch.tensor(np.random.rand())}
        results.append({**seen, "python": torch.tensor(random.random())})
    assert_same_bits(*results)


def test_an_exception_inside_an_evaluation_still_restores_the_modes() -> None:
    model = network()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, lambda model, batch: 1 / 0, list(batch(0).micro))  # type: ignore[arg-type, return-value]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_is_weighted_over_ragged_batches() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (10, 6), generator=generator)
    target = torch.randint(7, (10, 6), generator=generator)
    for row in range(10):
        target[row, 1 + row % 6 :] = -100
    expected = F.cross_entropy(model(ids).double().flatten(0, 1), target.flatten(), ignore_index=-100)
    for micro in (1, 4, 10):
        seen = evaluate(model, language_model, list(cut((ids, target), micro).micro))
        assert seen.loss == pytest.approx(float(expected.detach()), rel=1e-6)
        assert seen.weight == float((target != -100).sum())
    means = evaluate(model, lambda model, batch: model(batch[0]).square().mean(), list(cut((ids, target), 4).micro))
    assert means.loss == pytest.approx(model(ids).detach().square().mean().item(), rel=1e-6)
    assert means.weight == 10


def test_metrics_are_over_the_whole_set_and_exact_beyond_2_to_24() -> None:
    big = 2**24

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss(torch.zeros(()), torch.tensor(big + 1), {"hits": torch.tensor(big + 1)})

    batches = [MicroBatch(torch.ones(1), np.arange(1)) for _ in range(3)]
    seen = evaluate(nn.Linear(1, 1), loss, batches)
    assert seen.weight == 3 * (big + 1)
    assert seen.metrics == {"hits": 1.0}


def test_accuracy_of_the_box() -> None:
    model, data = nn.Identity(), (torch.eye(4), torch.tensor([0, 1, 3, -100]))
    seen = evaluate(model, cross_entropy, list(cut(data, 3).micro))
    assert seen.weight == 3
    assert seen.metrics["accuracy"] == pytest.approx(2 / 3)


def test_nothing_to_evaluate_is_nan_not_zero() -> None:
    assert math.isnan(evaluate(nn.Linear(1, 1), cross_entropy, []).loss)


def test_a_bad_label_of_the_validation_set_names_its_sample() -> None:
    data = cut((torch.eye(4), torch.tensor([0, 1, 7, 2])), 2, first_id=30)
    with pytest.raises(
        DataError, match=r"label 7 is out of range.*batch 1 of the evaluation, samples \[32\]"
    ) as caught:
        evaluate(nn.Identity(), cross_entropy, list(data.micro))
    assert caught.value.sample_ids == (32,)


@pytest.mark.slow
def test_a_rehearsal_sees_the_first_loss_and_what_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    state = TrainState(model, AdamW(model.parameters(), lr=1e-2), LossScaler())
    first = batch(0, micro=12)
    scale = copy.deepcopy(state.scaler.state_dict())
    seen = dry_run(
        state, first, F.cross_entropy, modes=[Mode(Precision("fp32"), 1), Mode(Precision("fp16"), 1)], budget_s=0
    )
    x, y = first.micro[0].data
    assert seen.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert seen.mean
    assert set(seen.seconds) == {("fp32", 1), ("fp16", 1)}
    assert seen.outputs == 3
    hidden = 12 * 32 * 4
    assert hidden <= seen.activation_bytes < 3 * hidden  # tanh keeps its output, both linears their input
    assert state.scaler.state_dict() == scale
    assert (state.step, state.num_samples) == (0, 0)
    assert not dry_run(state, first, cross_entropy, modes=[Mode(FP32, 2)], budget_s=0).mean
    assert torch.get_num_threads() == 1
