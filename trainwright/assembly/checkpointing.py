"""Applies activation checkpointing to a model, block by block, as specified by a ``Checkpointing``.

Gradients, random numbers and buffers are bit-identical to those without it; see ``selective``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.assembly.selective import CheckpointedForward, KeepRule
from trainwright.errors import UsageError
from trainwright.plan.checkpointing import Checkpointing

SELECTIVE = ("matmul", "convolution", "attention")
"""The policy ``selective``: outputs that cost many FLOPs are saved, those that cost memory traffic are not."""
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model.

    These are the layers of a Hugging Face model, else ``model.blocks``, else the largest list of modules of one class.

    Raises:
        UsageError: There are none.
    """
    if layers := _hugging_face_layers(model):
        return layers
    declared = getattr(model, "blocks", None)
    if isinstance(declared, nn.ModuleList | nn.Sequential):
        return list(declared)
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    uniform_lists = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if not uniform_lists:
        raise UsageError(
            "activation checkpointing per block: the model has no list of equal blocks",
            remedy="give the model an attribute `blocks` (nn.ModuleList or nn.Sequential)",
        )
    return max(uniform_lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


def apply_checkpointing(model: nn.Module, checkpointing: Checkpointing) -> int:
    """Apply activation checkpointing to the blocks of a model; return the number of blocks that have it.

    Replaces earlier activation checkpointing. It is active in training mode with gradients enabled. Names in the state
    dict do not change. Models of ``transformers`` use their switch, which also turns off the cache of past keys.

    Raises:
        UsageError: The model has no blocks, or another number of them.
    """
    blocks = find_blocks(model)
    if len(blocks) != len(checkpointing.blocks):
        raise UsageError(
            f"activation checkpointing for {len(checkpointing.blocks)} blocks does not fit a model of {len(blocks)}",
            remedy="plan it again for this model",
        )
    regions = [Region(block, keep) for block, keep in zip(blocks, checkpointing.blocks, strict=True)]
    if _hugging_face_layers(model):
        _switch_hugging_face(model, regions)
    else:
        for region in regions:
            region.install()
    return checkpointing.count


def checkpointing_as_requested(model: nn.Module, setting: str, planned: Checkpointing | None = None) -> Checkpointing:
    """Apply ``model.activation_checkpointing`` of a recipe and return what was applied.

    ``auto`` and an amount of memory apply ``planned``. Raises UsageError if that is missing.
    """
    if setting in ("block", "selective"):
        planned = Checkpointing.every(len(find_blocks(model)), SELECTIVE if setting == "selective" else ())
    if planned is None:
        raise UsageError(f"{setting!r} requires a plan, and there is none", remedy="write none, block or selective")
    apply_checkpointing(model, planned)
    return planned


class Region:
    """One block and the sites in it whose outputs are saved; ``keep`` None: no activation checkpointing."""

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
        """Replace the block's ``forward``. Hooks on the block stay outside, as those of FSDP must."""
        installed = self.block.__dict__.get("forward")
        if isinstance(installed, partial) and installed.func is _forward:
            forward = installed.args[1]
            del self.block.forward
        else:
            forward = self.block.forward
        if self.keep is not None:
            self.block.forward = partial(_forward, self, forward)
        elif getattr(forward, "__func__", None) is not type(self.block).forward:
            self.block.forward = forward  # an instance attribute that existed before

    def run(self, forward: Callable[..., object], *args: object, **kwargs: Any) -> object:
        """Return ``forward(*args, **kwargs)`` under activation checkpointing."""
        if self.keep is None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph restores neither buffers nor generators of the host
            if not self.keep:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, self.keep), **kwargs)
        return checkpoint(CheckpointedForward(forward, self.keep, self.buffers), *args, use_reentrant=False, **kwargs)


def _forward(region: Region, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if not (region.block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return region.run(forward, *args, **kwargs)


def _contexts(keep: tuple[str, ...]) -> Contexts:
    """Return torch's contexts of the forward pass and of its second run, which torch.compile supports."""
    rule = KeepRule(keep)

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_saved = isinstance(op, OpOverload) and rule.site(op, args, kwargs) is not None
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _hugging_face_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that ``transformers`` itself can checkpoint, in the order of the model."""
    return [m for m in model.modules() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)]


def _switch_hugging_face(model: nn.Module, regions: Sequence[Region]) -> None:
    """Use the switch of ``transformers``, whose name changed in 5.x; it also turns off the cache of past keys."""
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
