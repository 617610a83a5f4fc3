"""A plan of a user's for divided layers is tried before the run: right outputs are not enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

TRY = """
import json, sys
from functools import partial
import torch
from torch import nn, distributed
from torch.distributed.device_mesh import init_device_mesh
import trainwright as tw
from trainwright.distributed.split_plan import split_plan
from trainwright.distributed.tensor_parallel import apply_tensor_parallelism
from trainwright.errors import UsageError
from trainwright.training.layout import divide_and_try

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up, self.norm, self.down = nn.Linear(16, 16), nn.RMSNorm(4), nn.Linear(16, 16)
        self.out = nn.Linear(16, 11)
        nn.init.zeros_(self.down.weight)

    def forward(self, ids):
        x = self.embed(ids)
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        return self.out(x + self.down(heads.flatten(-2)))

def loss(model, batch):
    ids, target = batch
    total = nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten(), reduction="sum")
    return tw.Loss(total, target.numel())

for table in json.loads(sys.argv[1]):
    torch.manual_seed(3)
    model = Own()
    plan = split_plan(model, table)
    batch = torch.arange(44).view(2, 22) % 11, torch.arange(44).view(2, 22) % 7
    try:
        divide_and_try(model, partial(apply_tensor_parallelism, model, mesh, plan, sequence=False), loss, batch, 2)
        left = [name for name, each in model.named_parameters() if each.grad is not None]
        print("same", float(model.down.weight.to_local().abs().max()), left)
    except UsageError as error:
        print(error)
distributed.destroy_process_group()
"""
GOOD = {"embed": "row", "up": "column", "norm": "per_head", "down": "row", "out": "column_gathered"}


def test_what_a_plan_leaves_out_is_found(tmp_path: Path) -> None:
    """Without ``per_head`` the outputs are right, and each rank has the gradient of the norm over its own heads."""
    without = [{key: style for key, style in GOOD.items() if key != name} for name in ("norm", "down", "up")]
    done = ranks.finish(TRY, 2, json.dumps([GOOD, *without]), cwd=tmp_path)
    for each in done:
        same, norm, down, up = each.stdout.split("\nparallel.plan")
        assert same == "same 0.0 []"
        assert "the gradient of norm.weight has the norm" in norm
        assert "the divided layers raise an error" in down and "raise an error" in up
        assert "remedy: include the modules between divided layers" in norm
