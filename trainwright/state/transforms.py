"""Whether code runs within a transform of torch.func, whose tensors have no memory of their own."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Whether vmap, grad, jvp or another transform runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None
