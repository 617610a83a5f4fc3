"""Names the mechanism by which an op makes non-finite values of finite ones, from the op and its input ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Range:
    """The range of a floating-point tensor. ``min``, ``max`` and ``absmax`` cover its finite values; 0 without any.

    ``nan``, ``inf``, ``neg_inf`` and ``zeros`` are counts. ``inf`` counts both signs.
    """

    min: float
    max: float
    absmax: float
    nan: int
    inf: int
    neg_inf: int
    zeros: int
    numel: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def finite(self) -> bool:
        return not self.nan and not self.inf


def range_of(tensor: Tensor) -> Range:
    """Returns the range of a tensor. Costs three small device transfers, more if values are non-finite."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values = values.float() if values.element_size() == 1 else values  # float8 has no reductions
    shape, dtype, numel = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), values.numel()
    low, high = _ends(values)
    zeros = numel - int(torch.count_nonzero(values))
    if math.isfinite(low) and math.isfinite(high):
        return Range(low, high, max(-low, high), 0, 0, 0, zeros, numel, shape, dtype)
    nan, inf, below = (int(torch.count_nonzero(x)) for x in (values.isnan(), values.isinf(), values.isneginf()))
    low, high = _ends(values[values.isfinite()])
    return Range(low, high, max(-low, high), nan, inf, below, zeros, numel, shape, dtype)


def _ends(values: Tensor) -> tuple[float, float]:
    if not values.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    return float(low), float(high)


def pooled(ranges: Sequence[Range]) -> Range:
    """Returns the joint range of several tensors, with shape and dtype of the first."""
    if len(ranges) == 1:
        return ranges[0]
    low, high = min(x.min for x in ranges), max(x.max for x in ranges)
    nan, inf, below = sum(x.nan for x in ranges), sum(x.inf for x in ranges), sum(x.neg_inf for x in ranges)
    zeros, numel = sum(x.zeros for x in ranges), sum(x.numel for x in ranges)
    return Range(low, high, max(-low, high), nan, inf, below, zeros, numel, ranges[0].shape, ranges[0].dtype)


