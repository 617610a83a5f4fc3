"""A decoder-only transformer: GPT-2 as published, or a modern block (RMSNorm, RoPE, ReLU^2, SwiGLU, QK-norm).

Shapes: B batch, T positions (<= block_size), D d_model, H heads, K head width (D / H), V vocabulary,
F hidden width.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError, require_choice
from trainwright.models.options import (
    configure,
    require_block_size,
    require_counts,
    require_divisible_heads,
    require_dropout,
)


class CausalMask:
    """The causal mask added to attention scores if the queries are the last positions of the keys.

    All blocks share one tensor. Otherwise, each block would store a mask of (positions of the part) x (positions up to
    the end of the part) for the backward pass. A deep copy makes its own mask at its first call.
    """

    def __init__(self) -> None:
        self._made: Tensor | None = None

    def __deepcopy__(self, memo: object) -> CausalMask:
        return CausalMask()

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask, shape (queries, keys), in the dtype in which attention is computed."""
        shape, device = (query.shape[-2], key.shape[-2]), query.device
        is_cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_cast else query.dtype
        made = self._made
        if made is None or (made.shape, made.dtype, made.device) != (shape, dtype, device) or made.is_inference():
            is_ahead = torch.ones(shape, dtype=torch.bool, device=device).triu(shape[1] - shape[0] + 1)
            made = self._made = torch.zeros(shape, dtype=dtype, device=device).masked_fill_(is_ahead, -math.inf)
        return made


INIT_STD = 0.02
MUP_ATTENTION_SCALE = 8.0
"""muP divides attention scores by the head width K, not by its root: 8 / K, the same as 1 / sqrt(K) if K is 64."""
TENSOR_PLAN = {
    "tokens": "row",
    "dropout": "scatter",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.attention": "input",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp_norm": "sequence",
    "blocks.*.mlp": "input",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column_gathered",
}
"""How tensor parallelism divides the layers of a GPT; the styles are those of ``parallel.plan`` in a recipe."""


