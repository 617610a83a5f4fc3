"""The update of torch's fused Adam on a CPU by its kernels alone: what torch wraps around them takes as long again."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainwright.state.codec import StateDict

_TORCHS = os.path.join(os.path.dirname(torch.__file__), "optim", "")  # noqa: PTH118, PTH120  # as in code objects
_REPLACED = frozenset({"step", "grad_scale", "found_inf"})
"""What a scheduler, a wrapper or a GradScaler puts into an optimizer."""


def take_step(optimizer: Optimizer) -> None:
    """``optimizer.step()``, bit for bit. Hooks, profilers, and whoever has replaced it are called as ever."""
    if (type(optimizer) is AdamW or type(optimizer) is Adam) and _is_bare(optimizer):
        with torch.no_grad():
            for group in optimizer.param_groups:
                _update(optimizer, group)
    else:
        optimizer.step()


def _is_bare(optimizer: Optimizer) -> bool:
    """Whether ``step`` comes to nothing but fused kernels over plain numbers."""
    heard = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    heard_by_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled()
    if heard or heard_by_all or not _is_torchs(type(optimizer).step) or not _REPLACED.isdisjoint(optimizer.__dict__):
        return False
    return False not in [_is_plain(group) for group in optimizer.param_groups]


def _is_plain(group: StateDict) -> bool:
    if not group["fused"] or type(group["lr"]) is not float or type(group["betas"][0]) is not float:
        return False
    return False not in [p.is_cpu for p in group["params"]] and len({p.dtype for p in group["params"]}) == 1


@lru_cache(maxsize=16)
def _is_torchs(step: Callable[..., object]) -> bool:
    """Whether a function, and all that it wraps, is of torch."""
    inside: object = step
    while isinstance(inside, FunctionType) and inside.__code__.co_filename.startswith(_TORCHS):
        inside = getattr(inside, "__wrapped__", None)
    return inside is None


def _update(optimizer: Optimizer, group: StateDict) -> None:
    lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])  # weights, gradients, moments, largest, numbers of steps
    optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
    if not lists[0]:
        return
    torch._foreach_add_(lists[-1], 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        *lists,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
