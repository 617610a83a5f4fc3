"""Misaligned labels are found by nearest neighbours."""

from __future__ import annotations

import torch

from trainwright.commands.check.data import alignment
from trainwright.commands.check.samples import DatasetSample, SampleItem

CLASSES, WIDTH = 8, 24
CENTRES = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))


def some(count: int, seed: int, *, noise: float) -> DatasetSample:
    """Samples of classes that overlap, drawn anew each time: by so much noise."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=drawn)
    inputs = CENTRES[labels] + noise * torch.randn(count, WIDTH, generator=drawn)
    items = [SampleItem(n, (x,), y) for n, (x, y) in enumerate(zip(inputs, labels))]
    return DatasetSample(count, items, random=True)


def words(train: DatasetSample, val: DatasetSample) -> tuple[str, bool]:
    found = alignment(train, val)
    assert found is not None
    return found[0].word, "hides the class" in found[0].seen


def test_fewer_samples_have_farther_neighbours() -> None:
    """Where only a few were read in time, neighbours tell less: that is not what the augmentation does."""
    for seed in range(1, 20):
        few, many = some(64, seed, noise=2.6), some(1024, 100 + seed, noise=2.6)
        assert words(few, many)[0] != "fail", seed


def test_an_augmentation_that_hides_the_class_is_told() -> None:
    assert words(some(512, 1, noise=50.0), some(512, 2, noise=0.5)) == ("fail", True)
    assert words(some(64, 1, noise=50.0), some(512, 2, noise=0.5)) == ("fail", True)  # of as many samples
