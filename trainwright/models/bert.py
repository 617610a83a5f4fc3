"""An encoder for masked language modelling: BERT, https://arxiv.org/abs/1810.04805.

Shapes: B batch, T positions (<= block_size), D d_model, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import require_choice
from trainwright.models.encoder import TENSOR_PLAN, EncoderBlock, init_layers
from trainwright.models.options import (
    configure,
    require_block_size,
    require_counts,
    require_divisible_heads,
    require_dropout,
)

BERT_TENSOR_PLAN = {"tokens": "row", **TENSOR_PLAN, "head": "column_gathered"}


@dataclass(frozen=True)
class BERTConfig:
    """The options of ``bert``."""

    vocab_size: int
    block_size: int
    layers: int
    heads: int
    d_model: int
    hidden: int = 0
    types: int = 0
    tied: bool = True
    pre_norm: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        counts = ("vocab_size", "block_size", "layers", "heads", "d_model")
        require_counts(self, {**dict.fromkeys(counts, 1), "hidden": 0, "types": 0})
        require_dropout(self.dropout)
        require_divisible_heads(self.d_model, self.heads)


class BERT(nn.Module):
    """ids_BT -> logits_BTV. ``blocks`` is the list that activation checkpointing and sharding wrap.

    With ``hidden=True``, returns hidden_BTD, the input of ``head``, for losses that compute the logits in chunks.
    """

    tensor_plan = BERT_TENSOR_PLAN
    stage_ends = (
        ("tokens", "positions", "types", "embedding_norm", "dropout"),
        ("norm", "transform", "transform_norm", "head"),
    )
    """The modules of the first stage of a pipeline, and of the last one."""

    def __init__(self, options: BERTConfig) -> None:
        super().__init__()
        self.options = options
        width, eps = options.d_model, options.norm_eps
        self.tokens = nn.Embedding(options.vocab_size, width)
        self.positions = nn.Embedding(options.block_size, width)
        self.types = nn.Embedding(options.types, width) if options.types else None
        self.embedding_norm = None if options.pre_norm else nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(options, pre_norm=options.pre_norm) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width, eps=eps) if options.pre_norm else None
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=eps)
        self.head = nn.Linear(width, options.vocab_size)
        init_layers(self)
        if options.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor, *, hidden: bool = False) -> Tensor:
        x_BTD = self.embed(ids_BT) if self.tokens is not None else ids_BT
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if hidden:
            return self._transformed(x_BTD)
        return self.unembed(x_BTD) if self.head is not None else x_BTD

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return x_BTD, the input of the first block."""
        length = ids_BT.shape[1]
        require_block_size(length, self.options.block_size)
        x_BTD = self.tokens(ids_BT) + self.positions.weight[:length]
        if self.types is not None:
            x_BTD = x_BTD + self.types.weight[0]
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        embedded_BTD: Tensor = self.dropout(x_BTD)
        return embedded_BTD

    def unembed(self, x_BTD: Tensor) -> Tensor:
        """Return logits_BTV of the output of the last block."""
        logits_BTV: Tensor = self.head(self._transformed(x_BTD))
        return logits_BTV

    def _transformed(self, x_BTD: Tensor) -> Tensor:
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        hidden_BTD: Tensor = self.transform_norm(F.gelu(self.transform(x_BTD)))
        return hidden_BTD


def bert(**options: object) -> BERT:
    """An encoder for masked language modelling: ids_BT -> logits_BTV (Devlin et al. 2018, arXiv 1810.04805).

    Equals ``BertForMaskedLM`` of transformers for the same weights and ``types: 2``. All positions are attended to:
    there is no padding mask, and all tokens are of the first type.

    Args:
        vocab_size: Number of ids, including the id that masks tokens. Taken from the training set where a recipe leaves
            it out.
        block_size: The longest sequence.
        layers: Number of blocks.
        heads: Attention heads; they divide ``d_model``.
        d_model: Width of the residual stream.
        hidden: Width of the feed-forward networks. 0 means 4 * ``d_model``.
        types: Rows of the embedding of segment types; 0: none. Only the first row is used.
        tied: The output head shares the weights of the embedding.
        pre_norm: Normalize the input of each branch, as in GPT-2. The published BERT normalizes the sum after each
            branch. With ``pre_norm``, larger learning rates train.
        dropout: Dropout of embeddings, attention and residual branches.
        norm_eps: Added to the variance in each LayerNorm.

    Raises UsageError for a value that cannot be used.
    """
    return BERT(configure(BERTConfig, options, of="bert"))


# so that help() and a reader of signatures see the options
bert.__signature__ = inspect.signature(BERTConfig)  # type: ignore[attr-defined]

BERT_SIZES = {  # layers, heads, d_model
    "base": (12, 12, 768),
    "large": (24, 16, 1024),
}


def bert_published(size: str = "base", **options: object) -> BERT:
    """BERT as published (30,522 ids, 512 positions), with new weights.

    Args:
        size: ``base`` or ``large``: 110 M and 335 M parameters.
        **options: Any argument of ``bert``, instead of the published value.
    """
    require_choice("size", size, BERT_SIZES)
    layers, heads, d_model = BERT_SIZES[size]
    shape = {"layers": layers, "heads": heads, "d_model": d_model}
    return bert(**{"vocab_size": 30522, "block_size": 512, "types": 2, "dropout": 0.1, **shape, **options})
