"""Collates samples of token ids of different lengths: padded with a mask, packed, or padding-free.

Shapes: B samples, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright.data.padding import ATTENTION_KEY, IGNORE

IDS, LABELS, POSITIONS, ROW_LENGTHS = "input_ids", "labels", "position_ids", "row_lengths"
PREFIXES = ("", "chosen_", "rejected_")
"""Prefixes of the keys of a supervised sample, and of the two completions of a preference sample."""


class TokenRows:
    """A collate function for samples with ``input_ids`` and unshifted ``labels``.

    The keys may have the prefixes ``chosen_`` and ``rejected_``. Labels are padded with -100 and everything else with
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
    """Return True if the samples of a list or of a Hugging Face dataset are mappings with token ids and labels.

    No other dataset is read.
    """
    names = getattr(dataset, "column_names", None)
    if type(dataset) is list and dataset and isinstance(dataset[0], Mapping):
        names = list(dataset[0])
    return isinstance(names, list) and any({prefix + IDS, prefix + LABELS} <= set(names) for prefix in PREFIXES)


def collate_of(dataset: Any, *, padding_free: bool = False) -> TokenRows:
    """Return the collate function for a dataset of token ids, with its ``pad_id`` if it has one."""
    return TokenRows(padding_free=padding_free, pad=getattr(dataset, "pad_id", 0))


def _as_rows(values: list[Any]) -> list[Tensor] | None:
    """Return 1-dimensional tensors of numbers, one for each sample; None for other values."""
    if not all(isinstance(value, Tensor | list | tuple) or hasattr(value, "__array__") for value in values):
        return None
    if any(isinstance(value, list | tuple) and not all(isinstance(each, int) for each in value) for value in values):
        return None
    rows = [torch.as_tensor(value) for value in values]
    return rows if all(row.dim() == 1 for row in rows) else None
