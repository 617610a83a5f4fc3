"""The fused linear and cross-entropy kernel of the package ``liger-kernel`` (https://arxiv.org/abs/2410.10989).

An optional extra, for CUDA only. It has not been tried on a device by us; without the package nothing here is used.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def _is_installed() -> bool:
    return find_spec("liger_kernel") is not None


def usable_liger(hidden: Tensor, compute: torch.dtype) -> bool:
    """Whether its kernel can compute this. Not in fp16: it makes gradients before the loss scale is known."""
    return hidden.is_cuda and compute in (torch.float32, torch.bfloat16) and _is_installed()


def liger_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, bias_V: Tensor | None, **options: float
) -> Tensor:
    """The sum over all rows. ``options``: ignore_index, label_smoothing, z_loss, softcap."""
    functional = import_module("liger_kernel.transformers.functional")
    fused = functional.liger_fused_linear_cross_entropy

    given: dict[str, Any] = {
        "ignore_index": options["ignore_index"],
        "label_smoothing": options["label_smoothing"],
        "lse_square_scale": options["z_loss"],
        "softcap": options["softcap"] or None,
    }
    if "accum_dtype" in inspect.signature(fused).parameters:  # since 0.6
        given["accum_dtype"] = torch.float32
    total: Tensor = fused(hidden_ND, weight_VD, target_N, bias=bias_V, reduction="sum", **given)
    return total.float()
