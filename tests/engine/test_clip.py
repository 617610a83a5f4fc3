"""Clipping against torch and against the formula of its paper."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD

from tests.engine.plain import cut
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.precision import Precision
from trainwright.engine.step import make_step
from trainwright.errors import UsageError
from trainwright.optim.clip import make_clip


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((5, 3), (5,), (4, 2, 3, 3), (1,))]
    for parameter in made:
        parameter.grad = torch.randn(*parameter.shape, generator=generator)
    return made


def grads(made: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in made if parameter.grad is not None]


def clipped_both_ways(at: float, seed: int = 0) -> tuple[list[Tensor], list[Tensor], Tensor]:
    mine, reference = parameters(seed), parameters(seed)
    norm = get_total_norm(grads(mine))
    make_clip("norm", at)(mine, norm)
    total = clip_grad_norm_(reference, at)
    assert same_bits(norm, total)
    return grads(mine), grads(reference), total


@pytest.mark.parametrize("at", [1e-3, 0.5, 3.0, 1e4])
def test_norm_is_torchs_bit_for_bit(at: float) -> None:
    mine, reference, total = clipped_both_ways(at)
    assert all(same_bits(a, b) for a, b in zip(mine, reference, strict=True))
    changed = not same_bits(mine[0], parameters()[0].grad)  # type: ignore[arg-type]
    assert changed == (float(total) > at)


def test_norm_is_torchs_where_the_threshold_is_the_norm_itself() -> None:
    """The factor is near 1 here and rounds to either side of it."""
    active = 0
    for seed in range(40):
        norm = float(get_total_norm(grads(parameters(seed)))) + 1e-6
        for at in (norm, math.nextafter(norm, 0), norm * (1 + 6e-8), norm * (1 - 6e-8), norm * (1 + 2e-7)):
            mine, reference, _ = clipped_both_ways(at, seed)
            assert all(same_bits(a, b) for a, b in zip(mine, reference, strict=True))
            active += not same_bits(mine[0], parameters(seed)[0].grad)  # type: ignore[arg-type]
    assert 0 < active < 200


def test_value_is_torchs() -> None:
    mine, reference = parameters(), parameters()
    make_clip("value", 0.3)(mine, get_total_norm(grads(mine)))
    clip_grad_value_(reference, 0.3)
    assert all(same_bits(a, b) for a, b in zip(grads(mine), grads(reference), strict=True))
    assert float(torch.cat([g.flatten() for g in grads(mine)]).abs().max()) == pytest.approx(0.3)


def test_none_changes_nothing() -> None:
    mine = parameters()
    make_clip("none")(mine, get_total_norm(grads(mine)))
    assert all(same_bits(a, b.grad) for a, b in zip(grads(mine), parameters(), strict=True))  # type: ignore[arg-type]


def test_agc_is_equation_3_unit_by_unit() -> None:
    at, mine, reference = 0.2, parameters(), parameters()
    with torch.no_grad():
        for made in (mine, reference):
            made[0][2] = 0.0  # a unit of zero weights: eps 1e-3 is its norm
            made[0].grad[3] *= 1e-3  # type: ignore[index]  # a unit that is not clipped
            made[2].grad[1] = 0.0  # type: ignore[index]
    make_clip("agc", at)(mine, get_total_norm(grads(mine)))
    clipped = unclipped = 0
    for made, parameter in zip(mine, reference, strict=True):  # type: ignore[assignment]
        units = range(len(parameter)) if parameter.dim() > 1 else [...]
        for unit in units:
            weight, grad = parameter.detach()[unit], parameter.grad[unit]  # type: ignore[index]
            ceiling = at * max(math.sqrt(float((weight.double() ** 2).sum())), 1e-3)
            norm = math.sqrt(float((grad.double() ** 2).sum()))
            expected = grad * (ceiling / norm) if norm > ceiling else grad
            torch.testing.assert_close(made.grad[unit], expected)  # type: ignore[attr-defined]
            clipped, unclipped = clipped + (norm > ceiling), unclipped + (norm <= ceiling)
    assert clipped
    assert unclipped


def test_it_clips_unscaled_gradients_after_the_probes() -> None:
    model = nn.Linear(3, 1, bias=False)
    plain = copy.deepcopy(model)
    x = torch.tensor([[3.0, 0.0, 4.0]])
    seen: dict[str, Tensor] = {}

    def probe(state: TrainState) -> dict[str, Tensor]:
        seen["grad"] = model.weight.grad.clone()  # type: ignore[union-attr]
        return {"biggest": model.weight.grad.abs().max()}  # type: ignore[union-attr]

    state = TrainState(model, SGD(model.parameters(), lr=1.0), LossScaler(initial=1024.0))
    advance = make_step(
        lambda model, batch: model(batch[0]).float().sum(),
        precision=Precision("fp16"),
        clip=make_clip("norm", 1.0),
        probes=[probe],
    )
    result = advance(state, cut((x, x), 1))
    assert float(result.grad_norm) == 5.0  # not 5 * 1024
    assert torch.equal(seen["grad"], x)  # the probe sees gradients unscaled and not yet clipped
    assert float(result.probed["biggest"]) == 4.0
    torch.testing.assert_close(plain.weight - model.weight, x / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_is_torchs_from_tiny_to_huge(dtype: torch.dtype) -> None:
    generator, changed = torch.Generator().manual_seed(3), 0
    for exponent in range(-7, 4):
        for ratio in (0.1, 0.5, 0.88, 0.899, 0.9, 0.95, 0.98, 0.989, 0.995, 0.9999, 1.0, 1.01, 2.0, 100.0):
            at = 10.0**exponent
            grad = torch.randn(7, generator=generator, dtype=torch.float64)
            grad = (grad / grad.norm() * at * ratio).to(dtype)
            made = [nn.Parameter(torch.zeros(7, dtype=dtype)) for _ in range(2)]
            for parameter in made:
                parameter.grad = grad.clone()
            make_clip("norm", at)(made[:1], get_total_norm(grads(made[:1])))
            clip_grad_norm_(made[1:], at)
            mine, reference = grads(made)
            assert same_bits(mine, reference), (at, ratio)
            changed += not same_bits(mine, grad)
    assert changed > 30


def test_a_clip_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="did you mean 'norm'"):
        make_clip("nrom")  # type: ignore[arg-type]
    for at in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="above 0"):
            make_clip("norm", at)
    with pytest.raises(UsageError, match="did you mean 'fp16'"):
        Precision("float16")  # type: ignore[arg-type]


def test_a_step_of_parts_that_are_not_made() -> None:
    with pytest.raises(UsageError, match=r"clip is 1.0(.|\n)*make_clip"):
        make_step(nn.MSELoss(), clip=1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"schedule is 'cosine'(.|\n)*make_schedule"):
        make_step(nn.MSELoss(), schedule="cosine")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"precision is 'bf16'(.|\n)*Precision"):
        make_step(nn.MSELoss(), precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="NoneType"):
        make_step(None)  # type: ignore[arg-type]
