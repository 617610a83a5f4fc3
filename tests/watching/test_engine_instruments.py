"""A run of the engine is examined with the instruments of any other loop, and trains the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw

pytestmark = pytest.mark.slow


def made(seed: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch, data: Any, val: Any, **options: Any) -> tuple[tw.Result, Any]:
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    result = tw.fit(model, data, "cross_entropy", val=val, lr=0.01, optimizer="adamw", seed=0, quiet=True, **options)
    return result, model


def batches(x: Tensor, y: Tensor) -> Any:
    return lambda: zip(x.split(16), y.split(16))


@pytest.mark.parametrize("is_leaked", [True, False], ids=["leak", "healthy"])
def test_validation_samples_in_a_stream_of_batches_are_found(
    is_leaked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample has an identity there: the rows that reach the model are compared."""
    (x, y), (held_x, held_y) = made(1, 160), made(2, 64)
    if is_leaked:
        x, y = torch.cat([x[:128], held_x[:32]]), torch.cat([y[:128], held_y[:32]])
    result, _ = fit(tmp_path, monkeypatch, batches(x, y), (held_x, held_y), epochs=4)
    assert ("data.train_val_overlap" in [each.code for each in result.findings]) is is_leaked


def test_the_engine_trains_the_same_bits_with_and_without_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, is_watched in (("watched", True), ("plain", False)):
        folder = tmp_path / name
        folder.mkdir()
        result, model = fit(
            folder,
            monkeypatch,
            made(1, 160),
            made(2, 64),
            epochs=3,
            batch=16,
            accumulation=2,
            clip=1.0,
            settings={"log.doctor": is_watched},
        )
        runs.append((result.step, model.state_dict(), torch.get_rng_state()))
    (steps, watched, rng), (plain_steps, plain, plain_rng) = runs
    assert steps == plain_steps and torch.equal(rng, plain_rng)
    assert all(torch.equal(value, plain[name]) for name, value in watched.items())
