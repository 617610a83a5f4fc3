"""Detects transforms of torch.func, whose tensors have no memory."""

from __future__ import annotations

import torch

innermost_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the active transform (vmap, grad, jvp, ...); None without one."""


def is_transformed() -> bool:
    """Return True inside vmap, grad, jvp or another transform."""
    return innermost_transform() is not None
