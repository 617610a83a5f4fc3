"""Shape functions for operators for which torch has only kernels, so that fake tensors work with them."""

from __future__ import annotations

from functools import cache

import torch

IN_PLACE = ("_fused_sgd_", "_fused_adagrad_")
"""Operators that write to their arguments and return nothing, so there is no shape to compute. torch 2.13 lacks them.
"""


@cache
def register_missing_kernels() -> torch.library.Library:
    """Register them with torch at the first call, for the rest of the process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in IN_PLACE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, lambda *args, **kwargs: None, "Meta")  # type: ignore[no-untyped-call]
    return library
