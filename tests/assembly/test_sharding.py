"""Units of sharding: modules whose weights are gathered together."""

from __future__ import annotations

from torch import nn

from trainwright.distributed.sharding import units_of
from trainwright.models.gpt import gpt
from trainwright.models.resnet import resnet


def names_of(model: nn.Module) -> list[str]:
    units = units_of(model)
    return [name for name, module in model.named_modules() if any(module is unit for unit in units)]


def test_each_outermost_block_is_a_unit() -> None:
    assert names_of(gpt(vocab_size=5, block_size=4, layers=2, heads=1, d_model=4)) == ["blocks.0", "blocks.1"]
    assert names_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))) == [
        "0",
        "2.0",
    ]
    found = names_of(resnet(depth=8, classes=4, width=3))
    assert len(found) == len(set(found)) >= 3


def test_what_shares_a_parameter_with_another_is_gathered_with_it() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(3))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(3, 3)})
    assert names_of(model) == [f"blocks.{number}.{part}" for number in range(3) for part in range(2)]
    wrapped = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(4))
    wrapped[1].linear1.weight = wrapped[2].linear1.weight
    assert names_of(wrapped) == ["0", "3"]
    tied = nn.ModuleDict({"blocks": nn.ModuleList([nn.Bilinear(3, 3, 3), nn.Linear(3, 3)]), "head": nn.Linear(3, 3)})
    tied["head"].weight = tied["blocks"][1].weight
    assert names_of(tied) == ["blocks.0"]
    twice = nn.Linear(3, 3)
    assert names_of(nn.Sequential(twice, nn.Tanh(), twice)) == ["0"]
