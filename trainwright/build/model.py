"""What is done to a model before training: LoRA, frozen parameters, activation checkpointing, compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.errors import UsageError


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stops gradients for every parameter whose name matches a glob pattern; returns their names.

    Raises UsageError for a pattern that matches nothing, and when nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names, both of them good
    frozen: list[str] = []
    for pattern in patterns:
        matches = [name for name in named if fnmatchcase(name, pattern)]
        if not matches:
            close = get_close_matches(pattern, named, n=1, cutoff=0.3)
            raise UsageError(
                f"freeze: no parameter is named like {pattern!r}",
                remedy=f"patterns are globs such as 'blocks.0.*'; the nearest name is {close[0]!r}"
                if close
                else f"names are, for instance: {', '.join(list(named)[:6])}",
            )
        frozen += matches
    for name in frozen:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("nothing is left to train: every parameter is frozen", remedy="freeze fewer parameters")
    return list(dict.fromkeys(frozen))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: ``model.blocks``, else the largest list of modules of one class.

    Raises UsageError when there is none.
    """
    declared = getattr(model, "blocks", None)
    if isinstance(declared, nn.ModuleList | nn.Sequential):
        return list(declared)
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if not alike:
        raise UsageError(
            "activation checkpointing per block: the model has no list of equal blocks",
            remedy="give the model an attribute `blocks` (nn.ModuleList or nn.Sequential)",
        )
    return max(alike, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


def checkpoint_blocks(model: nn.Module) -> int:
    """Recomputes each block in the backward pass instead of keeping its activations; returns how many.

    Gradients stay the same bits: the random generators are put back for the recomputation. Models of
    ``transformers`` get their own ``activation_checkpointing_enable()``, which older versions call
    ``gradient_checkpointing_enable()``. Key names do not change.
    """
    for kind in ("activation", "gradient"):
        own = getattr(model, f"{kind}_checkpointing_enable", None)
        if not callable(own):
            continue
        own(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
        return sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules())
    blocks = find_blocks(model)
    for block in blocks:
        if getattr(block.forward, "func", None) is not _recomputed:  # once, however often a model is prepared
            block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, trainable); tied weights count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