@dataclass(frozen=True)
class GPTConfig:
    """The options of ``gpt``, which documents them."""

    vocab_size: int
    block_size: int
    layers: int
    heads: int
    d_model: int
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rope"] = "learned"
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    bigram: int = 0
    ngram: int = 2
    zero_init_out: bool = False
    logit_softcap: float = 0.0
    rope_base: float = 10_000.0
    init: Literal["gpt2", "mup"] = "gpt2"
    base_width: int = 128

    def __post_init__(self) -> None:
        positive = ("vocab_size", "block_size", "layers", "heads", "d_model", "base_width")
        require_counts(self, {**dict.fromkeys(positive, 1), "bigram": 0, "ngram": 2})
        require_choice("norm", self.norm, ("layer", "rms"))
        require_choice("positions", self.positions, ("learned", "rope"))
        require_choice("activation", self.activation, ("gelu", "relu2", "swiglu"))
        require_choice("init", self.init, ("gpt2", "mup"))
        require_dropout(self.dropout)
        require_divisible_heads(self.d_model, self.heads)
        if self.positions == "rope" and self.head_width % 2:
            raise UsageError(
                f'positions="rope" rotates pairs, but d_model / heads = {self.head_width} is odd',
                remedy=f"try d_model={self.heads * (self.head_width + 1)}",
            )
        if self.ngram > 2 and not self.bigram:
            raise UsageError(f"ngram={self.ngram} needs rows for its tables", remedy="try bigram=8192")
        if self.logit_softcap < 0:
            raise UsageError(f"logit_softcap must be >= 0; got {self.logit_softcap}", remedy="0 turns it off")

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    @property
    def width_ratio(self) -> float:
        """Width relative to that of the model whose learning rates are used; 1 without muP."""
        return self.d_model / self.base_width if self.init == "mup" else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor on attention scores; None: 1 / sqrt(K)."""
        return MUP_ATTENTION_SCALE / self.head_width if self.init == "mup" else None

    @property
    def hidden_width(self) -> int:
        """F: 4 D, or 8/3 D rounded up to a multiple of 8 for SwiGLU."""
        return -(-self.d_model // 3) * 8 if self.activation == "swiglu" else 4 * self.d_model


class SequencePart(Protocol):
    """The part of the sequence that this process computes, if several have one each (context parallelism)."""

    def start(self, length: int) -> int:
        """Return the first position of this part, if it has ``length`` positions."""
        ...

    def cut(self, x: Tensor) -> Tensor:
        """Return this part of ``x``, which is complete in dimension 1."""
        ...

    def before(self, x_BHTK: Tensor) -> Tensor:
        """Return ``x_BHTK`` of this part and of the previous ones, gathered from other ranks."""
        ...


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, eps=1e-5, bias=config.bias)


class Rope(nn.Module):
    """Rotary positions, https://arxiv.org/abs/2104.09864, pairing channel i with i + K/2 as Llama does.

    Angles are computed in fp32: in bf16, positions above 256 would coincide.
    """

    cos: Tensor  # (block_size, K / 2), as is sin
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.base = config.rope_base
        shape = (config.block_size, config.head_width // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        positions, pairs = self.cos.shape
        device = self.cos.device
        frequency_K = self.base ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
        angle_TK = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequency_K)
        self.cos.copy_(angle_TK.cos())
        self.sin.copy_(angle_TK.sin())

    def forward(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        end = start + x_BHTK.shape[-2]
        cos_TK, sin_TK = self.cos[start:end], self.sin[start:end]
        left, right = x_BHTK.chunk(2, dim=-1)
        rotated = torch.cat([left * cos_TK - right * sin_TK, right * cos_TK + left * sin_TK], dim=-1)
        return rotated.type_as(x_BHTK)


class Attention(nn.Module):
    """Causal self-attention.

    Query, key and value are separate layers, so that each can be sharded by heads, orthogonalized (Muon) or adapted
    (LoRA) separately.
    """

    def __init__(self, config: GPTConfig, rope: Rope | None) -> None:
        super().__init__()
        width = config.d_model
        self.query = nn.Linear(width, width, bias=config.bias)
        self.key = nn.Linear(width, width, bias=config.bias)
        self.value = nn.Linear(width, width, bias=config.bias)
        self.output = nn.Linear(width, width, bias=config.bias)
        self.rope = rope  # one module shared by all blocks
        self.head_width = config.head_width
        self.qk_norm = config.qk_norm
        self.dropout = config.dropout
        self.scale = config.attention_scale
        self.part: SequencePart | None = None
        self.mask = CausalMask()

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (self._heads(layer(x_BTD)) for layer in (self.query, self.key, self.value))
        if self.qk_norm:
            query, key = (F.rms_norm(each, (self.head_width,)) for each in (query, key))
        if self.rope is not None:
            start = 0 if self.part is None else self.part.start(query.shape[-2])
            query, key = self.rope(query, start), self.rope(key, start)
        dropout = self.dropout if self.training else 0.0
        if self.part is None:
            mixed_BHTK = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout, scale=self.scale
            )
        else:
            key, value = self.part.before(key), self.part.before(value)
            mask_TS = self.mask.of(query, key)
            mixed_BHTK = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask_TS, dropout_p=dropout, scale=self.scale
            )
        out_BTD: Tensor = self.output(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """The position-wise network D -> F -> D; ``hidden`` is F, by default ``config.hidden_width``."""

    def __init__(self, config: GPTConfig, hidden: int | None = None) -> None:
        super().__init__()
        width, hidden = config.d_model, config.hidden_width if hidden is None else hidden
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(width, hidden, bias=config.bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, width, bias=config.bias)
        self.activation = config.activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        out_BTD: Tensor = self.down(activated(self.up(x_BTD), gate_BTF, self.activation))
        return out_BTD

    def init_output(self, std: float) -> None:
        """Initialize the projection back to the residual stream."""
        nn.init.normal_(self.down.weight, std=std)


def activated(up: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """Return the hidden values of a feed-forward network; ``gate`` is None except for SwiGLU."""
    if gate is not None:
        return F.silu(gate) * up
    return F.relu(up).square() if activation == "relu2" else F.gelu(up, approximate="tanh")


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, rope: Rope | None, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rope)
        self.mlp_norm = _norm(config)
        self.mlp: Any = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        change_BTD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD + change_BTD


class NGram(nn.Module):
    """An embedding of the last ``order`` ids; the last row is for positions with fewer previous ids."""

    def __init__(self, config: GPTConfig, order: int) -> None:
        super().__init__()
        self.order = order
        self.exact = config.vocab_size**order <= config.bigram
        self.base = config.vocab_size if self.exact else 1_000_003  # a prime: spreads the ids over 64 bits
        self.rows = config.vocab_size**order if self.exact else config.bigram
        self.table = nn.Embedding(self.rows + 1, config.d_model)

    def forward(self, ids_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        whole = max(0, length - self.order + 1)  # positions with order - 1 previous ones
        code = ids_BT[:, :whole]
        for start in range(1, self.order):
            code = code * self.base + ids_BT[:, start : start + whole]
        if not self.exact:
            code = (code ^ (code >> 17)) % self.rows
        out_BTD: Tensor = self.table(F.pad(code, (length - whole, 0), value=self.rows))
        return out_BTD


class GPT(nn.Module):
    """ids_BT -> logits_BTV. ``blocks`` is the list that activation checkpointing and sharding wrap.

    With ``hidden=True``, returns hidden_BTD, the input of ``head``, for losses that compute the logits in chunks.
    """

    tensor_plan = TENSOR_PLAN
    stage_ends = (("tokens", "positions", "ngrams", "dropout"), ("norm", "head"))
    """Modules of the first and of the last stage of a pipeline.

    A stage without the first modules gets x_BTD instead of ids_BT. A stage without the last modules returns x_BTD.
    """

    def __init__(self, options: GPTConfig) -> None:
        super().__init__()
        self.options = options  # not `config`: PEFT takes that name for a Hugging Face config
        rope = Rope(options) if options.positions == "rope" else None
        learned = options.positions == "learned"
        self.tokens = nn.Embedding(options.vocab_size, options.d_model)
        self.positions = nn.Embedding(options.block_size, options.d_model) if learned else None
        orders = range(2, options.ngram + 1) if options.bigram else ()
        self.ngrams = nn.ModuleList(NGram(options, order) for order in orders)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options, rope, self.make_mlp()) for _ in range(options.layers))
        self.norm = _norm(options)
        self.head = nn.Linear(options.d_model, options.vocab_size, bias=False)
        self.part: SequencePart | None = None
        self.init_weights()

    def make_mlp(self) -> nn.Module:
        """Return the feed-forward network of a block; it has ``init_output``."""
        return FeedForward(self.options)

    @property
    def block_size(self) -> int:
        """The longest input, in tokens."""
        return self.options.block_size

    @property
    def logit_softcap(self) -> float:
        """The bound of the logits; 0: none."""
        return self.options.logit_softcap

    def init_weights(self) -> None:
        """Initialize every weight as GPT-2 does: normal(0, 0.02), residual projections / sqrt(2 * layers).

        With ``init: mup``, matrices of the blocks are also divided by sqrt(d_model / base_width). Also fills the RoPE
        tables and ties the head again, which a model built on the meta device needs after ``to_empty``.
        """
        if self.options.tied:
            self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | Rope):
                module.reset_parameters()
        hidden_std = INIT_STD / math.sqrt(self.options.width_ratio)
        residual_std = 0.0 if self.options.zero_init_out else hidden_std / math.sqrt(2 * self.options.layers)
        for block in self.blocks:
            assert isinstance(block, Block)
            if self.options.init == "mup":
                for module in block.modules():
                    if isinstance(module, nn.Linear):
                        nn.init.normal_(module.weight, std=hidden_std)
            nn.init.normal_(block.attention.output.weight, std=residual_std)
            block.mlp.init_output(residual_std)
        if self.options.zero_init_out and not self.options.tied:
            nn.init.zeros_(self.head.weight)

    def forward(self, ids_BT: Tensor, *, hidden: bool = False) -> Tensor:
        x_BTD = self.embed(ids_BT) if self.tokens is not None else ids_BT
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if hidden:
            return self._scaled_norm(x_BTD)
        return self.unembed(x_BTD) if self.head is not None else x_BTD

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return x_BTD, the input of the first block."""
        length = ids_BT.shape[1]
        require_block_size(length, self.block_size)
        x_BTD = self.tokens(ids_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[:length]
        for ngram in self.ngrams:
            x_BTD = x_BTD + ngram(ids_BT)
        if self.part is not None:
            x_BTD = self.part.cut(x_BTD)
        embedded_BTD: Tensor = self.dropout(x_BTD)
        return embedded_BTD

    def unembed(self, x_BTD: Tensor) -> Tensor:
        """Return logits_BTV for the output of the last block."""
        logits_BTV: Tensor = self.head(self._scaled_norm(x_BTD))
        cap = self.logit_softcap
        return cap * torch.tanh(logits_BTV.float() / cap) if cap else logits_BTV

    def _scaled_norm(self, x_BTD: Tensor) -> Tensor:
        """Normalize the input of the head, and multiply it by muP's output multiplier."""
        hidden_BTD: Tensor = self.norm(x_BTD)
        ratio = self.options.width_ratio
        return hidden_BTD if ratio == 1 else hidden_BTD / ratio

    def fan_in_ratios(self) -> dict[nn.Parameter, float]:
        """Return the weights whose learning rate muP divides for Adam, each with the divisor, d_model / base_width."""
        ratio = self.options.width_ratio
        layers = (each for each in self.blocks.modules() if isinstance(each, nn.Linear))
        weights = (layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter))
        return dict.fromkeys(weights, ratio) if ratio != 1 else {}

    def take_part(self, part: SequencePart) -> None:
        """Compute only a part of each sequence from now on. Inputs are full sequences; logits are of the part only."""
        self.part, mask = part, CausalMask()
        for module in self.modules():
            if isinstance(module, Attention):
                module.part, module.mask = part, mask


