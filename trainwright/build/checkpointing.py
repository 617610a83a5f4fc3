"""Activation checkpointing: what a ``Checkpointing`` names is computed again in backward instead of being kept.

Gradients, random numbers and buffers stay the same bits as without it; see ``selective``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.build.selective import KeepRule, RecomputedForward
from trainwright.errors import UsageError
from trainwright.plan.checkpointing import Checkpointing

SELECTIVE = ("matmul", "convolution", "attention")
"""The fixed policy: what costs many FLOPs is kept, what costs memory traffic is computed again."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the layers of a Hugging Face model, else ``model.blocks``, else the largest
    list of modules of one class.

    Raises UsageError when there is none.
    """
    if layers := _hugging_face_layers(model):
        return layers
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


def apply_checkpointing(model: nn.Module, recompute: Checkpointing) -> int:
    """Makes a model compute again what ``recompute`` names; returns of how many blocks.

    It replaces what was applied before, and works only in training mode and with gradients. Key names do not
    change. Models of ``transformers`` are called through their own switch, which also turns the cache of past keys
    off.

    Raises UsageError when the model has no blocks, or another number of them.
    """
    blocks = find_blocks(model)
    if len(blocks) != len(recompute.blocks):
        raise UsageError(
            f"a recomputation for {len(recompute.blocks)} blocks does not fit a model of {len(blocks)}",
            remedy="plan it again for this model",
        )
    regions = [Region(block, keep) for block, keep in zip(blocks, recompute.blocks, strict=True)]
    if _hugging_face_layers(model):
        _switch_hugging_face(model, regions)
    else:
        for region in regions:
            region.install()
    return recompute.count


def checkpointing_as_requested(model: nn.Module, ask: str, planned: Checkpointing | None = None) -> Checkpointing:
    """Applies ``model.activation_checkpointing`` of a recipe and returns what was applied.

    ``auto`` and an amount of memory take what was ``planned``. Raises UsageError where that is missing.
    """
    if ask in ("block", "selective"):
        planned = Checkpointing.every(len(find_blocks(model)), SELECTIVE if ask == "selective" else ())
    if planned is None:
        raise UsageError(f"{ask!r} asks for a plan, and none was made", remedy="write none, block or selective")
    apply_checkpointing(model, planned)
    return planned


class Region:
    """One block and which of its outputs are kept: None for all, else the sites in ``keep``."""

    def __init__(self, block: nn.Module, keep: tuple[str, ...] | None) -> None:
        self.block = block
        self.keep = keep
        self.buffers = [
            (module, name)
            for module in block.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set  # tables of constants
        ]

    def install(self) -> None:
        """In place of the block's ``forward``: hooks on the block stay outside, as FSDP's must."""
        installed = self.block.__dict__.get("forward")
        if isinstance(installed, partial) and installed.func is _forward:
            forward = installed.args[1]
            del self.block.forward
        else:
            forward = self.block.forward
        if self.keep is not None:
            self.block.forward = partial(_forward, self, forward)
        elif getattr(forward, "__func__", None) is not type(self.block).forward:
            self.block.forward = forward  # somebody else's, put there before ours

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward(*args, **kwargs)``, its activations computed again in backward."""
        if self.keep is None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiled graph replays neither buffers nor draws of the host
            if not self.keep:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, self.keep), **kwargs)
        return checkpoint(RecomputedForward(forward, self.keep, self.buffers), *args, use_reentrant=False, **kwargs)


def _forward(region: Region, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (region.block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return region.run(forward, *args, **kwargs)


def _contexts(keep: tuple[str, ...]) -> tuple[Any, Any]:
    """What torch.compile understands: the contexts of one forward pass and its recomputation."""
    rule = KeepRule(keep)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        wanted = hasattr(op, "_schema") and rule.site(op, args, kwargs) is not None
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _hugging_face_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that ``transformers`` itself can compute again, in the order of the model; [] without any."""
    return [m for m in model.modules() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)]


def _switch_hugging_face(model: nn.Module, regions: Sequence[Region]) -> None:
    """Through the switch of ``transformers``, whose name changed in 5.x; it also turns off the cache of past keys."""
    on = any(region.keep is not None for region in regions)
    verb = "enable" if on else "disable"
    for module in model.modules():
        if switch := getattr(module, f"activation_checkpointing_{verb}", None):
            switch({"use_reentrant": False}) if on else switch()
            break
        if switch := getattr(module, f"gradient_checkpointing_{verb}", None):
            switch({"use_reentrant": False}) if on else switch()
            break
    for region in regions:
        layer: Any = region.block
        layer.gradient_checkpointing = region.keep is not None
        layer._gradient_checkpointing_func = region.run
