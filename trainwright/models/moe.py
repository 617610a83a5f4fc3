"""A GPT whose feed-forward networks are mixtures of experts, balanced without an auxiliary loss.

Routing and balancing are those of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2; method of
https://arxiv.org/abs/2408.15664). A token is routed to the K experts with the largest score + bias. The bias does not
weight the outputs. After each step it rises by ``bias_rate`` for experts with less than the mean load, and falls for
others.

Shapes: B batch, T positions, N tokens (B T), D d_model, E experts, K experts of a token, I and O widths in and out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.models.gpt import GPT, INIT_STD, TENSOR_PLAN, FeedForward, GPTConfig, activated
from trainwright.models.options import configure, require_counts

MOE_TENSOR_PLAN = {
    name: style
    for name, style in TENSOR_PLAN.items()
    if not name.startswith("blocks.*.mlp") and style not in ("sequence", "scatter", "input")
}
"""Tensor parallelism divides attention and embeddings. The experts are computed on every rank."""


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """The options of ``moe_gpt``."""

    experts: int = 8
    active: int = 2
    shared: int = 1
    expert_width: int = 0
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "mup":
            raise UsageError("muP has no rule for the experts of a moe-gpt", remedy="use model: gpt, or init: gpt2")
        require_counts(self, {"experts": 2, "active": 1, "shared": 0, "expert_width": 0})
        if self.active > self.experts:
            raise UsageError(f"active={self.active} is more than experts={self.experts}", remedy="try active=2")
        if self.bias_rate < 0:
            raise UsageError(f"bias_rate must be >= 0; got {self.bias_rate}", remedy="0 turns the balancing off")

    @property
    def width_of_expert(self) -> int:
        """F, the hidden width of an expert.

        If ``expert_width`` is 0, the experts of a token are together about as wide as the network of a ``gpt``.
        """
        return self.expert_width or max(8, self.hidden_width // (self.active + self.shared) // 8 * 8)


class ExpertExchange(Protocol):
    """Computes rows by experts that are divided among ranks."""

    def local(self, weight: Tensor) -> Tensor:
        """Return the weights of the experts of this rank."""
        ...

    def __call__(self, rows: Tensor, load_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the outputs of ``rows``, which are sorted by expert.

        ``compute`` gets rows sorted by the experts of this rank, and the ends of their groups.
        """
        ...


