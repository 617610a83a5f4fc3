"""A run that was saved, lost and resumed goes on as the run that was never interrupted: the same bits of everything."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from trainwright.checkpoint.average import Ema, NoAverage
from trainwright.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from trainwright.checkpoint.codec import encode, same_bits
from trainwright.checkpoint.rng import RngBag, seed_all
from trainwright.checkpoint.store import newest_valid
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import Loading, StepBatches
from trainwright.engine.loop import for_steps, steps
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.step import make_step
from trainwright.optim.clip import make_clip
from trainwright.optim.muon import Muon, muon_groups

SAMPLES, BATCH, MICRO, STEPS = 29, 8, 3, 11  # 4 steps an epoch, the last of them short


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Each item draws from all three global generators. ``bad`` has a NaN."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        y = x[:3].argmax()
        x = x + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return (x * math.nan if index == self.bad else x), y


class Net(nn.Module):
    """BatchNorm, dropout, and one matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.norm, self.dropout = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm(self.input(x))))
        out: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2),
    "adamw-fused": lambda model: AdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "muon": lambda model: Muon(muon_groups(model, lr=0.02, weight_decay=0.1), lr=0.02),
}


def fresh(optimizer: str, precision: Precision, ema: bool, seed: int) -> TrainState:
    seed_all(seed)
    model = Net()
    scaler = precision.scaler(torch.device("cpu"))
    return TrainState(model, OPTIMIZERS[optimizer](model), scaler, Ema(model, 0.8) if ema else NoAverage())


def train(state: TrainState, until: int, precision: Precision, bad: int | None, workers: int) -> list[tuple[int, ...]]:
    """Returns the sample ids of each step."""
    loading = Loading(BATCH, MICRO, seed=5, workers=workers)
    batches = StepBatches(Augmented(bad), loading, cursor=state.data)
    advance = make_step(
        F.cross_entropy,
        precision=precision,
        clip=make_clip("norm", 1.0),
        schedule=lambda step, fraction: 1 - step / (STEPS + 1),
    )
    return [tuple(result.batch.ids.tolist()) for result in steps(state, batches, advance, until=for_steps(until))]


def everything(state: TrainState) -> tuple[dict[str, Tensor], object]:
    whole = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "ema": state.ema.state_dict(),
        "ledger": state.ledger.state_dict(),
        "rng": RngBag.capture().state_dict(),
        "counters": [state.step, state.num_samples, state.num_tokens, state.data.epoch, state.data.position],
    }
    return encode(whole)


def assert_resumes(
    folder: Path, optimizer: str, name: PrecisionName, *, ema: bool, bad: int | None, workers: int, at: int
) -> None:
    precision = Precision(name)
    whole = fresh(optimizer, precision, ema, seed=1)
    ids = train(whole, STEPS, precision, bad, workers)
    tensors, value = everything(whole)

    first = fresh(optimizer, precision, ema, seed=1)
    seen = train(first, at, precision, bad, workers)
    save_checkpoint(first, folder)
    train(first, at + 2, precision, bad, 0)  # lost with the crash

    second = fresh(optimizer, precision, ema, seed=99)  # another start, overwritten by the checkpoint
    path, broken = newest_valid(folder)
    assert path is not None
    assert broken == []
    load_checkpoint(second, path)
    assert second.step == at
    seen += train(second, STEPS, precision, bad, workers)
    again, value_again = everything(second)

    assert seen == ids
    assert value_again == value
    assert [name for name in tensors if not same_bits(tensors[name], again[name])] == []
    assert second.model.second.weight is second.model.first.weight  # type: ignore[union-attr]
    if bad is not None:
        assert second.ledger.total == sum(bad in step for step in ids)


@pytest.mark.parametrize(
    ("optimizer", "name"), [*((each, "fp32") for each in OPTIMIZERS), ("adamw", "bf16"), ("adamw", "fp16")]
)
def test_every_optimizer_and_precision(tmp_path: Path, optimizer: str, name: PrecisionName) -> None:
    assert_resumes(tmp_path, optimizer, name, ema=True, bad=None, workers=0, at=6)


@pytest.mark.parametrize("at", [4, 7, 8])  # at the end of an epoch, before its short step, after two epochs
def test_at_the_seams_of_epochs(tmp_path: Path, at: int) -> None:
    assert_resumes(tmp_path, "sgd", "fp32", ema=False, bad=None, workers=0, at=at)


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_with_skipped_steps(tmp_path: Path, name: PrecisionName) -> None:
    assert_resumes(tmp_path, "adamw", name, ema=True, bad=17, workers=0, at=6)


@pytest.mark.process
def test_with_workers_in_mid_epoch(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "adamw", "fp32", ema=True, bad=None, workers=2, at=6)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    results = []
    for saves in (False, True):
        state = fresh("adamw", Precision("fp32"), True, seed=1)
        for step in range(1, 7):
            train(state, step, Precision("fp32"), None, 0)
            if saves:
                save_checkpoint(state, tmp_path)
        results.append(everything(state))
    (a, value_a), (b, value_b) = results
    assert value_a == value_b
    assert [name for name in a if not same_bits(a[name], b[name])] == []
