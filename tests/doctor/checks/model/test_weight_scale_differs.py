"""model.weight_scale_differs on faulty and on healthy programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.checks.loops import CLASSES, WIDTH, alarms, found, made_of, mlp, watched
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.weights import Neighbours, ScalesFacts

CODE = "model.weight_scale_differs"


class Block(nn.Module):
    """A residual block; ``scale`` is that of its last weights, ``rank`` that of an adapter beside its first ones."""

    def __init__(self, scale: float = 1.0, rank: int = 0, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.gain = nn.Parameter(torch.full((1, 1, 16), gain))
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 * scale)
        self.adapter = nn.Sequential(nn.Linear(16, rank, bias=False), nn.Linear(rank, 64, bias=False)) if rank else None
        if self.adapter is not None:
            nn.init.zeros_(self.adapter[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        x, skip = self.norm(x), x
        up = self.up(x) + self.adapter(x) if self.adapter is not None else self.up(x)
        return skip + self.gain[0] * self.down(nn.functional.gelu(up))


class Blocks(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, 16), nn.ModuleList(blocks), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def row(*factors: float) -> nn.Sequential:
    """Linear layers, whose weights are multiplied by these factors."""
    layers = [nn.Linear(32, 32) for _ in factors]
    with torch.no_grad():
        for layer, factor in zip(layers, factors):
            layer.weight.mul_(factor)
    return mlp(*(each for layer in layers for each in (layer, nn.ReLU())))


def of_another_rule() -> nn.Module:
    model = Blocks(*(Block() for _ in range(4)))
    nn.init.normal_(model.blocks[2].down.weight)
    return model


def overwritten_by_a_load() -> nn.Module:
    """The weights of a checkpoint in another unit."""
    model = Blocks(*(Block() for _ in range(6)))
    model.load_state_dict({f"blocks.3.{n}": p / 255 for n, p in model.blocks[3].state_dict().items()}, strict=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "module", "is_large"),
    [
        (of_another_rule, "blocks.2.down", True),
        (overwritten_by_a_load, "blocks.3.", False),
        (lambda: row(1.0, 30.0, 1.0, 1.0), "4", True),
        (lambda: row(1.0, 1.0, 0.01, 1.0, 1.0), "6", False),
    ],
    ids=["another rule", "a load", "scaled up in a row", "scaled down in a row"],
)
def test_one_matrix_of_another_scale(make: Callable[[], nn.Module], module: str, is_large: bool) -> None:
    torch.manual_seed(0)
    fault = found(watched(make()), CODE)
    assert fault.where.module is not None and fault.where.module.startswith(module)
    assert (float(str(fault.evidence[0].seen)) > 1) == is_large


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Blocks(*(Block() for _ in range(4))),
        lambda: Blocks(*(Block(scale=0.0 if n == 3 else 1.0) for n in range(6))),
        lambda: Blocks(*(Block(scale=8**-0.5) for _ in range(4))),
        lambda: Blocks(*(Block(scale=1 / (n + 1)) for n in range(12))),
        lambda: Blocks(*(Block(rank=2) for _ in range(4))),
        lambda: Blocks(*(Block(gain=0.1 if n < 6 else 1e-5) for n in range(8))),
        lambda: row(1.0, 1.0, 1.0, 1e-4),
        lambda: row(3.0, 1.0, 1.0, 1.0, 1.0),
    ],
    ids=["equal", "a zero branch", "by depth", "by layer", "LoRA", "layer scale", "small last layer", "a gain"],
)
def test_what_is_unequal_on_purpose(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert CODE not in alarms(watched(make()))


@pytest.mark.parametrize(
    ("sizes", "step", "expected"),
    [
        ((1.0, 1.0, 1.0, 20.0), 1, True),
        ((1.0, 1.0, 1.0, 9.0), 1, False),
        ((1.0, 1.0, 20.0, 20.0), 1, False),  # which of them are wrong?
        ((1.0, 5.0, 30.0, 300.0), 1, False),  # no scale is usual
        ((1.0, 1.0, 1.0, 0.05), 1, True),
        ((1.0, 1.0, 1.0, 0.05), 3, False),  # it may have been zeros
        ((1e-4, 1e-4, 1e-4, 1e-2), 1, False),  # the others were zeros
    ],
)
def test_how_far_is_too_far(sizes: tuple[float, ...], step: int, expected: bool) -> None:
    check = check_of(CODE)
    names = tuple(f"blocks.{n}.up.weight" for n in range(len(sizes)))
    group = Neighbours(names=names, sizes=sizes, fan_in=16, is_row=False)
    facts = ScalesFacts(first=step, groups=1, unequal=(group,))
    assert check is not None
    assert bool(made_of(check, (step, facts))) == expected
