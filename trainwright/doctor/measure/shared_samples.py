"""Compares a validation set with the training set, where both are known as data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainwright.doctor.facts.data import SharedSamplesFacts
from trainwright.doctor.measure.digests import is_continuous, row_digests
from trainwright.recorder.datasets import base_of, digest_of, length_of, peek
from trainwright.runlog.json_values import Facts, strict

MOST_ROWS = 1 << 18
"""Rows of a tensor that are compared: of a larger set so many, drawn at random."""
MOST_TRAINED, MOST_HELD_OUT = 4096, 512
"""Samples that are read of any other data set: to read one may take long."""


def by_position(train: object, held_out: object) -> SharedSamplesFacts | None:
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


def by_tensors(train: object, held_out: object) -> SharedSamplesFacts | None:
    """Both hold their samples as rows of tensors, which are compared by their content."""
    rows = [_tensors(train), _tensors(held_out)]
    if None in rows:
        return None
    (trained, size), (held, number) = rows  # type: ignore[misc]
    one, other = row_digests(trained), row_digests(held)
    if one is None or other is None or len(trained) != len(held):
        return None
    return _compared(one.tolist(), other.tolist(), size, number, is_continuous=is_continuous(held))


def by_samples(train: object, held_out: object, left_out: Collection[int] = ()) -> SharedSamplesFacts | None:
    """Samples of both are read from copies of the data sets, which takes half a second at most."""
    size, number = length_of(train), length_of(held_out)
    if not size or not number or not all(hasattr(each, "__getitem__") for each in (train, held_out)):
        return None
    positions = [each for each in _positions(size, MOST_TRAINED) if each not in left_out]
    trained, held = (
        [digest_of(sample) for sample in peek(dataset, chosen)]  # type: ignore[arg-type]
        for dataset, chosen in ((train, positions), (held_out, _positions(number, MOST_HELD_OUT)))
    )
    return _compared(trained, held, size, number, is_continuous=False) if trained and held else None


def _compared(
    trained: Sequence[int], held: Sequence[int], size: int, number: int, *, is_continuous: bool
) -> SharedSamplesFacts:
    """Whole numbers may be equal by chance: the repeats within the training set show how often."""
    counts = Counter(trained)
    repeats = len(trained) - len(counts) + (not is_continuous)
    return SharedSamplesFacts(
        by="content",
        samples=number,
        compared=len(held),
        shared=sum(each in counts for each in held),
        trained=size,
        trained_compared=len(trained),
        by_chance=2.0 * repeats * len(held) / max(1, len(trained)),
    )


def _tensors(dataset: object) -> tuple[list[torch.Tensor], int] | None:
    """The tensors of its samples on the CPU, and how many samples it has."""
    base, positions = base_of(dataset)
    if not isinstance(base, TensorDataset) or any(each.device.type != "cpu" for each in base.tensors):
        return None
    chosen: Any = slice(None) if positions is None else torch.as_tensor(positions)
    size = len(base) if positions is None else len(positions)
    if size > MOST_ROWS:
        chosen = torch.as_tensor(_positions(size, MOST_ROWS))
        chosen = chosen if positions is None else torch.as_tensor(positions)[chosen]
    return [each[chosen] for each in base.tensors], size


def _positions(size: int, most: int) -> list[int]:
    """All, or so many that are drawn at random: a stride may miss what is shared at another one."""
    if size <= most:
        return list(range(size))
    drawn: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(size))[:most].tolist()
    return drawn


def shared_samples(train: object, held_out: object, *, reads: bool, left_out: Collection[int] = ()) -> Facts | None:
    """Which samples of a validation set are trained on, too. None where that cannot be told.

    ``reads``: samples may be read, which is needed where the data are neither parts of one set nor tensors.
    ``left_out``: positions in the training set that are not read, because they cannot be.
    """
    found = by_position(train, held_out) or by_tensors(train, held_out)
    if found is None and reads:
        with suppress(Exception):  # of the user's data set
            found = by_samples(train, held_out, left_out)
    return None if found is None else dict(strict(vars(found)))
