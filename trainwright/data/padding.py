"""Collates sequences of different lengths: pads them to the longest, with targets that no loss counts. Token ids may
also be packed or padding-free.

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

ATTENTION_KEY, IDS = "attention_mask", "input_ids"


class Padding:
    """A collate function that pads each field whose first dimension differs between samples.

    The last field of a tuple is the target. Samples that are mappings get two further keys: ``mask`` (B, T), True where
    the first sequence field is not padded, and its ``lengths`` (B,). Samples with ``input_ids`` or an
    ``attention_mask`` get only an ``attention_mask``, as tokenizers return it: models of ``transformers`` would attend
    to padding without it.
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
        names = [name for name, value in samples[0].items() if _length(value)]
        if not names:
            return {}
        name = IDS if IDS in names else names[0]
        lengths = torch.tensor([_length(each[name]) for each in samples], device="cpu")
        longest = -(-int(lengths.max()) // self.multiple_of) * self.multiple_of
        mask = torch.arange(longest, device="cpu") < lengths[:, None]
        return {ATTENTION_KEY: mask.long()} if name == IDS else {"mask": mask, "lengths": lengths}


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


LABELS, POSITIONS, ROW_LENGTHS = "labels", "position_ids", "row_lengths"
PREFIXES = ("", "chosen_", "rejected_")
"""Prefixes of the keys of a supervised sample, and of the two completions of a preference sample."""


class TokenRows:
    """A collate function for samples with ``input_ids`` and unshifted ``labels``.

    The keys may have the prefixes ``chosen_`` and ``rejected_``. Fields with another length than ``input_ids``, such as
    the classes of a multi-label sample, are stacked. Labels are padded with -100 and everything else with
    ``pad``. Samples of equal length are stacked. Otherwise the batch gets an ``attention_mask``; with
    ``padding_free=True`` it gets ``row_lengths`` instead, and the loss calls the model with one row without padding.
    Packed samples, which have ``position_ids``, need no mask: their padding is a sample of its own.
    """

    def __init__(self, *, padding_free: bool = False, pad: int = 0) -> None:
        self.padding_free = padding_free
        self.pad = pad

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        rows = {name: _as_rows([each[name] for each in samples]) for name in samples[0]}
        for prefix in PREFIXES:
            if rows.get(prefix + IDS) is not None:
                batch |= self._padded(prefix, rows)
        for name, values in rows.items():
            if name not in batch:
                batch[name] = default_collate([each[name] for each in samples] if values is None else values)
        return batch

    def _padded(self, prefix: str, rows: Mapping[str, list[Tensor] | None]) -> dict[str, Any]:
        """Return the fields of a prefix with one value for each token, and if needed the mask or row lengths."""
        ids = rows[prefix + IDS]
        assert ids is not None
        lengths = [len(row) for row in ids]
        longest = max(lengths)
        batch: dict[str, Any] = {}
        for name, values in rows.items():
            if name.startswith(prefix) and values is not None and [len(row) for row in values] == lengths:
                batch[name] = self._rectangle(name.removeprefix(prefix), values, longest)
        if prefix + POSITIONS in batch:
            return batch
        if self.padding_free and not prefix:
            batch.pop(ATTENTION_KEY, None)
            return batch | {ROW_LENGTHS: lengths}
        if min(lengths) < longest and prefix + ATTENTION_KEY not in batch:
            shown_BT = torch.arange(longest, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
            batch[prefix + ATTENTION_KEY] = shown_BT.long()
        return batch

    def _rectangle(self, name: str, rows: list[Tensor], longest: int) -> Tensor:
        fill = {LABELS: IGNORE, ATTENTION_KEY: 0}.get(name, self.pad)
        padded_BT = rows[0].new_full((len(rows), longest), fill)
        for padded_T, row_T in zip(padded_BT, rows, strict=True):
            padded_T[: len(row_T)] = row_T
            if name == POSITIONS:
                padded_T[len(row_T) :] = torch.arange(longest - len(row_T), device="cpu")
        return padded_BT


def is_token_samples(dataset: Any) -> bool:
    """Return True if the samples of a list or of a Hugging Face dataset are mappings with token ids.

    No other dataset is read.
    """
    names = getattr(dataset, "column_names", None)
    if type(dataset) is list and dataset and isinstance(dataset[0], Mapping):
        names = list(dataset[0])
    return isinstance(names, list) and any(prefix + IDS in names for prefix in PREFIXES)


def collate_of(dataset: Any, *, padding_free: bool = False) -> TokenRows:
    """Return the collate function for a dataset of token ids, with its ``pad_id`` if it has one."""
    return TokenRows(padding_free=padding_free, pad=getattr(dataset, "pad_id", 0))


def _as_rows(values: list[Any]) -> list[Tensor] | None:
    """Return 1-dimensional tensors of numbers, one for each sample; None for other values."""
    if not all(isinstance(value, Tensor | list | tuple) or hasattr(value, "__array__") for value in values):
        return None
    lists = [value for value in values if isinstance(value, list | tuple)]
    if not all(isinstance(each, int | float) for value in lists for each in value):
        return None
    rows = [torch.as_tensor(value) for value in values]
    return rows if all(row.dim() == 1 for row in rows) else None