class Experts(nn.Module):
    """x_BTD -> for each token, the weighted sum of the outputs of K experts, plus the output of the shared experts.

    ``bias`` and ``load`` (tokens of each expert since the last change of the bias) are buffers, so a checkpoint has
    them.
    """

    summed_over_ranks = ("load",)
    """Buffers that the engine sums over ranks after the passes of each step."""
    is_counting = True
    """False while a rank without samples of its own repeats a sample, which ``load`` must leave out."""
    expert_weights = ("gate", "up", "down")
    """Weights with one matrix for each expert, which expert parallelism divides."""
    exchange: ExpertExchange | None = None
    """Expert parallelism: the exchange with the ranks that have the other experts."""
    bias: Tensor  # (E,), as is load
    load: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        count = config.experts
        width = config.d_model
        hidden = config.width_of_expert
        self.active = config.active
        self.activation = config.activation
        self.bias_rate = config.bias_rate
        self.router = nn.Linear(width, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, width, hidden)) if config.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.shared = FeedForward(config, config.shared * hidden) if config.shared else None
        self.register_buffer("bias", torch.zeros(count, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(count, dtype=torch.float32))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        weight_NK, expert_NK = self.route(x_ND)
        order = expert_NK.flatten().argsort(stable=True)  # sorts the N K pairs (token, expert) by expert
        pairs = torch.ones_like(order, dtype=torch.float32)
        load_E = torch.zeros_like(self.load).scatter_add_(0, expert_NK.flatten(), pairs)
        if self.training and self.is_counting:
            self.load += load_E
        rows = _computed(x_ND[order // self.active])
        if self.exchange is None:
            out = self.outputs(rows, load_E.cumsum(0).int())
        else:
            out = self.exchange(rows, load_E, self.outputs)
        out_NKD = out[order.argsort()].view(*expert_NK.shape, -1)
        out_BTD = (out_NKD * weight_NK[..., None].to(out_NKD.dtype)).sum(1).view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def outputs(self, rows: Tensor, ends_E: Tensor) -> Tensor:
        """Return the outputs of the experts of this rank; see ``_grouped``."""
        gate = None if self.gate is None else _grouped(rows, self._local(self.gate), ends_E)
        hidden = activated(_grouped(rows, self._local(self.up), ends_E), gate, self.activation)
        return _grouped(hidden, self._local(self.down), ends_E)

    def _local(self, weight: Tensor) -> Tensor:
        return weight if self.exchange is None else self.exchange.local(weight)

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (N, K), which sum to 1, and the indices (N, K) of the experts of each token."""
        with torch.autocast(x_ND.device.type, enabled=False):
            score_NE = F.linear(x_ND.float(), self.router.weight.float()).sigmoid()
        expert_NK = (score_NE.detach() + self.bias).topk(self.active, dim=1).indices
        weight_NK = score_NE.gather(1, expert_NK)
        return weight_NK / weight_NK.sum(1, keepdim=True), expert_NK

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias against the load since the last call, and count the load from 0 again."""
        self.bias += self.bias_rate * (self.load.mean() - self.load).sign()
        self.load.zero_()

    def init_output(self, std: float) -> None:
        """Initialize all weights of the experts; the projections back to the residual stream have ``std``."""
        for weight in (self.gate, self.up):
            if weight is not None:
                nn.init.normal_(weight, std=INIT_STD)
        nn.init.normal_(self.down, std=std)
        if self.shared is not None:
            self.shared.init_output(std)
        for buffer in (self.bias, self.load):
            nn.init.zeros_(buffer)


def _grouped(rows: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Rows are sorted by expert; ``ends_E`` are the ends of the groups.
    """
    rows, weight_EIO = _computed(rows), _computed(weight_EIO)
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight_EIO, offs=ends_E)
    product: Tensor = _grouped_uncompiled(rows, weight_EIO, ends_E)
    return product


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _grouped_uncompiled(rows: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply as ``_grouped`` does. torch.compile accepts only bfloat16, though the kernels take other types."""
    return F.grouped_mm(rows, weight_EIO, offs=ends_E)


def _computed(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of autocast, which does not cover ``grouped_mm``."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


class MoEGPT(GPT):
    """ids_BT -> logits_BTV. The feed-forward network of each block is an ``Experts``.

    The biases change in the first forward pass of a step, by the load of the previous step. So the routing does not
    change between a forward pass and its recomputation in backward, and the load counts all micro-batches. A step
    starts when gradients are None. With several ranks, the load counts the tokens of all ranks.
    """

    tensor_plan = MOE_TENSOR_PLAN
    stage_ends = None  # type: ignore[assignment]
    """Not supported in a pipeline, where forward passes of a step follow its first backward pass."""

    options: MoEConfig

    def make_mlp(self) -> nn.Module:
        return Experts(self.options)

    def embed(self, ids_BT: Tensor) -> Tensor:
        if self.training:
            for each in self._experts():
                if each.router.weight.grad is None:
                    each.balance()
        return super().embed(ids_BT)

    def training_metrics(self) -> dict[str, Tensor]:
        """Return the load of the busiest and the idlest expert, relative to the mean, and the largest bias.

        They are means over the blocks. A balanced model has loads of 1.
        """
        loads = torch.stack([each.load / each.load.mean().clamp(min=1) for each in self._experts()])
        biases = torch.stack([each.bias.abs().max() for each in self._experts()])
        return {
            "expert_load_max": loads.amax(1).mean(),
            "expert_load_min": loads.amin(1).mean(),
            "router_bias_max": biases.mean(),
        }

    def _experts(self) -> Iterator[Experts]:
        return (module for module in self.modules() if isinstance(module, Experts))


def moe_gpt(**options: object) -> MoEGPT:
    """A GPT with mixtures of experts, balanced without an auxiliary loss: ids_BT -> logits_BTV (DeepSeek-V3, 2024).

    The loss ``language_model`` logs ``expert_load_max`` and ``expert_load_min``, relative to the mean load, and
    ``router_bias_max``.

    Args:
        vocab_size: Number of ids. Taken from the training set where a recipe leaves it out.
        block_size: The longest sequence.
        layers: Number of blocks.
        heads: Attention heads; they divide ``d_model``.
        d_model: Width of the residual stream.
        norm: As in ``gpt``.
        positions: As in ``gpt``.
        activation: As in ``gpt``, of the experts too.
        bias: As in ``gpt``. Of the experts, only the shared ones have biases.
        tied: As in ``gpt``.
        qk_norm: As in ``gpt``.
        dropout: As in ``gpt``.
        bigram: As in ``gpt``.
        ngram: As in ``gpt``.
        zero_init_out: As in ``gpt``.
        logit_softcap: As in ``gpt``.
        rope_base: As in ``gpt``.
        init: As in ``gpt``; ``mup`` is not supported.
        base_width: As in ``gpt``.
        experts: Number of experts in each block.
        active: Number of experts of each token.
        shared: Number of further experts that every token has.
        expert_width: Hidden width of an expert; 0: so that the experts of a token are together as wide as the network
            of a ``gpt``, rounded down to a multiple of 8.
        bias_rate: Change of the bias of an expert after each step; 0: no balancing. DeepSeek-V3 has 1e-3 in long runs.

    Raises UsageError for a value that cannot be used.
    """
    return MoEGPT(configure(MoEConfig, options, of="moe-gpt"))


# so that help() and a reader of signatures see the options
moe_gpt.__signature__ = inspect.signature(MoEConfig)  # type: ignore[attr-defined]
