"""Packs short samples into rows of at most ``max_length`` tokens, with positions that begin at 0 for each sample.

Models of transformers derive a block-diagonal attention mask from such positions, so that the samples of a row do not
see each other. ``finetune.isolation`` tests that a model does.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trainwright.data.padding import IDS, IGNORE, LABELS, POSITIONS, TokenRows, collate_of
from trainwright.data.unwrap import Unwrapped, length_of
from trainwright.engine.token_batch import best_fit_decreasing
from trainwright.errors import UsageError
from trainwright.recipe.schema import Packing


def packed_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return the positions of the samples of each row, see ``best_fit_decreasing``.

    Raises UsageError for a sample that is longer than ``max_length``.
    """
    longest = max(lengths, default=0)
    if longest > max_length:
        over = sum(length > max_length for length in lengths)
        raise UsageError(
            f"{over:,} of {len(lengths):,} samples are longer than data.packing.max_length: {max_length}; sample "
            f"{list(lengths).index(longest)} has {longest:,} tokens",
            remedy=f"set data.packing.max_length: {longest}, or shorten the samples: packing keeps them whole",
        )
    return best_fit_decreasing(lengths, max_length)


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of several samples: ``input_ids``, ``labels`` and ``position_ids``, each (T,).

    Positions begin at 0 for each sample. The first label of a sample is -100, because in the row the
    last token of the sample before would have to predict it.

    Attributes:
        members: The positions in ``dataset`` of the samples of each row.
    """

    def __init__(self, dataset: Any, max_length: int, lengths: Sequence[int] | None = None) -> None:
        self.dataset = dataset
        self.max_length = max_length
        lengths = sample_lengths(dataset) if lengths is None else lengths
        self.members = packed_rows(lengths, max_length)
        self.fill = sum(lengths) / max(1, max_length * len(self.members))
        self.deterministic = type(dataset) is list or bool(getattr(dataset, "deterministic", False))
        for name in ("classes", "tokenizer"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self.members) <= index < len(self.members):
            raise IndexError(index)
        return concatenated(self.dataset[each] for each in self.members[index])


def concatenated(samples: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return one packed row of these samples."""
    ids, labels, positions = [], [], []
    for sample in samples:
        ids_T, labels_T = torch.as_tensor(sample[IDS]), torch.as_tensor(sample[LABELS]).clone()
        labels_T[:1] = IGNORE
        ids.append(ids_T)
        labels.append(labels_T)
        positions.append(torch.arange(len(ids_T), device="cpu"))
    return {IDS: torch.cat(ids), LABELS: torch.cat(labels), POSITIONS: torch.cat(positions)}


def sample_lengths(dataset: Any) -> list[int]:
    """Return the number of tokens of each sample: ``lengths()`` of the dataset, or by reading every sample."""
    known = getattr(dataset, "lengths", None)
    if callable(known):
        return [int(length) for length in known()]
    return [len(dataset[position][IDS]) for position in range(len(dataset))]


def with_packing(data: Unwrapped, packing: Packing) -> Unwrapped:
    """Return the data as ``data.packing`` of a recipe requests them.

    Raises UsageError for data whose samples cannot be packed.
    """
    if packing.by == "none":
        return data
    _require_tokens(data)
    if packing.by == "padding_free":
        return replace(data, collate=collate_of(data.dataset, padding_free=True))
    if data.order is not None or data.batch_size is not None:
        raise UsageError(
            "data.packing: bfd arranges the rows itself, but the data has an order (short_first) or is a DataLoader "
            "with batches of samples",
            remedy="leave out short_first, or pass the dataset instead of the DataLoader; batch.size then counts rows",
        )
    assert packing.max_length is not None
    collate = collate_of(data.dataset)
    return replace(data, dataset=Packed(data.dataset, packing.max_length), collate=collate, loader=None)


def _require_tokens(data: Unwrapped) -> None:
    if data.own_batches is not None or not hasattr(data.dataset, "__getitem__") or not length_of(data.dataset):
        raise UsageError(
            "data.packing needs a dataset with __getitem__ and __len__ whose samples it can read by position",
            remedy="pass such a dataset, or set data.packing: none",
        )
    first = data.dataset[0]
    if not (isinstance(first, Mapping) and {IDS, LABELS} <= set(first)):
        what = f"the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise UsageError(
            f"data.packing needs samples with the keys {IDS} and {LABELS}; sample 0 is {what}",
            remedy="return {'input_ids': ids, 'labels': labels} from the dataset, or set data.packing: none",
        )
    if data.collate is not default_collate and not isinstance(data.collate, TokenRows):
        raise UsageError(
            "data.packing makes the batches itself, and the DataLoader has a collate_fn",
            remedy="pass the dataset instead of the DataLoader, or set data.packing: none",
        )
