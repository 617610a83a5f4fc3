"""Batches of sequences of different lengths, padded to the longest, so that what is padded is not counted.

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
TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping that hold the target."""

ATTENTION = "attention_mask"


class Padding:
    """A collate function: pads each field whose first dimension differs from sample to sample.

    Of samples that are tuples the last field is the target. Samples that are mappings give a batch with two further
    keys: ``mask`` (B, T), true where the first field that is a sequence is not padded, and its ``lengths`` (B,). Those
    with an ``attention_mask``, as tokenizers give it, have that alone: it is padded with 0.
    """

    def __init__(self, value: float = 0, target: int = IGNORE, multiple_of: int = 1) -> None:
        self.value, self.target, self.multiple_of = value, target, multiple_of

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {name: self._named(name, [each[name] for each in samples]) for name in first}
            return batch if ATTENTION in first else batch | self._mask(samples)
        if isinstance(first, tuple | list):
            last = len(first) - 1
            return tuple(
                self._field([each[at] for each in samples], self.value, at == last and last > 0)
                for at in range(len(first))
            )
        return self._field([*samples], self.value)

    def _named(self, name: str, values: list[Any]) -> Any:
        return self._field(values, 0 if name == ATTENTION else self.value, name in TARGETS)

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
    """A ``collate_fn`` that pads inputs with ``value`` and integer targets with ``target``, which no loss counts.

    ``multiple_of``: the padded length is a multiple of it, as tensor cores like it.
    """
    if multiple_of < 1:
        raise UsageError(f"multiple_of={multiple_of} is no length", remedy="give 8, or leave it out")
    return Padding(value, target, multiple_of)


def differ_in_length(samples: Sequence[Any]) -> bool:
    """Whether samples have a field of which each is a sequence, of different lengths, so that it has to be padded."""
    fields: Sequence[Any] = [samples]
    if all(isinstance(each, Mapping) for each in samples):
        shared = set.intersection(*(set(each) for each in samples))
        fields = [[each[name] for each in samples] for name in shared]
    elif all(isinstance(each, tuple | list) for each in samples):
        fields = [samples, *zip(*samples, strict=False)]
    return any(all(map(_length, field)) and len(set(map(_length, field))) > 1 for field in fields)


def _length(value: object) -> int:
    """Of a sequence, 0 for a number or a text."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    if hasattr(value, "shape"):
        return int(value.shape[0]) if value.shape else 0
    return len(value) if isinstance(value, list | tuple) else 0


def _is_ragged(values: list[Any]) -> bool:
    """Whether the values are sequences of numbers: those of one length in one batch may not be so in the next."""
    if isinstance(values[0], list):
        return True
    return _length(values[0]) > 0 and len({_length(value) for value in values}) > 1
