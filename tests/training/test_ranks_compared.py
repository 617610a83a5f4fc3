"""The ranks of a run of our own engine are compared while they train: faults of one rank are named with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks
from trainwright.runs.findings import findings_in
from trainwright.runs.reader import read
from trainwright.runs.records import Found

pytestmark = [pytest.mark.examined, pytest.mark.process, pytest.mark.slow]

FIT = """
import os, sys, time
import torch
from torch import nn
import trainwright as tw

rank, fault = int(os.environ["RANK"]), sys.argv[1]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
x, y = torch.randn(96, 12), torch.randint(5, (96,))
calls = 0

def loss(model, batch):
    global calls
    calls += torch.is_grad_enabled()
    if rank == 1 and calls == 7 and fault == "flip":
        model[3].weight.data.view(torch.int32).view(-1)[5] ^= 1 << 22
    if rank == 1 and fault == "slow":
        time.sleep(0.02)
    output = model(batch[0])
    total = nn.functional.cross_entropy(output, batch[1], reduction="sum")
    return tw.Loss(total * float("nan") if rank == 1 and calls == 7 and fault == "nan" else total, len(batch[1]))

settings = {"batch.size": 8, "schedule.use": "constant", "log.every": "1steps"}
tw.fit(model, (x, y), loss, until="30steps", lr=1e-2, precision="fp32", settings=settings)
"""


def findings(folder: Path, fault: str) -> tuple[list[Found], str]:
    """The findings in the log of the first rank, and what it prints."""
    done = ranks.run(FIT, 2, fault, cwd=folder)
    printed = done[0].stdout + done[0].stderr
    assert all(each.returncode == 0 for each in done), printed + done[1].stderr
    return findings_in(read(folder / "runs/run/log.jsonl").records), printed


@pytest.mark.parametrize(
    ("fault", "code"),
    [("nan", "ranks.nonfinite_loss"), ("flip", "resources.silent_corruption"), ("slow", "ranks.straggler")],
)
def test_a_fault_of_one_rank_is_named(tmp_path: Path, fault: str, code: str) -> None:
    found, printed = findings(tmp_path, fault)
    assert [each.code for each in found] == [code], printed
    assert found[0].where.rank == 1 and code in printed
    if fault != "slow":
        assert found[0].since_step in (6, 7)


def test_healthy_ranks_are_said_to_be_compared(tmp_path: Path) -> None:
    found, printed = findings(tmp_path, "none")
    assert found == [] and "the ranks were compared in 9 steps: nothing found" in printed
