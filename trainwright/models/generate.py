"""Text generation with a language model: each id is sampled from the distribution given the previous ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.errors import UsageError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def generate(
    model: nn.Module,
    ids_BT: Tensor,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ``ids_BT`` followed by ``tokens`` sampled ids: shape (B, T + tokens).

    Costs a full forward pass per token (no cache).

    Args:
        model: Maps ids_BT to logits_BTV. It gets only the last ``block_size`` ids.
        ids_BT: The prompt.
        tokens: Number of ids to generate.
        temperature: 0 takes the likeliest id.
        top_k: Sample from this many likeliest ids; 0: all.
        generator: None: a generator with seed 0, so that sampling during training neither changes the run's random
            numbers nor depends on them.
    """
    if temperature < 0 or top_k < 0 or tokens < 0:
        raise UsageError("temperature, top_k and tokens must be >= 0", remedy="temperature=0 takes the likeliest token")
    limit = int(getattr(model, "block_size", 0))  # 0: the model accepts any length
    generator = generator or torch.Generator(ids_BT.device).manual_seed(0)
    with evaluation_mode(model):
        for _ in range(tokens):
            logits_BV = model(ids_BT[:, -limit:])[:, -1].float()
            if top_k and top_k < logits_BV.shape[-1]:
                floor_B1 = logits_BV.topk(top_k).values[:, -1:]
                logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                chances_BV = (logits_BV / temperature).softmax(-1)
                next_B1 = torch.multinomial(chances_BV, 1, generator=generator)
            ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    return ids_BT
