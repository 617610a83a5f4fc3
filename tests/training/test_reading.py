"""How long a step waits for its data is measured before the first step, and advice follows from the measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import trainwright as tw
from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.data.unwrap import unwrap
from trainwright.errors import DataError
from trainwright.plan.explain import preflight
from trainwright.plan.run_time import ReadingPace
from trainwright.recipe import from_mapping
from trainwright.training.first_batch import MAX_MEASURED_STEPS, time_workers
from trainwright.training.prepare import prepare
from trainwright.training.run import train

READING_S = 2e-3


class Rows(Dataset[Any]):
    """Rows whose reading takes a given time."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.sleep_s)
        return torch.full((8,), float(index)), torch.tensor(index % 3)


def recipe(tmp_path: Path, sleep_s: float = 0.0, **data: Any) -> dict[str, Any]:
    train = {"use": "tests.training.test_reading:Rows", "args": {"sleep_s": sleep_s}}
    return {
        "until": "100steps",
        "precision": "fp32",
        "folder": str(tmp_path),
        "model": {"use": "mlp", "args": {"sizes": [8, 8, 3]}},
        "data": {"train": train, **data},
        "batch": {"size": 8, "micro": 4},
    }


class Clock:
    """Moves on by a microsecond at each look, and by what a batch takes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def stream(clock: Clock, wait_s: float, read_s: float, ready: int) -> Iterator[StepBatch]:
    """Batches of two micro-batches; the first ``ready`` are there at once."""
    for n in range(1000):
        clock.now_s += wait_s if n >= ready else 0.0
        micro = MicroBatch(torch.zeros(4), np.arange(4))
        yield StepBatch((micro, micro), read_s=read_s)


def test_what_was_ready_before_does_not_count() -> None:
    clock = Clock()
    pace, _ = time_workers(
        stream(clock, 0.01, 0.002, ready=3), workers=2, prefetch=2, compute_s=1e-4, start_s=0.2, clock=clock
    )
    assert pace.wait_s == pytest.approx(0.01, rel=1e-2) and pace.read_s == pytest.approx(0.002)
    assert pace.steps == MAX_MEASURED_STEPS and pace.start_s == 0.2


def test_no_batch_is_lost() -> None:
    clock = Clock()
    ids = [StepBatch((MicroBatch(n, np.array([n])),)) for n in range(100)]
    _, batches = time_workers(iter(ids), workers=1, prefetch=2, compute_s=0.0, start_s=0.0, clock=clock)
    assert [batch.data for batch in batches] == list(range(100))


def test_a_batch_that_cannot_be_read_raises_at_its_own_step() -> None:
    def torn() -> Iterator[StepBatch]:
        for n in range(3):
            yield StepBatch((MicroBatch(n, np.array([n])),))
        raise DataError("sample 3 is torn")

    _, batches = time_workers(torn(), workers=1, prefetch=2, compute_s=0.0, start_s=0.0, clock=Clock())
    assert [next(batches).data for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="sample 3 is torn"):
        next(batches)


def test_slow_batches_end_the_measurement() -> None:
    """Where none came after those that were ready, the wait is estimated, and not called a measurement."""
    clock = Clock()
    pace, _ = time_workers(
        stream(clock, 5.0, 4.0, ready=0), workers=2, prefetch=2, compute_s=0.5, start_s=5.0, clock=clock
    )
    assert pace.steps == 0 and pace.wait_s == pytest.approx(4.0 / 2 - 0.5)
    assert pace.notes() == ()


@pytest.mark.parametrize(
    ("pace", "words", "not_words"),
    [
        (ReadingPace(2, wait_s=0.013, read_s=0.002, steps=8), "data.workers: 0", "profile"),
        (ReadingPace(2, wait_s=0.013, read_s=0.030, steps=8), "profile", "data.workers: 0"),
        (ReadingPace(0, wait_s=0.013, read_s=0.013), "profile", "data.workers: "),
    ],
    ids=["cheap items", "slow items", "no workers"],
)
def test_no_number_of_workers_is_recommended_without_a_measurement(
    pace: ReadingPace, words: str, not_words: str
) -> None:
    assert words in pace.advice() and not_words not in pace.advice()


@pytest.mark.slow
def test_the_verdict_on_a_run_recommends_only_what_it_measured(tmp_path: Path) -> None:
    asked = recipe(tmp_path, READING_S) | {"until": "12steps", "log": {"doctor": False}}
    verdict = train(from_mapping(asked), quiet=True).verdict
    assert "waiting for data (`trainwright profile` measures whether" in str(verdict)


def test_a_run_of_ready_batches_is_sent_to_its_loader(tmp_path: Path) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(6):
            time.sleep(10 * READING_S)
            yield torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)

    settings: dict[str, object] = {"folder": str(tmp_path), "log.doctor": False}
    verdict = tw.fit(nn.Linear(8, 3), batches, nn.CrossEntropyLoss(), epochs=1, quiet=True, settings=settings).verdict
    assert "waiting for data (time a loop over the loader alone" in str(verdict)


def test_the_readme_recommends_no_number_of_workers() -> None:
    assert re.findall(r"workers: *\d|num_workers=\d", (Path(__file__).parents[2] / "README.md").read_text()) == []


@pytest.mark.slow
@pytest.mark.process
def test_the_plan_times_the_workers(tmp_path: Path) -> None:
    job = prepare(from_mapping(recipe(tmp_path, READING_S, workers=1)))
    assert job.measured.reading.steps and job.measured.reading.read_s >= 8 * READING_S
    assert job.plan.predicted.step_s is not None and job.plan.predicted.wait_s == job.measured.reading.wait_s > 0
    assert job.plan.predicted.step_s > job.plan.predicted.wait_s
    lines = preflight(job.plan, 0.0)
    assert any(line.startswith("workers     1: measured in the dry run") for line in lines)
    assert any(line.startswith("time ") and "waiting for data" in line for line in lines)
    first = next(job.batches)
    assert first.cursor.position == 8 and first.read_s >= 8 * READING_S


def test_items_that_are_read_fast_need_no_workers() -> None:
    clock = Clock()
    batches = stream(clock, wait_s=0.013, read_s=0.002, ready=4)
    pace, _ = time_workers(batches, workers=2, prefetch=2, compute_s=1e-4, start_s=0.1, clock=clock)
    assert "data.workers: 0" in pace.advice()
    assert "data.workers: 0 is faster" in pace.notes()[0].why


def test_tensors_that_are_read_several_steps_at_once_cost_each_step_its_part(tmp_path: Path) -> None:
    """The first batch of a TensorDataset is taken out of it together with the next ones."""
    asked = recipe(tmp_path)
    asked["data"]["train"] = {"use": "tests.commands.check.parts:blobs"}
    asked["model"] = {"use": "tests.commands.check.parts:net"}
    job = prepare(from_mapping(asked))
    assert job.measured.reading.wait_s == pytest.approx(job.measured.reading.start_s / 32)


class Follows(Sampler[int]):
    """An order that may depend on what the training has done meanwhile."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4096)

    def __len__(self) -> int:
        return 4096


@pytest.mark.slow
@pytest.mark.process
def test_nothing_is_read_ahead_of_a_sampler_that_may_follow_the_training(tmp_path: Path) -> None:
    loader = DataLoader(Rows(), 8, sampler=Follows(), num_workers=1)
    asked = recipe(tmp_path, workers=1) | {"model": {"use": "live:mlp"}}
    job = prepare(from_mapping(asked), Parts(nn.Linear(8, 3), unwrap(loader), {}, nn.CrossEntropyLoss()))
    assert job.measured.reading.steps == 0 and job.plan.predicted.step_s is not None
