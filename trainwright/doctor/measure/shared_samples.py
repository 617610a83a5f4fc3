"""Samples of a validation set that are trained on, too: by their positions in one data set, or by their content."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainwright.doctor.facts.data import SharedSamplesFacts
from trainwright.doctor.measure.digests import is_continuous, row_digests
from trainwright.recorder.datasets import base_of, length_of
from trainwright.runlog.json_values import Facts, strict

MOST_ROWS = 1 << 18
"""Rows of a tensor that are compared: of a larger set so many, drawn at random."""


def shared_samples(train: object, held_out: object) -> Facts | None:
    """Which samples of a validation set are trained on, too. None where that cannot be told without reading samples."""
    found = _by_position(train, held_out) or _by_tensors(train, held_out)
    return None if found is None else dict(strict(vars(found)))


def _by_position(train: object, held_out: object) -> SharedSamplesFacts | None:
    """Both are parts of one data set: which positions they share. None where they are not."""
    (base, trained), (other, held) = base_of(train), base_of(held_out)
    size = length_of(base)
    if base is not other or size is None:
        return None
    trained_on = set(range(size) if trained is None else map(int, trained))
    positions = set(range(size) if held is None else map(int, held))
    return SharedSamplesFacts(
        by="position",
        samples=len(positions),
        compared=len(positions),
        shared=len(positions & trained_on),
        trained=len(trained_on),
        trained_compared=len(trained_on),
    )


def _by_tensors(train: object, held_out: object) -> SharedSamplesFacts | None:
    """Both hold their samples as rows of tensors, which are compared by their content."""
    one, other = _tensors(train), _tensors(held_out)
    if one is None or other is None or len(one[0]) != len(other[0]):
        return None
    (trained, size), (held, number) = one, other
    digests = row_digests(trained), row_digests(held)
    if digests[0] is None or digests[1] is None:
        return None
    rows, counts = digests[1].tolist(), Counter(digests[0].tolist())
    compared = counts.total()
    repeats = compared - len(counts) + (not is_continuous(held))  # rows of whole numbers that are equal by chance
    return SharedSamplesFacts(
        by="content",
        samples=number,
        compared=len(rows),
        shared=sum(each in counts for each in rows),
        trained=size,
        trained_compared=compared,
        by_chance=2.0 * repeats * len(rows) / max(1, compared),
    )


def _tensors(dataset: object) -> tuple[list[torch.Tensor], int] | None:
    """The tensors of its samples on the CPU, and how many samples it has."""
    base, positions = base_of(dataset)
    if not isinstance(base, TensorDataset) or any(each.device.type != "cpu" for each in base.tensors):
        return None
    chosen: Any = slice(None) if positions is None else torch.as_tensor(positions)
    size = len(base) if positions is None else len(positions)
    if size > MOST_ROWS:  # a stride may miss what is shared at another one
        drawn = torch.randperm(size, generator=torch.Generator().manual_seed(size))[:MOST_ROWS]
        chosen = drawn if positions is None else chosen[drawn]
    return [each[chosen] for each in base.tensors], size
