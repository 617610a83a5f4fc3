"""Gradients that copies of a model send in bf16 or as factors (PowerSGD): how far off, and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, sys
import torch
from torch import nn
import trainwright as tw

class Net(nn.Module):
    def __init__(self, rare_above):
        super().__init__()
        layers = nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 3)
        self.layers, self.rare, self.rare_above = nn.Sequential(*layers), nn.Linear(24, 3), rare_above

    def forward(self, x):
        output = self.layers(x)
        return output + self.rare(x) if x[:, 0].max() > self.rare_above else output

given = json.loads(sys.argv[1])
torch.manual_seed(3)
model = Net(given.pop("rare_above", float("inf")))
before = nn.utils.parameters_to_vector(model.parameters()).detach()
draw = torch.Generator().manual_seed(0)
x, y = torch.randn(48, 24, generator=draw), torch.randint(3, (48,), generator=draw)
exec(given.pop("change", ""))

def loss(model, batch):
    output = model(batch[0])
    return tw.Loss(nn.functional.cross_entropy(output, batch[1], reduction="sum"), float(len(output)))

until, resume = given.pop("until", "10steps"), given.pop("resume", None)
result = tw.fit(model, (x, y), loss, until=until, lr=0.1, quiet=True, resume=resume,
                settings={"optimizer.use": "sgd", "optimizer.args.momentum": 0.0, "optimizer.clip.by": "none",
                          "schedule.use": "constant", "precision": "fp32", "batch.size": 12, "log.every": "1steps",
                          "log.doctor": False, "checkpoint.every": "5steps", **given})
kept = result.state.stateful.get("powersgd")
errors = [each.double().tolist() for each in kept._memory.error_dict.values()] if kept else []
moved = float((nn.utils.parameters_to_vector(model.parameters()) - before).abs().max())
print(json.dumps({"skipped": result.skipped, "errors": errors, "loss": result.loss, "moved": moved}))
"""
POWER = {"parallel.compress": "powersgd", "parallel.compress_rank": 2, "parallel.compress_after": 3}


def trained(count: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the report of each rank on its run."""
    return ranks.reports(FIT, count, json.dumps(settings), cwd=folder)


def weights(folder: Path, step: int = 10) -> dict[str, torch.Tensor]:
    return ranks.tensors_in(folder / f"runs/run/checkpoints/step-{step:08d}")


def distance(one: Path, other: Path, step: int = 10) -> float:
    mine, theirs = weights(one, step), weights(other, step)
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_in_bf16_a_gradient_is_off_by_its_roundings(tmp_path: Path) -> None:
    """A rounding is 2^-9 of a number: of what each of two ranks sends, and of their sum; they may cancel in the sum."""
    [whole, _] = trained(2, tmp_path / "whole", until="1steps")
    same, other = trained(2, tmp_path / "bf16", until="1steps", **{"parallel.compress": "bf16"})
    assert same == other
    assert 0 < distance(tmp_path / "bf16", tmp_path / "whole", 1) < 3 * 2**-9 * 2 * whole["moved"]


def test_what_powersgd_leaves_out_comes_later(tmp_path: Path) -> None:
    """With SGD the weights and the errors of all ranks together are where whole sums of the same gradients lead.

    In the first steps all is sent: the same bits. In the first that is compressed, before which the weights are the
    same, what was applied and what is owed are the whole gradient: rate times the mean of the errors apart.
    """
    trained(2, tmp_path / "whole", until="4steps")
    each_rank = trained(2, tmp_path / "power", until="4steps", **POWER)
    trained(2, tmp_path / "before", until="3steps", **POWER)
    assert distance(tmp_path / "power", tmp_path / "whole", 4) > 1e-4
    [first], [second] = (rank["errors"] for rank in each_rank)
    owed = 0.1 * (torch.tensor(first) + torch.tensor(second))
    names = [f"layers.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")]
    flat = [torch.cat([weights(tmp_path / run, 4)[name].flatten() for name in names]) for run in ("power", "whole")]
    # what rounding of the products of 40 x 2 factors leaves, and of the sums
    torch.testing.assert_close(flat[0] - owed, flat[1], rtol=0, atol=100 * torch.finfo(torch.float32).eps)


def test_a_resume_of_powersgd_has_the_same_bits_and_other_ranks_lose_nothing(tmp_path: Path) -> None:
    undisturbed = trained(2, tmp_path / "undisturbed", **POWER)
    trained(2, tmp_path / "resumed", until="5steps", **POWER)
    resumed = trained(2, tmp_path / "resumed", resume="runs/run", **POWER)
    assert resumed == undisturbed and distance(tmp_path / "resumed", tmp_path / "undisturbed") == 0
    trained(2, tmp_path / "three", until="5steps", **POWER)
    trained(3, tmp_path / "three", resume="runs/run", **POWER)
    assert distance(tmp_path / "three", tmp_path / "undisturbed") < 1e-5


def test_a_step_that_is_skipped_leaves_nothing_in_the_error_of_powersgd(tmp_path: Path) -> None:
    each_rank = trained(2, tmp_path, **POWER, change="x[30] = float('nan')")
    assert all(rank["skipped"] > 0 for rank in each_rank[:1])
    assert all(torch.tensor(rank["errors"]).isfinite().all() for rank in each_rank)
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_a_parameter_without_a_gradient_in_some_steps_is_no_trouble(tmp_path: Path) -> None:
    """Such steps are summed whole, and a resume among them has the same bits."""
    undisturbed = trained(2, tmp_path / "undisturbed", rare_above=1.5, **POWER)
    trained(2, tmp_path / "resumed", rare_above=1.5, until="7steps", **POWER)
    assert trained(2, tmp_path / "resumed", rare_above=1.5, resume="runs/run", **POWER) == undisturbed
    assert distance(tmp_path / "resumed", tmp_path / "undisturbed") == 0
    sizes = {len(error) for rank in undisturbed for error in rank["errors"]}
    assert len(sizes) == 1 and undisturbed[0]["moved"] > 0
