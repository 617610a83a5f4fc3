"""The transformer layers of BERT and ViT: attention in both directions, and a feed-forward network.

Shapes: B batch, T positions, D d_model, H heads, K head width (D / H), F hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainwright.models.bert import BERTConfig
    from trainwright.models.vit import ViTConfig

EncoderOptions: TypeAlias = "BERTConfig | ViTConfig"
INIT_STD = 0.02
TENSOR_PLAN = {
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
"""How tensor parallelism divides the layers; the styles are those of ``parallel.plan`` in a recipe."""


class SelfAttention(nn.Module):
    """x_BTD -> x_BTD: every position attends to all positions."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        width = options.d_model
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.head_width, self.dropout = width // options.heads, options.dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (self._heads(layer(x_BTD)) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        out_BTD: Tensor = self.output(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], -1, self.head_width).transpose(1, 2)


class EncoderMLP(nn.Module):
    """The position-wise network D -> F -> D with an exact GELU."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        hidden = options.hidden or 4 * options.d_model
        self.up, self.down = nn.Linear(options.d_model, hidden), nn.Linear(hidden, options.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return out_BTD


class EncoderBlock(nn.Module):
    """One layer. Pre-norm: x + f(norm(x)), as in ViT. Post-norm: norm(x + f(x)), as in BERT."""

    def __init__(self, options: EncoderOptions, *, pre_norm: bool) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(options), EncoderMLP(options)
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(options.d_model, eps=options.norm_eps) for _ in range(2))
        self.dropout, self.pre_norm = nn.Dropout(options.dropout), pre_norm

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pre_norm:
            x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
            change_BTD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BTD)))
            return x_BTD + change_BTD
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD)))
        out_BTD: Tensor = self.mlp_norm(x_BTD + self.dropout(self.mlp(x_BTD)))
        return out_BTD


def init_layers(model: nn.Module) -> None:
    """Initialize weights from normal(0, 0.02) and biases with 0.

    Not truncated: ``trunc_normal_`` reads values, so a plan could not build the model without its memory.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
