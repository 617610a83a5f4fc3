"""An epoch of data that do not tell its length is counted before the run, and leaves no trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import trainwright as tw
from trainwright.data import unwrap
from trainwright.errors import RecipeError

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Six; their order is drawn anew in each pass."""
    for ids in torch.randperm(60).split(10):
        yield X[ids], Y[ids]


class Samples(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[n], Y[n]) for n in range(60)])


class InTens(Sampler[list[int]]):
    """A batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(60).reshape(6, 10).tolist())


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(60)[:40].tolist())


ROWS = TensorDataset(X, Y)


def trained(data: object, folder: Path, **length: int) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    done = tw.fit(
        model, data, nn.CrossEntropyLoss(), quiet=True, settings={"folder": str(folder), "log.doctor": False}, **length
    )
    return done.step, [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (batches, 12),
        (Samples(), 4),
        (DataLoader(Samples(), batch_size=None), 120),
        (DataLoader(Samples(), 20), 6),
        (DataLoader(ROWS, batch_sampler=InTens()), 12),
        (DataLoader(ROWS, 10, sampler=Lengthless()), 8),
    ],
)
def test_epochs_of_a_stream_are_as_many_steps(data: object, steps: int, tmp_path: Path) -> None:
    in_epochs, weights = trained(data, tmp_path, epochs=2)
    in_steps, expected = trained(data, tmp_path, steps=steps)
    assert in_epochs == in_steps == steps
    assert all(torch.equal(one, other) for one, other in zip(weights, expected))


def test_data_that_can_be_iterated_once_are_not_used_up(tmp_path: Path) -> None:
    data = batches()
    with pytest.raises(RecipeError, match="can be iterated once"):
        trained(data, tmp_path, epochs=2)
    assert len(list(data)) == 6


def test_a_stream_without_an_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwrap, "MAX_COUNTING_S", 0.05)
    with pytest.raises(RecipeError, match="there was no end of one"):
        trained(lambda: itertools.cycle(batches()), tmp_path, epochs=1)


class TooLong(Samples):
    def __len__(self) -> int:
        return 100


class TooLongBatches:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches()

    def __len__(self) -> int:
        return 10


class TooLongSampler(InTens):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TooLongBatches(), "6 batches, but len() of the TooLongBatches is 10,"),
        (DataLoader(TooLong(), 20), "60 samples, but len() of the TooLong is 100,"),
        (DataLoader(ROWS, batch_sampler=TooLongSampler()), "6 batches, but len() of the TooLongSampler is 10,"),
    ],
    ids=["batches", "stream", "batch sampler"],
)
def test_a_wrong_length_is_reported_once(
    data: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), epochs=2, settings={"folder": str(tmp_path)})
    assert capsys.readouterr().out.count(f"epoch       {message}") == 1
