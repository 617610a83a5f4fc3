"""Compiles a model in place: its class and the names of its weights stay."""

from __future__ import annotations

import torch
from torch import nn


def compile_in_place(model: nn.Module, backend: str = "inductor") -> None:
    """Compile as ``model.compile()``, also if ``forward`` is torch's, as that of ``nn.Sequential``.

    torch.compile skips the frames of torch.nn: for such a model ``compile()`` silently compiles nothing, or each of its
    parts separately. Here the call comes from a frame outside torch.
    """
    if not type(model).forward.__module__.startswith("torch.nn"):
        model.compile(backend=backend)
        return

    def call(*args: object, **kwargs: object) -> object:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, backend=backend)
