"""Converts a batch for causal language models to the arguments of the model and the label that follows each token.

A batch has one of these layouts. Labels are not shifted; positions that carry no loss have the label -100.

==============  ========================================================================================
pair            ``(ids_BT, target_BT)``; the target is shifted already
padded          ``input_ids``, ``labels`` and ``attention_mask`` (or ``mask``), each (B, T)
packed          ``input_ids``, ``labels`` and ``position_ids``, each (B, T); position 0 begins a sample
padding-free    ``input_ids``, ``labels``, each (B, T), and ``row_lengths``, a list of B ints
==============  ========================================================================================

A padding-free batch is stored with one row for each sample, so that it can be divided among ranks and into smaller
micro-batches. To call the model, several samples are joined into one row. Attention that skips masked positions (flash,
flex) gets all samples in a single row. Other attention computes a full mask, whose cost grows with the square of the
row length, so no row is longer than the longest sample.

Shapes: B rows, T tokens of the longest row, D width.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.chunked import IGNORE
from trainwright.engine.loss import Batch
from trainwright.errors import UsageError


def best_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Divide items into bins of at most ``room``; return the positions in ``lengths`` of the items of each bin.

    No length may exceed ``room``. Items are placed from the longest to the shortest, each into the fullest bin that has
    room for it. Ties are broken by order: equal items keep their order, and of equally full bins the one that became so
    first is filled. So the bins are a function of the lengths. Zero lengths are left out.
    """
    bins: list[list[int]] = []
    by_room: list[deque[int]] = [deque() for _ in range(room + 1)]  # bins by the length that still fits
    rooms = 0  # bit n is set if a bin has room for n
    for position in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[position]
        if not length:
            continue
        fitting = rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = by_room[left].popleft()
            if not by_room[left]:
                rooms ^= 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(position)
        by_room[left - length].append(number)
        rooms |= 1 << (left - length)
    return bins


ROW_LENGTHS = "row_lengths"


class TokenBatch(NamedTuple):
    """The arguments for a call of a causal language model.

    Attributes:
        inputs: Keyword arguments of the model.
        target: The label that follows each token; -100 if none.
        by_row: The same labels in the rows of the original batch.
        places: For a padding-free batch, the row of each sample in ``inputs`` and the position where it begins.
    """

    inputs: dict[str, Any]
    target: Tensor
    by_row: Tensor
    places: tuple[tuple[int, int], ...] = ()


def token_batch(model: nn.Module, batch: Batch, *, one_row: bool = False) -> TokenBatch:
    """Return the arguments of ``model`` and the targets for a batch of any layout.

    ``one_row`` puts all samples of a packed or padding-free batch into one row, whatever the attention of the model.

    Raises UsageError for a batch without ``input_ids`` or ``labels``.
    """
    if not isinstance(batch, Mapping):
        ids_BT, target_BT = batch
        return TokenBatch({"input_ids": ids_BT}, target_BT, target_BT)
    if missing := [name for name in ("input_ids", "labels") if name not in batch]:
        raise UsageError(
            f"the batch has no {' and no '.join(missing)}; it has {', '.join(map(str, batch)) or 'no keys'}",
            remedy="give samples {'input_ids': ids, 'labels': labels}, with -100 in labels where no loss is carried",
        )
    ids_BT, target_BT = batch["input_ids"], following(batch["labels"])
    lengths, positions_BT = batch.get(ROW_LENGTHS), batch.get("position_ids")
    mask_BT = batch.get("attention_mask", batch.get("mask"))
    options = {"use_cache": False} if takes(model, "use_cache") else {}
    flat = one_row or reads_one_row(model)
    if lengths is not None:
        layout = arranged(lengths, ids_BT.shape[1], one_row=flat or reads_sparse_rows(model))
        index_RT, positions_RT, padding_RT = (each.to(ids_BT.device, non_blocking=True) for each in layout.tensors)
        inputs = {"input_ids": ids_BT.flatten()[index_RT], "position_ids": positions_RT}
        target_RT = target_BT.flatten()[index_RT].masked_fill(padding_RT, IGNORE)
        return TokenBatch(inputs | options, target_RT, target_BT, layout.places)
    if positions_BT is not None:
        inputs = {"input_ids": ids_BT, "position_ids": positions_BT}
        if len(ids_BT) > 1 and flat:
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
            return TokenBatch(inputs | options, target_BT.reshape(1, -1), target_BT)
        return TokenBatch(inputs | options, target_BT, target_BT)
    inputs = {"input_ids": ids_BT} if mask_BT is None else {"input_ids": ids_BT, "attention_mask": mask_BT}
    return TokenBatch(inputs | options, target_BT, target_BT)


