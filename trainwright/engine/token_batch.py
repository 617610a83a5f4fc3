"""Converts a batch for causal language models to the arguments of the model and the label that follows each token.

A batch has one of these layouts. Labels are not shifted, and -100 where no loss is carried.

==============  ========================================================================================
pair            ``(ids_BT, target_BT)``; the target is shifted already
padded          ``input_ids``, ``labels`` and ``attention_mask`` (or ``mask``), each (B, T)
packed          ``input_ids``, ``labels`` and ``position_ids``, each (B, T); position 0 begins a sample
padding-free    ``input_ids``, ``labels``, each (B, T), and ``row_lengths``, a list of B ints
==============  ========================================================================================

A padding-free batch is stored with one row for each sample, so that it can be divided among ranks and into smaller
micro-batches. The model is called with one row that contains all tokens and no padding.

Shapes: B rows, T tokens of the longest row, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.chunked import IGNORE
from trainwright.engine.loss import Batch
from trainwright.errors import UsageError

ROW_LENGTHS = "row_lengths"


class TokenBatch(NamedTuple):
    """What a causal language model is called with.

    Attributes:
        inputs: Keyword arguments of the model.
        target: The label that follows each token; -100 if none.
        by_row: The same targets with one row for each row of the batch.
    """

    inputs: dict[str, Any]
    target: Tensor
    by_row: Tensor


def token_batch(model: nn.Module, batch: Batch) -> TokenBatch:
    """Return the arguments of ``model`` and the targets for a batch of any layout.

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
    if lengths is not None:
        index_N = unpadded_index(lengths, ids_BT.shape[1]).to(ids_BT.device, non_blocking=True)
        inputs = {"input_ids": _one_row(ids_BT, index_N), "position_ids": (index_N % ids_BT.shape[1])[None]}
        return TokenBatch(inputs | options, _one_row(target_BT, index_N), target_BT)
    if positions_BT is not None:
        inputs = {"input_ids": ids_BT, "position_ids": positions_BT}
        if len(ids_BT) > 1 and _reads_one_row(model):
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
            return TokenBatch(inputs | options, target_BT.reshape(1, -1), target_BT)
        return TokenBatch(inputs | options, target_BT, target_BT)
    inputs = {"input_ids": ids_BT} if mask_BT is None else {"input_ids": ids_BT, "attention_mask": mask_BT}
    return TokenBatch(inputs | options, target_BT, target_BT)


def following(labels_BT: Tensor) -> Tensor:
    """Return the label that follows each position; -100 at the end of a row."""
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE)


def unpadded_index(lengths: Sequence[int], longest: int) -> Tensor:
    """Return the positions of the tokens that are no padding, in a flattened (B, longest) tensor."""
    return torch.cat([torch.arange(row * longest, row * longest + each) for row, each in enumerate(lengths)])


def _one_row(value_BT: Tensor, index_N: Tensor) -> Tensor:
    return value_BT.flatten().index_select(0, index_N)[None]


def takes(model: nn.Module, name: str) -> bool:
    """Return True if the forward of a model, or of the model that PEFT has wrapped, has this parameter."""
    find = getattr(model, "get_base_model", None)
    return name in inspect.signature((find() if callable(find) else model).forward).parameters


def _reads_one_row(model: nn.Module) -> bool:
    """Return True if the attention finds packed samples only in a batch of one row, as flash attention does."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


@contextmanager
def embedding_noise(model: nn.Module, inputs: Mapping[str, Any], alpha: float) -> Iterator[None]:
    """Context in which the input embeddings of a model in training mode get uniform noise: NEFTune.

    The noise of a sample of L tokens is in +-alpha / sqrt(L * D) (https://arxiv.org/abs/2310.05914). It is drawn from
    the random generators of the step, so a replayed step has the same noise.

    Raises UsageError for a model that does not tell its input embeddings.
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

    def add_noise(module: nn.Module, args: object, output_BTD: Tensor) -> Tensor:
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