def gpt(**options: object) -> GPT:
    """A decoder-only transformer: ids_BT -> logits_BTV.

    Args:
        vocab_size: Number of ids. Taken from the training set where a recipe leaves it out.
        block_size: The longest sequence.
        layers: Number of blocks.
        heads: Attention heads; they divide ``d_model``.
        d_model: Width of the residual stream.
        norm: LayerNorm, or RMSNorm.
        positions: Learned embeddings of the positions, or rotations of queries and keys (RoPE).
        activation: ``gelu`` is the tanh approximation, as in GPT-2. ``relu2`` is the square of ReLU. ``swiglu`` has a
            hidden width of 8/3 ``d_model``, rounded up to a multiple of 8, so that its three matrices have about as
            many weights as the two matrices of the others.
        bias: Biases in linear layers and norms.
        tied: The output head shares the weights of the embedding.
        qk_norm: Divide each query and key by its root mean square (no gain).
        dropout: Dropout of embeddings, attention and residual branches.
        bigram: Rows of an embedding of the pair (previous id, this id), which is added to the input; 0: none. With at
            least ``vocab_size`` squared rows, each pair has its own row; with fewer rows, pairs are hashed. Every step
            updates all rows. Characters are learned much faster with it: the validation loss on ``python-topics`` after
            300 steps (3 layers of width 96) was 1.66 without, 1.48 with 2,048 rows, and 1.29 with 8,192 rows and
            ``ngram: 5``.
        ngram: The longest sequence of ids with such an embedding. Each length from 2 on has a table of at most
            ``bigram`` rows.
        zero_init_out: Start the residual projections, and a head that is not tied, at zero: each block begins as the
            identity.
        logit_softcap: Bound of the logits, by tanh; 0: none.
        rope_base: Base of the wavelengths of ``positions: rope``.
        init: Weights as in GPT-2, or ``mup``: initialization, multipliers and learning rates of Adam that keep their
            optimum when ``d_model`` grows (Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, Table 8).
        base_width: With ``init: mup`` the ``d_model`` that the learning rate was found for.

    Raises UsageError for a value that cannot be used.
    """
    return GPT(configure(GPTConfig, options, of="gpt"))


# so that help() and a reader of signatures see the options
gpt.__signature__ = inspect.signature(GPTConfig)  # type: ignore[attr-defined]

GPT2_SIZES = {  # layers, heads, d_model; https://github.com/openai/gpt-2
    "124M": (12, 12, 768),
    "355M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}


def gpt2(size: str = "124M", **options: object) -> GPT:
    """GPT-2 as published (50,257 ids, 1,024 positions), with new weights.

    Args:
        size: ``124M``, ``355M``, ``774M`` or ``1.5B`` parameters.
        **options: Any argument of ``gpt``, instead of the published value.
    """
    require_choice("size", size, GPT2_SIZES)
    layers, heads, d_model = GPT2_SIZES[size]
    shape = {"layers": layers, "heads": heads, "d_model": d_model}
    return gpt(**{"vocab_size": 50257, "block_size": 1024, **shape, **options})
