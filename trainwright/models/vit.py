"""Vision Transformers: https://arxiv.org/abs/2010.11929.

Shapes: B batch, C channels, H and W image sides, T patches and the class token, D d_model, K classes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.errors import UsageError, require_choice
from trainwright.models.encoder import INIT_STD, TENSOR_PLAN, EncoderBlock, init_layers
from trainwright.models.options import configure, require_counts, require_divisible_heads, require_dropout


@dataclass(frozen=True)
class ViTConfig:
    """The options of ``vit``."""

    image_size: int
    patch: int
    layers: int
    heads: int
    d_model: int
    classes: int = 10
    channels: int = 3
    hidden: int = 0
    dropout: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        counts = ("image_size", "patch", "layers", "heads", "d_model", "classes", "channels")
        require_counts(self, {**dict.fromkeys(counts, 1), "hidden": 0})
        require_dropout(self.dropout)
        require_divisible_heads(self.d_model, self.heads)
        if self.image_size % self.patch:
            nearest = max(1, round(self.image_size / self.patch)) * self.patch
            raise UsageError(
                f"image_size={self.image_size} is not divisible by patch={self.patch}",
                remedy=f"try image_size={nearest}, or another patch",
            )


class PatchEmbedding(nn.Module):
    """pixels_BCHW -> x_BTD: the class token, then the patches row by row; each with its learned position."""

    def __init__(self, options: ViTConfig) -> None:
        super().__init__()
        self.options = options
        count = (options.image_size // options.patch) ** 2
        self.patches = nn.Conv2d(options.channels, options.d_model, options.patch, stride=options.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, options.d_model))
        self.positions = nn.Parameter(torch.empty(1, count + 1, options.d_model))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        side = self.options.image_size
        if pixels_BCHW.shape[-2:] != (side, side):
            got = " x ".join(map(str, pixels_BCHW.shape[-2:]))
            raise UsageError(
                f"the images are {got} pixels, but the model has image_size={side}",
                remedy="resize the images, or build the model with their size",
            )
        patches_BTD = self.patches(pixels_BCHW).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.class_token.expand(len(patches_BTD), -1, -1), patches_BTD], dim=1)
        out_BTD: Tensor = self.dropout(x_BTD + self.positions)
        return out_BTD


class ViT(nn.Module):
    """pixels_BCHW -> logits_BK. ``blocks`` is the list that activation checkpointing and sharding wrap."""

    tensor_plan = TENSOR_PLAN
    stage_ends = (("embedding",), ("norm", "head"))
    """The modules of the first stage of a pipeline, and of the last one."""

    def __init__(self, options: ViTConfig) -> None:
        super().__init__()
        self.options = options
        self.embedding = PatchEmbedding(options)
        self.blocks = nn.ModuleList(EncoderBlock(options, pre_norm=True) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model, eps=options.norm_eps)
        self.head = nn.Linear(options.d_model, options.classes)
        init_layers(self)
        for parameter in (self.embedding.class_token, self.embedding.positions):
            nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        x_BTD = self.embed(pixels_BCHW) if self.embedding is not None else pixels_BCHW
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.unembed(x_BTD) if self.head is not None else x_BTD

    def embed(self, pixels_BCHW: Tensor) -> Tensor:
        """Return x_BTD, the input of the first block."""
        x_BTD: Tensor = self.embedding(pixels_BCHW)
        return x_BTD

    def unembed(self, x_BTD: Tensor) -> Tensor:
        """Return logits_BK for the class token of the last block's output."""
        logits_BK: Tensor = self.head(self.norm(x_BTD[:, 0]))
        return logits_BK


def vit(**options: object) -> ViT:
    """A Vision Transformer: pixels_BCHW -> logits_BK (Dosovitskiy et al. 2020, arXiv 2010.11929).

    Equals ``ViTForImageClassification`` of transformers for the same weights.

    Args:
        image_size: Height and width of the images, in pixels.
        patch: Height and width of a patch, in pixels; it divides ``image_size``.
        layers: Number of blocks.
        heads: Attention heads; they divide ``d_model``.
        d_model: Width of the residual stream.
        classes: Number of outputs. Taken from the training set where a recipe leaves it out.
        channels: Channels of the images.
        hidden: Width of the feed-forward networks. 0 means 4 * ``d_model``.
        dropout: Dropout of embeddings, attention and residual branches.
        norm_eps: Added to the variance in each LayerNorm.

    Raises UsageError for a value that cannot be used.
    """
    return ViT(configure(ViTConfig, options, of="vit"))


# so that help() and a reader of signatures see the options
vit.__signature__ = inspect.signature(ViTConfig)  # type: ignore[attr-defined]

VIT_SIZES = {  # patch, layers, heads, d_model; tables 1 and 5 of the paper, and arXiv 2012.12877 for Ti and S
    "Ti/16": (16, 12, 3, 192),
    "S/16": (16, 12, 6, 384),
    "B/32": (32, 12, 12, 768),
    "B/16": (16, 12, 12, 768),
    "L/16": (16, 24, 16, 1024),
    "H/14": (14, 32, 16, 1280),
}


def vit_published(size: str = "B/16", **options: object) -> ViT:
    """A Vision Transformer as published (224 x 224 pixels, 1,000 classes), with new weights.

    Args:
        size: ``Ti/16``, ``S/16``, ``B/32``, ``B/16``, ``L/16`` or ``H/14``.
        **options: Any argument of ``vit``, instead of the published value.
    """
    require_choice("size", size, VIT_SIZES)
    patch, layers, heads, d_model = VIT_SIZES[size]
    shape = {"patch": patch, "layers": layers, "heads": heads, "d_model": d_model}
    return vit(**{"image_size": 224, "classes": 1000, **shape, **options})
