"""The finite guard: a step whose gradients are not finite leaves weights, optimizer and buffers the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def must_skip(grad_norm: Tensor, weight: Tensor | float) -> Tensor:
    """0-d bool: the gradients are not finite, or nothing was counted in the whole batch."""
    finite = torch.isfinite(grad_norm)
    if isinstance(weight, Tensor):
        return ~(finite & (weight != 0))
    return ~finite if weight else torch.ones_like(finite)


def update_unless(skipped: Tensor, optimizer: Optimizer) -> None:
    """The optimizer's step, unless ``skipped``: then weights and optimizer state stay the same bits.

    On the CPU the flag is simply read. On a GPU, fused and our own optimizers take it on the device
    (``found_inf``, the contract of torch's GradScaler); any other costs one host sync a step.
    """
    if skipped.device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False):
        update_on_device(skipped, optimizer)
    elif not bool(skipped):
        optimizer.step()


def update_on_device(skipped: Tensor, optimizer: Optimizer) -> None:
    """The optimizer's step, of which it applies nothing where ``skipped``; the host does not look."""
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


class BufferGuard:
    """Keeps buffers that a forward pass may change: BatchNorm's running statistics and their like.

    One batch of NaN would stay in a running mean for ever, though its update was not applied. Guarded are the
    buffers that a checkpoint keeps. Costs a copy of each: nothing for most transformers, 60 small ones for a
    ResNet-18.
    """

    def __init__(self) -> None:
        self._roots: tuple[nn.Module | None, ...] = ()
        self._places: list[tuple[nn.Module, str]] = []
        self._before: list[Tensor] = []

    def keep(self, *roots: nn.Module | None) -> None:
        """Before the first forward pass of a step: of the model, and of a loss that is a module. Searched once."""
        if roots != self._roots:
            self._roots = roots
            self._places = [place for root in roots if root is not None for place in _places(root)]
        self._before = [getattr(module, name).clone() for module, name in self._places]

    def restore_if(self, skipped: Tensor) -> None:
        """Puts them back where ``skipped`` is true; on a GPU without asking."""
        if skipped.device.type == "cpu" and not bool(skipped):
            return
        with torch.no_grad():
            for (module, name), before in zip(self._places, self._before):
                live = getattr(module, name)
                live.copy_(torch.where(skipped, before, live))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield module, name
