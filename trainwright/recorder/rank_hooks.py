"""Wrappers of the calls by which a loop of several ranks exchanges gradients and buffers. Each calls the listeners."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from trainwright.recorder.listener import has_listeners, tell
from trainwright.recorder.user_types import TorchFunction


def _wrap_wrapped_call(original: TorchFunction) -> TorchFunction:
    def forward(self: DistributedDataParallel, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            tell("on_wrapped_call", self, self.require_backward_grad_sync)
        return original(self, *args, **kwargs)

    return forward


def _wrap_pre_forward(original: TorchFunction) -> TorchFunction:
    """Wraps the synchronization of buffers by DistributedDataParallel before a forward pass."""

    def pre_forward(self: object, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not has_listeners():
            return original(self, *args, **kwargs)
        begin_s = time.perf_counter()
        result = original(self, *args, **kwargs)
        tell("on_waited", time.perf_counter() - begin_s)
        return result

    return pre_forward


def _wrap_all_reduce(original: TorchFunction) -> TorchFunction:
    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not has_listeners():
            return original(tensor, *args, **kwargs)
        tell("on_reduce", tensor, args[0] if args else kwargs.get("op", distributed.ReduceOp.SUM))
        begin_s = time.perf_counter()
        result = original(tensor, *args, **kwargs)
        tell("on_reduced", tensor, time.perf_counter() - begin_s)
        return result

    return all_reduce


RANK_WRAPPERS: tuple[tuple[object, str, Callable[[TorchFunction], TorchFunction]], ...] = (
    (DistributedDataParallel, "forward", _wrap_wrapped_call),
    (DistributedDataParallel, "_pre_forward", _wrap_pre_forward),
    (distributed, "all_reduce", _wrap_all_reduce),
)
"""Owner, name and wrapper of each function that ``hooks`` replaces."""
