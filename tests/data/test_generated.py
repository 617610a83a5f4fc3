"""Masked text and generated shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.data.padding import IGNORE
from trainwright.data.shapes import FIGURES, shapes
from trainwright.data.text import masked_topics, python_topics
from trainwright.errors import UsageError


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_targets_are_the_chosen_characters_and_the_rest_is_the_text(split: Any) -> None:
    torch.manual_seed(0)
    masked, text = masked_topics(split, block_size=64), python_topics(split, block_size=64)
    rows = [(*masked[index], text[index][0]) for index in range(200)]
    ids, target, original = (torch.stack(each) for each in zip(*rows))
    chosen = target != IGNORE
    assert torch.equal(target[chosen], original[chosen]) and torch.equal(ids[~chosen], original[~chosen])
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.01)
    assert (ids[chosen] == masked.mask).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (ids[chosen] == original[chosen]).float().mean() == pytest.approx(0.1, abs=0.03)
    assert ids.max() == masked.mask == masked.classes - 1
    assert masked.content_sha256() != masked_topics(split, block_size=64, mask_share=0.2).content_sha256()


def test_the_validation_set_is_always_masked_alike_and_the_training_set_is_not() -> None:
    val, train = masked_topics("val"), masked_topics("train")
    assert torch.equal(val[3][0], val[3][0]) and val.deterministic
    assert not torch.equal(train[3][1], train[3][1]) and not train.deterministic
    assert not torch.equal(val[3][1] == IGNORE, val[4][1] == IGNORE)


def test_shapes_are_generated_alike_and_the_splits_differ() -> None:
    train, val = shapes(count=50), shapes("val", count=50)
    assert train.images.shape == (50, 3, 32, 32) and train.classes == 5 == len(set(train.targets.tolist()))
    assert train.content_sha256() == shapes(count=50).content_sha256() != val.content_sha256()
    assert not torch.equal(train.images, val.images)


def test_a_mask_has_the_area_of_its_figure_and_the_figure_one_colour() -> None:
    segmented, classified = (shapes(task=task, count=200, size=48) for task in ("segment", "classify"))
    assert torch.equal(segmented.images, classified.images)
    assert segmented.labels == ("background", *FIGURES) and segmented.classes == 6
    for image, mask, kind in zip(segmented.images, segmented.targets, classified.targets):
        assert set(mask.unique().tolist()) <= {0, int(kind) + 1}
        inside = image[:, mask > 0]
        assert inside.shape[1] > 20 and (inside.std(1) < 0.3).all()  # the noise alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "test"}, "split"),
        ({"task": "detect"}, "task"),
        ({"size": 4}, "size=4"),
        ({"figures": 2}, "no single"),
    ],
)
def test_wrong_options_of_shapes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        shapes(**options)
    assert caught.value.remedy
