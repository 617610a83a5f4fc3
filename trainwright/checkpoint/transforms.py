"""Whether code runs within a transform of torch.func, whose tensors have no memory of their own."""

from __future__ import annotations

import torch

innermost_transform = torch._C._functorch.peek_interpreter_stack
"""vmap, grad, jvp or another one that runs; None without one."""


def is_transformed() -> bool:
    """Whether vmap, grad, jvp or another transform runs."""
    return innermost_transform() is not None
