"""The finite guard: a step with non-finite gradients leaves weights, optimizer state and buffers bit-identical."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.shards import is_divided

MAX_COPIED_TABLE_BYTES = 64 * 2**20  # larger non-persistent buffers are not copied
APPLIED, SKIPPED = torch.tensor(False, device="cpu"), torch.tensor(True, device="cpu")
"""Flags on the CPU, which are read without a host sync. They are never written to."""


def must_skip(grad_norm: Tensor, weight: Tensor | float) -> Tensor:
    """Return a 0-d bool: True if the gradients are not finite or nothing was counted in the global batch."""
    if grad_norm.device.type == "cpu":
        return APPLIED if math.isfinite(float(grad_norm)) and weight != 0 else SKIPPED
    finite = torch.isfinite(grad_norm)
    if isinstance(weight, Tensor):
        return ~(finite & (weight != 0))
    return ~finite if weight else torch.ones_like(finite)


def update_unless(skipped: Tensor, optimizer: Optimizer) -> None:
    """Run the optimizer's step unless ``skipped``; if skipped, weights and optimizer state stay bit-identical.

    On the CPU the flag is read directly. On a GPU, fused optimizers and Trainwright's own take it on the device
    (``found_inf``, the contract of torch's GradScaler). Other optimizers, and weights that are divided among ranks,
    cost one host sync per step.
    """
    for part in parts_of(optimizer):
        if skipped is APPLIED:  # nearly every step on a CPU
            part.step()
            continue
        takes_flag = getattr(part, "_step_supports_amp_scaling", False)
        if skipped.device.type != "cpu" and takes_flag and not _is_divided(part):
            update_on_device(skipped, part)
        elif not bool(skipped):
            part.step()


def _is_divided(optimizer: Optimizer) -> bool:
    return any(is_divided(parameter) for group in optimizer.param_groups for parameter in group["params"])


def update_on_device(skipped: Tensor, optimizer: Optimizer) -> None:
    """Run the optimizer's step, which applies nothing if ``skipped`` is true. Needs no host sync."""
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


class BufferGuard:
    """Restores buffers that a forward pass may change, such as the running statistics of BatchNorm.

    A NaN in one batch would stay in a running mean even though the update was not applied. Costs a copy of each
    persistent buffer: nothing for most transformers, 60 small ones for a ResNet-18. Non-persistent buffers, mostly
    tables, are copied once and after each change, and only ``put_back`` restores them.
    """

    def __init__(self) -> None:
        self._roots: tuple[nn.Module | None, ...] = ()
        self._places: list[tuple[nn.Module, str]] = []
        self._live: list[Tensor] = []
        self._before: list[Tensor] = []
        self._tables: list[_Table] = []

    def keep(self, *roots: nn.Module | None) -> None:
        """Copy the buffers of the model and of a loss module, before the first forward pass of a step."""
        if roots != self._roots:
            self._roots = roots
            places = [place for root in roots if root is not None for place in _places(root)]
            self._places = [(module, name) for module, name, kept in places if kept]
            self._tables = [_Table(module, name) for module, name, kept in places if not kept]
        if not self._places and not self._tables:
            return
        self._live = [getattr(module, name) for module, name in self._places]
        self._before = [live.clone() for live in self._live]
        for table in self._tables:
            table.keep()

    def restore_if(self, skipped: Tensor) -> None:
        """Restore the copies if ``skipped`` is true; on a GPU without a host sync."""
        if skipped is APPLIED or (skipped.device.type == "cpu" and not bool(skipped)):
            return
        with torch.no_grad():
            for (module, name), before in zip(self._places, self._before):
                live = getattr(module, name)
                live.copy_(torch.where(skipped, before, live))

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Restore all buffers, including replaced ones.

        Returns the names of buffers that cannot be restored.
        """
        for (module, name), live, before in zip(self._places, self._live, self._before, strict=True):
            live.copy_(before)
            module._buffers[name] = live
        return [table.name for table in self._tables if not table.put_back()]


class _Table:
    """A non-persistent buffer. If it is too large to be copied, only the fact that it changed is known."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self._live: Tensor | None = None
        self._version = 0
        self._before: Tensor | None = None

    def keep(self) -> None:
        live = self.module._buffers.get(self.name)
        if live is None or live.is_inference():  # inference tensors cannot be written to
            self._live = self._before = None
        elif live is not self._live or live._version != self._version:
            self._live, self._version = live, live._version
            self._before = live.clone() if live.nbytes <= MAX_COPIED_TABLE_BYTES else None

    def put_back(self) -> bool:
        if self._live is None:
            return True
        self.module._buffers[self.name] = self._live
        if self._live._version == self._version:
            return True
        if self._before is not None:
            self._live.copy_(self._before)
        return self._before is not None


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield each buffer, and whether it is persistent."""
    for module in model.modules():
        for name, _ in module.named_buffers(recurse=False):
            yield module, name, name not in module._non_persistent_buffers_set
