"""The fused linear and cross-entropy kernel of the package ``liger-kernel`` (https://arxiv.org/abs/2410.10989).

An optional extra, for CUDA only. Untested on a device; not used if the package is not installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def _is_installed() -> bool:
    return find_spec("liger_kernel") is not None


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(_fused()).parameters)


def _fused() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = import_module(
        "liger_kernel.transformers.functional"
    ).liger_fused_linear_cross_entropy
    return function


def usable_liger(hidden: Tensor, compute: torch.dtype, *, is_weighed: bool) -> bool:
    """Return True if the kernel can compute this loss. Not in fp16: it computes gradients before the loss scale is
    known.

    Class weights are supported since pull request 420; its z-loss is unweighted, as in ``chunked_cross_entropy``.
    """
    if not hidden.is_cuda or compute not in (torch.float32, torch.bfloat16) or not _is_installed():
        return False
    return not is_weighed or "ce_weight" in _parameters()


def liger_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None,
    weight_V: Tensor | None,
    **options: float,
) -> Tensor:
    """Return the sum over all rows. ``options`` are those of ``chunked.Options``."""
    options_of_liger: dict[str, Any] = {
        "ignore_index": options.get("ignore_index", -100),
        "label_smoothing": options.get("label_smoothing", 0.0),
        "lse_square_scale": options.get("z_loss", 0.0),
        "softcap": options.get("softcap") or None,
    }
    if weight_V is not None:
        options_of_liger["ce_weight"] = weight_V.float()
    if "accum_dtype" in _parameters():  # since 0.6
        options_of_liger["accum_dtype"] = torch.float32
    return _fused()(hidden_ND, weight_VD, target_N, bias=bias_V, reduction="sum", **options_of_liger).float()
