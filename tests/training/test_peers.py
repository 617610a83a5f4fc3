"""Steps are replayed on other ranks: a rank whose backward pass flips a bit is named, with tensor and step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import ranks
from trainwright.runs.findings import findings_in
from trainwright.runs.reader import read
from trainwright.runs.records import Found, Step

pytestmark = [pytest.mark.examined, pytest.mark.process, pytest.mark.slow]

FIT = """
import os, sys
import torch
from torch import nn
import trainwright as tw
from trainwright.engine import peers

fault, faulty, peers.INTERVAL_STEPS = sys.argv[1], *map(int, sys.argv[2:])
rank = int(os.environ["RANK"])

class Wire(nn.Module):
    '''The identity. In the backward pass of the faulty rank one bit of one number flips.'''

    step = num_passes = 0

    def forward(self, x):
        if torch.is_grad_enabled() and rank == faulty:
            x.register_hook(self.flip)
        return x

    def flip(self, gradient):
        Wire.num_passes += 1  # three micro-batches: 1 to 3 replay one rank, 4 to 6 the next one, 7 to 9 are its own
        flips = {"once": Wire.num_passes == 8, "in_replay": Wire.num_passes == 2, "always": True, "often": True}
        if Wire.step < 16 or not flips.get(fault):
            return None
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[Wire.num_passes if fault == "often" else 3] ^= 1 << 20
        return flipped

def step_begins(self, state, *rest, original=peers.Peers.step_begins):
    Wire.step, Wire.num_passes = state.step + 1, 0
    original(self, state, *rest)

peers.Peers.step_begins = step_begins

class Chance(nn.Module):
    '''A layer that draws from the system, so no pass can be repeated.'''

    def forward(self, x):
        return x * (1 + int.from_bytes(os.urandom(1), "little") / 1e4) if fault == "chance" else x

torch.manual_seed(3)
layers = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), Wire(), Chance(), nn.Dropout(0.2), nn.Linear(32, 5)
model = nn.Sequential(*layers)
x, y = torch.randn(96, 12), torch.randint(5, (96,))

def loss(output, target):
    tw.log(largest=output.detach().max())
    return nn.functional.cross_entropy(output, target)

size = 6 * int(os.environ["WORLD_SIZE"])
settings = {"batch.size": size, "batch.micro": 2, "schedule.use": "constant", "deterministic": True}
settings["log.every"] = "1steps"
tw.fit(model, (x, y), loss, until="18steps", lr=1e-2, precision="fp32", settings=settings)
"""


def run(folder: Path, fault: str, size: int, faulty: int = -1, interval: int = 8) -> list[Found]:
    """The findings in the log of the first rank."""
    ranks.finish(FIT, size, fault, str(faulty), str(interval), cwd=folder)
    return findings_in(read(folder / "runs/run/log.jsonl").records)


@pytest.mark.parametrize(
    ("fault", "size", "faulty", "named"),
    [
        ("once", 2, 1, 1),
        ("in_replay", 2, 0, 0),
        ("often", 2, 0, 0),
        ("always", 2, 1, None),  # both ranks get their own gradients again, so the program cannot know which is right
        ("always", 3, 1, 1),
    ],
)
def test_a_bit_that_flips_in_a_backward_pass_is_found(
    tmp_path: Path, fault: str, size: int, faulty: int, named: int | None
) -> None:
    found = run(tmp_path, fault, size, faulty)
    assert [(each.code, each.where.rank, each.since_step) for each in found] == [
        ("resources.silent_corruption", named, 16)
    ]
    assert "gradient of 1.bias" in found[0].symptom, "the parameter that the backward pass reaches first after the flip"


def test_a_program_that_cannot_be_repeated_is_not_reported(tmp_path: Path) -> None:
    assert run(tmp_path, "chance", 2) == []


def test_replays_leave_no_trace_in_healthy_training(tmp_path: Path) -> None:
    runs = [tmp_path / "with", tmp_path / "without"]
    assert [run(folder, "none", 2, interval=interval) for folder, interval in zip(runs, (8, 1000))] == [[], []]
    logged, usual = (
        [(each.step, each.loss, each.grad_norm, each.probed) for each in read(log).records if isinstance(each, Step)]
        for log in (each / "runs/run/log.jsonl" for each in runs)
    )
    assert logged == usual and "largest" in logged[15][3]
    header = json.loads((runs[0] / "runs/run/plan.json").read_text())["header"]["settings"]
    assert [each["origin"] for each in header if each["name"] == "replays" and "twice more" in each["value"]] == [
        "configured"
    ]
    weights, plain = (ranks.tensors_in(next((each / "runs/run/checkpoints").glob("step-*18"))) for each in runs)
    assert {name for name in plain if not torch.equal(weights[name], plain[name])} == set() and len(plain) > 8
