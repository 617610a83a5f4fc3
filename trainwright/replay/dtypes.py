"""Replays in another dtype: weights and buffers are cast temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.recorder.user_types import Args, Kwargs

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@contextmanager
def cast_to(subject: LiveObjects, name: Literal["fp32", "fp64"]) -> Iterator[None]:
    """Context in which all floating-point weights and buffers have another dtype. For use within ``Replayer.stage``."""
    dtype = DTYPES[name]
    before = [p.data for p in subject.parameters]
    grads = [p.grad for p in subject.parameters]
    buffers = [(m, n, m._buffers[n]) for m, n in subject.buffers()]
    for p in subject.parameters:
        p.grad = None
        p.data = p.data.to(dtype) if p.is_floating_point() else p.data
    for module, key, buffer in buffers:
        if buffer is not None and buffer.is_floating_point():
            module._buffers[key] = buffer.to(dtype)
    try:
        with _MaskOfSameDtype():  # type: ignore[no-untyped-call]
            yield
    finally:
        for p, data, grad in zip(subject.parameters, before, grads):
            p.grad = None
            p.data = data
            p.grad = grad
        for module, key, buffer in buffers:
            module._buffers[key] = buffer


class _MaskOfSameDtype(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes attention a mask in the dtype of its other arguments. torch 2.13 misreads a mask of another dtype."""

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            kwargs["attn_mask"] = mask.to(args[0].dtype)
        return function(*args, **kwargs)
