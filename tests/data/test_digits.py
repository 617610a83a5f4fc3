"""The digits: split, normalisation, batches, augmentation."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trainwright.data.images import NOISE_STD, digits
from trainwright.errors import MissingExtra, UsageError

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


@pytest.mark.slow
def test_the_split_is_stratified_disjoint_and_complete() -> None:
    train, val = digits("train"), digits("val")
    assert len(train) + len(val) == 1797
    whole = torch.bincount(torch.cat([train.labels, val.labels]))
    assert torch.equal(torch.bincount(val.labels), (0.2 * whole).round().long())
    images = torch.cat([train.images, val.images]).flatten(1)
    assert torch.unique(images, dim=0).shape[0] == 1797  # no two images of the 1,797 are alike
    assert train.classes == 10 and train.deterministic


def test_images_are_normalised_over_the_training_split_and_labels_fit() -> None:
    train = digits()
    assert train.images.dtype == torch.float32 and train.images.shape[1:] == (1, 8, 8)
    assert train.images.mean().abs() < 1e-5 and abs(train.images.std().item() - 1) < 1e-3
    means = torch.stack([train.images[train.labels == k].mean(0).flatten() for k in range(10)])
    nearest = torch.cdist(digits("val").images.flatten(1), means).argmin(1)
    assert (nearest == digits("val").labels).float().mean() > 0.85  # the labels belong to the images


def test_fetch_equals_collated_items() -> None:
    data = digits()
    indices = np.array([5, 0, 1400, 5])
    images, labels = data.fetch_batch(indices)
    want_images, want_labels = default_collate([data[int(index)] for index in indices])
    assert torch.equal(images, want_images) and torch.equal(labels, want_labels)
    assert labels.dtype == torch.int64 and isinstance(data[0][1], int)


def test_each_augmented_image_is_a_shift_of_its_own() -> None:
    data = digits(augment=True)
    torch.manual_seed(1)
    images = torch.stack([data[index][0] for index in range(200)])
    padded = torch.nn.functional.pad(data.images[:200], (1, 1, 1, 1), mode="replicate")
    shifts = torch.stack([padded[:, :, r : r + 8, c : c + 8] for r in range(3) for c in range(3)])
    distance = (shifts - images).pow(2).mean(dim=(2, 3, 4)).sqrt()
    nearest = distance.min(dim=0)
    assert nearest.values.max() < 5 * NOISE_STD
    assert len(nearest.indices.unique()) == 9


def test_augmentation_draws_from_torch_and_keeps_the_stored_images() -> None:
    data = digits(augment=True)
    before, state = data.images.clone(), torch.get_rng_state()
    first, second = data[3][0], data[3][0]
    assert first.shape == (1, 8, 8) and not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(data[3][0], first)
    assert torch.equal(data.images, before) and not data.deterministic


def test_without_augmentation_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    digits()[3]
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="split must be"):
        digits("test")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="val_share"):
        digits(val_share=1.0)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(MissingExtra, match='pip install "scikit-learn>='):
        digits()
