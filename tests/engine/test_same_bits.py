"""The engine against loops written out with torch alone: the same bits of every weight after 50 steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.engine.plain import assert_same_bits, bits, cut, train
from trainwright.engine.loss import Loss
from trainwright.engine.precision import FP32, Precision
from trainwright.optim.clip import make_clip

STEPS, MICRO = 50, 6
CLIP_AT = 0.6

MakeOptimizer = Callable[[nn.Module], Optimizer]


def _by_dimensions(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in neither of which the parameters are neighbours in the model."""
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) == is_weight] for is_weight in (True, False))
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw-fused": lambda model: AdamW(model.parameters(), lr=3e-2, weight_decay=0.1, fused=True),
    "adamw-groups": lambda model: AdamW(_by_dimensions(model), lr=3e-2),
    "sgd": lambda model: SGD(model.parameters(), lr=0.2),
    "sgd-momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
}


def factor(step: int) -> float:
    """Warm-up over 10 steps, then cosine to 0.1."""
    if step < 10:
        return (step + 1) / 10
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / (STEPS - 10))) / 2


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


def batches(accumulation: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = accumulation * MICRO
    inputs = [torch.randn(rows, 12, generator=generator) for _ in range(STEPS)]
    return [(x, (x[:, :5] * 2).argmax(1)) for x in inputs]


def plain_loop(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    accumulation: int,
    clip_at: float,
    warm: bool,
    bf16: bool,
    by_count: bool = False,
) -> int:
    """The loop that everyone writes. Returns in how many steps the clip was active."""
    scheduler = LambdaLR(optimizer, factor if warm else lambda step: 1.0)
    active = 0
    for x, y in data:
        optimizer.zero_grad()
        for at in range(0, len(x), MICRO):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits, target = model(x[at : at + MICRO]), y[at : at + MICRO]
                if by_count:
                    loss = F.cross_entropy(logits, target, reduction="sum") / len(x)
                else:
                    loss = F.cross_entropy(logits, target) / accumulation
            loss.backward()
        if clip_at:
            active += int(clip_grad_norm_(model.parameters(), clip_at) > clip_at)
        optimizer.step()
        scheduler.step()
    return active


def compare(
    make: MakeOptimizer,
    loss: Callable[..., Loss | Tensor],
    *,
    accumulation: int,
    clip_at: float = 0.0,
    warm: bool = False,
    bf16: bool = False,
    by_count: bool = False,
    dropout: float = 0.0,
) -> int:
    ours, plain = network(dropout), network(dropout)
    start = copy.deepcopy(bits(ours))
    data = batches(accumulation)
    torch.manual_seed(7)
    active = plain_loop(
        plain, make(plain), data, accumulation=accumulation, clip_at=clip_at, warm=warm, bf16=bf16, by_count=by_count
    )
    torch.manual_seed(7)
    train(
        ours,
        make(ours),
        loss,
        [cut(batch, MICRO) for batch in data],
        schedule=(lambda step, fraction: factor(step)) if warm else (lambda step, fraction: 1.0),
        clip=make_clip("norm" if clip_at else "none", clip_at),
        precision=Precision("bf16") if bf16 else FP32,
    )
    assert_same_bits(bits(ours), bits(plain))
    assert not torch.equal(start["0.weight"], bits(ours)["0.weight"])
    return active


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_batch_a_step(name: str, bf16: bool) -> None:
    compare(OPTIMIZERS[name], F.cross_entropy, accumulation=1, bf16=bf16)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "adamw-groups", "sgd-momentum"])
def test_accumulation_clip_warm_up_and_cosine(name: str, bf16: bool) -> None:
    active = compare(OPTIMIZERS[name], F.cross_entropy, accumulation=3, clip_at=CLIP_AT, warm=True, bf16=bf16)
    assert 0 < active < STEPS  # the clip was seen both active and inactive


@pytest.mark.slow
def test_a_sum_and_its_weight() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), torch.ones_like(y).sum())

    compare(OPTIMIZERS["adamw"], loss, accumulation=3, clip_at=CLIP_AT, warm=True, by_count=True)


@pytest.mark.slow
def test_dropout_draws_the_same_numbers() -> None:
    compare(OPTIMIZERS["adamw"], nn.CrossEntropyLoss(), accumulation=3, dropout=0.3)


def test_the_learning_rate_of_each_step_is_reported_and_used() -> None:
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    optimizer = SGD(groups, lr=0.1)
    data = [cut((torch.ones(1, 1), torch.ones(1, 1)), 1)] * 3
    weights = [model.weight.item(), model.bias.item()]
    for result, expected in zip(
        train(model, optimizer, lambda model, batch: model(batch[0]).sum(), data, schedule=lambda s, f: 1 / (s + 1)),
        (0.5, 0.25, 0.5 / 3),
        strict=True,
    ):
        assert result.lr == pytest.approx(expected)
    moved = 1 + 1 / 2 + 1 / 3  # the gradient of both is 1
    assert model.weight.item() == pytest.approx(weights[0] - 0.5 * moved, abs=1e-6)
    assert model.bias.item() == pytest.approx(weights[1] - 0.25 * moved, abs=1e-6)
