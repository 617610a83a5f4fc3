"""Small runs whose steps tests replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.runs.folder import RunFolder

PARTS = """\
import numpy as np, random, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.linspace(0, index, 12) / 96 + 0.1 * torch.randn(12) + 0.1 * np.random.randn() + 0.1 * random.random()
        return x.float(), index % 3

class Dying(Data):
    def __getitem__(self, index):
        return super().__getitem__(index) if index != 95 else (torch.full((12,), 1e3), 0)

class Wild(Data):
    def __len__(self):
        return 600

    def __getitem__(self, index):  # two equal samples with two labels, both in step 40: one of them is wrong
        return (torch.full((12,), 1e3), index % 3) if index in (470, 471) else super().__getitem__(index % 96)

class Strict(nn.Linear):
    def forward(self, x):
        if x.max() > 100:
            raise ValueError("what a sample")
        return super().forward(x)

class Again(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)

class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 3, 4))[0][:, -1])

def net(kind):
    if kind == "lstm":
        return Lstm()
    if kind == "norm":
        inside = [nn.Linear(12, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2)]
    elif kind == "strict":
        inside = [Strict(12, 24)]
    else:
        inside = [Again(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2)))]
    return nn.Sequential(*inside, nn.Linear(24, 3))
"""
RECIPE = """\
name: tiny
until: 14steps
precision: fp32
model: {use: "parts:net", args: {kind: norm}}
data: {train: {use: "parts:Data"}, workers: 0}
batch: {size: 12, micro: 6}
optimizer: {lr: 0.01, clip: {by: norm, at: 0.5}}
checkpoint: {every: 5steps, keep: 9}
log: {every: 1steps, doctor: false}
"""


def work_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    sys.modules.pop("parts", None)
    (folder / "parts.py").write_text(PARTS)
    (folder / "tiny.yaml").write_text(RECIPE)


def train(*settings: str) -> RunFolder:
    words = [word for each in settings for word in ("--set", each)]
    done = CliRunner().invoke(app, ["train", "tiny.yaml", "--json", *words])
    assert done.exit_code == 0, done.output
    return RunFolder.open(json.loads(done.output.splitlines()[-1])["run"])