SOFTMAX = {"softmax", "log_softmax", "safe_softmax"}
FILLS = {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill", "index_fill", "constant_pad_nd"}
HIDES = {"where", "masked_fill", "masked_scatter", "index_put", "index_fill", "nan_to_num", "masked_select", "scatter"}
"""Ops that replace selected values: the old values are absent from the result, but may affect the gradient."""
REDUCES = {"sum", "mean", "nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "dot", "mm", "bmm", "addmm"}
REDUCES |= {"linalg_vector_norm", "norm", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
EXPONENTIALS = {"exp", "expm1", "exp2", "sinh", "cosh"}
_MASK_LIKE = {"mul", "add", "sub", "rsub", "to_copy", "copy", "where", "masked_fill"}
_PRODUCTS = {"mul", "mm", "bmm", "addmm", "baddbmm", "dot", "addcmul", "convolution", "xlogy", "mv"}
_ROOTS = {"sqrt", "std", "std_mean", "norm", "linalg_vector_norm", "cdist_forward", "euclidean_dist", "pow"}
_EDGES = {"acos", "asin", "acosh", "atanh", "atan2", "logit", "erfinv"}
_DIVISOR = {"div": 1, "remainder": 1, "fmod": 1, "addcdiv": 2, "rsqrt": 0, "reciprocal": 0}


def _range_of_argument(value: object) -> Range | None:
    """Returns the range of one argument: a number counts as one element, a list as one tensor."""
    if isinstance(value, Range):
        return value
    if isinstance(value, bool | int | float):
        value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
    if isinstance(value, Tensor):
        return range_of(value.double())
    ranges = [_range_of_argument(x) for x in value] if isinstance(value, list) else []
    return pooled([x for x in ranges if x is not None]) if ranges and None not in ranges else None


def forward_word(name: str, args: Sequence[object], output: Range) -> str:
    """Returns the mechanism of an op with finite inputs and a non-finite ``output``."""
    name = name.removeprefix("foreach_")
    if name in ("nll_loss_forward", "nll_loss2d_forward") and output.nan:
        return "no_valid_target"
    if name in ("ctc_loss", "cudnn_ctc_loss"):
        return "ctc_infeasible"
    first = _range_of_argument(args[0]) if args else None
    if first is None:
        return "nan_written" if output.nan else "overflow"
    if (word := _domain_word(name, args, first, output)) is not None:
        return word
    if name in FILLS:
        return "nan_written" if output.nan else "inf_written"
    return "invalid" if output.nan and not output.inf else "overflow"


def _domain_word(name: str, args: Sequence[object], first: Range, output: Range) -> str | None:
    """Returns the mechanism of ops with a limited domain: logarithm, quotient, root, exponential, empty mean."""
    if name in ("log", "log2", "log10", "xlogy"):
        of = _range_of_argument(args[1]) if name == "xlogy" else first
        return "log_of_zero" if of is not None and of.zeros and not of.min < 0 else "log_of_negative"
    if name == "log1p":
        return "log_of_zero" if first.min == -1 else "log_of_negative"
    if name == "logit" and output.inf:
        return "log_of_zero"
    if name in _DIVISOR and len(args) > _DIVISOR[name]:
        divisor = _range_of_argument(args[_DIVISOR[name]])
        if divisor is not None and divisor.zeros:
            return "div_by_zero"
    if name == "pow":
        power = _range_of_argument(args[1])
        below = power is not None and power.min < 0
        return "div_by_zero" if first.zeros and below else ("power_of_negative" if output.nan else None)
    if name in ("sqrt", "rsqrt") and output.nan:
        return "sqrt_of_negative"
    if name in EXPONENTIALS:
        return "exp_overflow"
    if name in ("mean", "var", "std", "var_mean", "std_mean", "native_batch_norm") and output.nan:
        return "mean_of_empty" if not first.numel else ("std_of_one" if name != "mean" else None)
    return "out_of_domain" if name in _EDGES else None


def infinite_word(name: str, inputs: Sequence[Range]) -> str:
    """Returns the mechanism of an op that turns intended infinities, as of a mask, into NaN."""
    if name in SOFTMAX:
        return "softmax_all_masked" if all(x.inf == x.neg_inf for x in inputs) else "inf_in_softmax"
    return "zero_times_inf" if name in _PRODUCTS else "inf_minus_inf"


def backward_word(name: str, args: Sequence[object], output: Range, source: str, inputs: Sequence[Range]) -> str:
    """Returns the mechanism of an op of the backward pass. ``source`` is its forward op, with the ranges ``inputs``."""
    if source in _ROOTS and any(x.zeros for x in inputs):
        return "sqrt_at_zero_backward"
    return "domain_edge_backward" if source in _EDGES else forward_word(name, args, output)


def in_fp32(func: TorchFunction, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns the result of ``func`` in float32 instead of 16-bit dtypes; None if it is not supported."""

    def widen(value: object) -> object:
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            return value.float()
        if isinstance(value, torch.dtype) and value in HALF_DTYPES:
            return torch.float32
        return type(value)(map(widen, value)) if isinstance(value, list | tuple) else value

    try:
        out = func(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})
    except (RuntimeError, NotImplementedError):  # a kernel for 16-bit dtypes only
        return None
    out = out[0] if isinstance(out, list | tuple) else out
    return out if isinstance(out, Tensor) else None


def narrow_word(name: str, constants: Sequence[object], output: Tensor, exact: Tensor) -> str:
    """Returns why float16 overflows and float32 does not: a mask with a huge constant, or a large activation.

    A mask is negative, has one value wherever it overflowed, and comes from one of ``constants``, the arguments that
    require no gradient.
    """
    overflowed = exact[output.isneginf()]
    if name not in _MASK_LIKE or bool(output.isposinf().any()) or bool(output.isnan().any()) or not overflowed.numel():
        return "fp16_overflow"
    low, high = _ends(overflowed)
    largest = max((found.absmax for x in constants if (found := _range_of_argument(x)) is not None), default=0.0)
    return "mask_overflow" if largest >= 1e4 and high - low <= 0.01 * abs(low) else "fp16_overflow"
