"""A model that is compiled where it is: its class and the names of its weights stay."""

from __future__ import annotations

import torch
from torch import nn


def compile_in_place(model: nn.Module, backend: str = "inductor") -> None:
    """As ``model.compile()``, also where ``forward`` is torch's own, as that of ``nn.Sequential``.

    torch.compile leaves out the frames of torch.nn: of such a model ``compile()`` compiles nothing, without a word, or
    each of its parts alone. Here the call comes from a frame that is not torch's.
    """
    if not type(model).forward.__module__.startswith("torch.nn"):
        model.compile(backend=backend)
        return

    def call(*args: object, **kwargs: object) -> object:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, backend=backend)
