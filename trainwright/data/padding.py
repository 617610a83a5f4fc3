"""Batches of sequences of different lengths, padded to the longest, so that padding is not counted.

Shapes: B batch, T the longest sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright.errors import UsageError

IGNORE = -100
"""A target that no loss counts."""
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping that hold the target."""

ATTENTION_KEY = "attention_mask"


class Padding:
    """A collate function that pads each field whose first dimension differs between samples.

    The last field of a tuple is the target. Samples that are mappings get two further keys: ``mask`` (B, T), True where
    the first sequence field is not padded, and its ``lengths`` (B,). Samples with an ``attention_mask``, as tokenizers
    return it, get only that, padded with 0.
    """

    def __init__(self, value: float = 0, target: int = IGNORE, multiple_of: int = 1) -> None:
        self.value = value
        self.target = target
        self.multiple_of = multiple_of

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {name: self._named(name, [each[name] for each in samples]) for name in first}
            return batch if ATTENTION_KEY in first else batch | self._mask(samples)
        if isinstance(first, tuple | list):
            last = len(first) - 1
            return tuple(
                self._field([each[at] for each in samples], self.value, at == last and last > 0)
                for at in range(len(first))
            )
        return self._field([*samples], self.value)

    def _named(self, name: str, values: list[Any]) -> Any:
        return self._field(values, 0 if name == ATTENTION_KEY else self.value, name in TARGET_KEYS)

    def _field(self, values: list[Any], value: float, is_target: bool = False) -> Any:
        if not _is_ragged(values):
            return default_collate(values)
        rows = [torch.as_tensor(row) for row in values]
        longest = -(-max(map(len, rows)) // self.multiple_of) * self.multiple_of
        fill = self.target if is_target and not rows[0].is_floating_point() else value
        padded = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), fill)
        for row, unpadded in zip(padded, rows, strict=True):
            row[: len(unpadded)] = unpadded
        return padded

    def _mask(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        name = next((name for name, value in samples[0].items() if _length(value)), None)
        if name is None:
            return {}
        lengths = torch.tensor([_length(each[name]) for each in samples], device="cpu")
        longest = -(-int(lengths.max()) // self.multiple_of) * self.multiple_of
        return {"mask": torch.arange(longest, device="cpu") < lengths[:, None], "lengths": lengths}


def pad(value: float = 0, *, target: int = IGNORE, multiple_of: int = 1) -> Callable[[Sequence[Any]], Any]:
    """Return a ``collate_fn`` that pads sequences to the longest of the batch.

    Args:
        value: Padding of inputs.
        target: Padding of integer targets; no loss counts the default, -100.
        multiple_of: Round the padded length up to a multiple of this, for tensor cores.

    Returns:
        A function for ``DataLoader(..., collate_fn=...)``.

    Raises:
        UsageError: ``multiple_of`` is less than 1.
    """
    if multiple_of < 1:
        raise UsageError(f"multiple_of={multiple_of} is no length", remedy="give 8, or leave it out")
    return Padding(value, target, multiple_of)


def differ_in_length(samples: Sequence[Any]) -> bool:
    """Return True if samples have a sequence field of different lengths, which has to be padded."""
    fields: Sequence[Any] = [samples]
    if all(isinstance(each, Mapping) for each in samples):
        shared = set.intersection(*(set(each) for each in samples))
        fields = [[each[name] for each in samples] for name in shared]
    elif all(isinstance(each, tuple | list) for each in samples):
        fields = [samples, *zip(*samples, strict=False)]
    return any(all(map(_length, field)) and len(set(map(_length, field))) > 1 for field in fields)


def _length(value: object) -> int:
    """Return the length of a sequence; 0 for a number or a string."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    if hasattr(value, "shape"):
        return int(value.shape[0]) if value.shape else 0
    return len(value) if isinstance(value, list | tuple) else 0


def _is_ragged(values: list[Any]) -> bool:
    """Return True if the values are sequences of numbers that may differ in length in this or another batch."""
    if isinstance(values[0], list):
        return True
    return _length(values[0]) > 0 and len({_length(value) for value in values}) > 1
