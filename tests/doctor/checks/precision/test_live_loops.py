"""Non-finite steps and 16-bit loops as they run: the first operation, its samples and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.runs.records import Found
from zoo.host import cnn, images, loader, mlp, table

pytestmark = pytest.mark.slow


def trained(
    model: nn.Module,
    data: Any,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    window: int = 1,
    raises: bool = False,
    before_update: Callable[[int], object] = lambda step: None,
    **watch: Any,
) -> list[Found]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in watch)
    scalers = {"scaler": scaler} if "scaler" in watch else {}
    w = tw.watch(model, optimizer, loader=data, out=None, quiet=True, **(watch | scalers))
    with suppress(ArithmeticError), w:
        for i, (_, x, y) in enumerate(data):
            made = loss(model, x, y) / window
            if raises and not made.isfinite():
                raise ArithmeticError
            scaler.scale(made).backward()
            before_update(i)
            if (i + 1) % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return w.findings()


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("how", [{}, {"on_nonfinite": "observe"}, {"raises": True}])
def test_a_sample_that_is_not_finite(how: dict[str, Any]) -> None:
    x, y = table(0, n=256)
    x[70, 3] = torch.nan
    found = trained(mlp(), loader(x, y, 0, batch=32, shuffle=False), classify, **how)[0]
    assert (found.code, found.severity, found.step, found.where.sample_ids) == (
        "data.nonfinite_input", "critical", 3, (70,),
    )  # fmt: skip
    assert "unchanged: not finite" in found.tried[0].result


def test_a_scaler_skips_the_update_and_batchnorm_keeps_the_batch() -> None:
    x, y = images(0, n=128)
    x[70, 0, 1, 1] = torch.nan
    found = trained(cnn(), loader(x, y, 0, batch=32, shuffle=False), classify, scaler=True)
    assert [f.code for f in found[:2]] == ["data.nonfinite_input", "model.running_statistics_nonfinite"]


def test_one_micro_batch_of_four() -> None:
    x, y = table(0, n=256)
    x[32 * 4 + 2 * 32 + 5, 0] = 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) * x[:, :1]).pow(2).sum(1).sqrt().mean()

    found = trained(mlp(), loader(x, y, 0, batch=32, shuffle=False), loss, window=4)[0]
    assert (found.code, found.step, found.where.op) == ("gradient.infinite_derivative", 2, "sqrt")
    assert (found.where.micro_batch, found.where.sample_ids) == (2, (197,))


def test_what_the_loop_wrote_is_not_blamed_on_an_operation() -> None:
    model = mlp()

    def write(step: int) -> None:
        if step == 2:
            next(model[2].parameters()).grad[0] = torch.nan  # type: ignore[index]

    found = trained(model, loader(*table(0, n=128), 0, batch=32), classify, before_update=write)[0]
    assert (found.code, found.step, found.where.module) == ("precision.nonfinite_step", 3, "2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_healthy_formats(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    found = trained(mlp(), loader(*table(0, n=512), 0, batch=32), loss)
    assert [each.code for each in found if each.severity != "info"] == []


def test_bfloat16_weights_that_stand_still() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    model = mlp().bfloat16()
    found = trained(model, loader(*table(0, n=512), 0, batch=32), loss)
    assert "precision.lost_updates" not in [each.code for each in found]  # at 1e-3 they move
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _, x, y in loader(*table(0, n=512), 0, batch=32):
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    assert "precision.lost_updates" in [each.code for each in watch.findings()]


@pytest.mark.parametrize(("dtype", "found"), [(torch.bfloat16, ["3"]), (torch.float32, [])])
def test_a_scale_that_no_update_moves(dtype: torch.dtype, found: list[str]) -> None:
    """At 1.0 the spacing of bfloat16 is 0.0078. Matrices of small weights move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64, bias=False))
    model = nn.Sequential(*model, nn.Linear(64, 10)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(24):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(32, 20, dtype=dtype)).float(), torch.randint(10, (32,))).backward()
            optimizer.step()
    lost = [each.where.module for each in watch.findings() if each.code == "precision.lost_updates"]
    assert lost == found