def following(labels_BT: Tensor) -> Tensor:
    """Return the label that follows each position; -100 at the end of a row."""
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE)


class RowLayout(NamedTuple):
    """The rows that samples are arranged in.

    Attributes:
        tensors: Three (R, T) tensors with a value for each position of each row: the index of its token in the
            flattened batch, its position in its sample, and True if it is padding. Padding is numbered as a separate
            sample.
        places: The row of each sample, and the position in that row where the sample begins.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    places: tuple[tuple[int, int], ...]


def arranged(lengths: Sequence[int], longest: int, *, one_row: bool) -> RowLayout:
    """Arrange the samples of a (B, longest) tensor in one row, or in rows no longer than the longest sample."""
    rows = [[*range(len(lengths))]] if one_row else best_fit_decreasing(lengths, max(lengths))
    width = max(sum(lengths[sample] for sample in row) for row in rows)
    index_RT = torch.zeros(len(rows), width, dtype=torch.int64, device="cpu")
    positions_RT, padding_RT = torch.zeros_like(index_RT), torch.ones_like(index_RT, dtype=torch.bool)
    counting = torch.arange(width, device="cpu")
    places = [(0, 0)] * len(lengths)
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + lengths[sample]
            index_RT[number, start:end] = counting[: end - start] + sample * longest
            positions_RT[number, start:end] = counting[: end - start]
            places[sample] = (number, start)
            start = end
        padding_RT[number, :start] = False
        positions_RT[number, start:] = counting[: width - start]
    return RowLayout((index_RT, positions_RT, padding_RT), tuple(places))


def takes(model: nn.Module, name: str) -> bool:
    """Return True if the forward of a model, or of the model that PEFT has wrapped, has this parameter."""
    find = getattr(model, "get_base_model", None)
    return name in inspect.signature((find() if callable(find) else model).forward).parameters


def reads_one_row(model: nn.Module) -> bool:
    """Return True if the attention finds packed samples only in a batch of one row, as flash attention does."""
    return "flash" in _attention(model)


def reads_sparse_rows(model: nn.Module) -> bool:
    """Return True if the cost of attention grows with the tokens that are seen, not with the square of a row."""
    return "flex" in _attention(model) or reads_one_row(model)


def _attention(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


@contextmanager
def embedding_noise(model: nn.Module, inputs: Mapping[str, Any], alpha: float) -> Iterator[None]:
    """Context in which the input embeddings of a model in training mode get uniform noise: NEFTune.

    The noise of a sample of L tokens is in +-alpha / sqrt(L * D) (https://arxiv.org/abs/2310.05914). It is drawn from
    the random generators of the step, so a replayed step has the same noise.

    Raises UsageError for a model without ``get_input_embeddings``.
    """
    if not alpha or not model.training:
        yield
        return
    find = getattr(model, "get_input_embeddings", None)
    embeddings = find() if callable(find) else None
    if not isinstance(embeddings, nn.Module):
        raise UsageError(
            f"neftune_alpha: {type(model).__name__} has no get_input_embeddings()",
            remedy="use a model of transformers, or leave neftune_alpha out",
        )
    lengths_BT1 = sample_lengths(inputs)[..., None]

    def add_noise(_module: nn.Module, _args: object, output_BTD: Tensor) -> Tensor:
        bound_BT1 = (alpha / (lengths_BT1 * output_BTD.shape[-1]).sqrt()).to(output_BTD.dtype)
        return output_BTD + torch.zeros_like(output_BTD).uniform_(-1, 1) * bound_BT1

    handle = embeddings.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def sample_lengths(inputs: Mapping[str, Any]) -> Tensor:
    """Return for each position the number of tokens of its sample, (B, T) or (B, 1)."""
    ids_BT: Tensor = inputs["input_ids"]
    mask_BT: Tensor | None = inputs.get("attention_mask")
    positions_BT: Tensor | None = inputs.get("position_ids")
    if positions_BT is not None:
        sample_BT = (positions_BT == 0).cumsum(-1) - 1
        count_BT = torch.zeros_like(positions_BT).scatter_add_(1, sample_BT, torch.ones_like(positions_BT))
        return count_BT.gather(1, sample_BT)
    if mask_BT is not None:
        return mask_BT.sum(-1, keepdim=True)
    return torch.full_like(ids_BT[:, :1], ids_BT.shape[1])
