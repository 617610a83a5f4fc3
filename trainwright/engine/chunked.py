"""Linear layer and cross-entropy fused in one function, in chunks of rows, so that the full logits are never stored.

The forward pass also computes the gradients from the logits of each chunk (as in https://arxiv.org/abs/2410.10989), so
no matmul is repeated. Under fp16 the backward pass computes logits and gradients again, because the loss scale is known
only there, and without it small gradients would become 0.

Shapes: N rows (tokens), D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from trainwright.errors import UsageError

IGNORE = -100
CHUNK_BYTES = {"cpu": 1 << 25}
"""Size of the logits of one chunk in bytes, by device type. It includes the copies in float32 and in the compute dtype.

Smaller chunks read and write the gradient of the weight more often; see benchmarks/chunked_loss.py.
"""
CHUNK_BYTES_ELSEWHERE = 1 << 28  # on all other device types
WEIGHT_GRADIENT_PARTS = {"cpu": 8}
"""Number of parts in which the gradient of the weight is added if the matmul cannot accumulate it, by device type; 1 on
all other devices."""
CLASS_ALIGNMENT = {"cpu": 1}
"""The number of classes is padded with zero rows to a multiple of this, by device type; 64 on all other devices.

With rows of 50,257 16-bit numbers, only the first row is aligned to 16 bytes, and the matmuls of an H200 took seven
times as long.
"""
BYTES_PER_LOGIT = 12
"""Bytes that plain cross-entropy holds per logit in float32: the logit, its log-softmax and its gradient."""


def logits_bytes(rows: int, classes: int) -> int:
    """Return the memory that plain cross-entropy needs for ``rows`` rows, in bytes."""
    return BYTES_PER_LOGIT * rows * classes


class Options(TypedDict, total=False):
    """Options of the loss.

    Attributes:
        ignore_index: As in F.cross_entropy; default -100.
        label_smoothing: As in F.cross_entropy; default 0.
        z_loss: Weight of the squared log-denominator of the softmax, added for each counted row
            (https://arxiv.org/abs/2204.02311, section 5).
        softcap: Bounds the logits to (-cap, cap) by tanh; 0 is off.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


@dataclass(frozen=True)
class _Config:
    """Options of the loss, the compute dtype, and the rows of a chunk.

    ``wanted`` says whether the gradients of hidden, weight and bias are needed.
    """

    compute: torch.dtype
    rows: int
    wanted: tuple[bool, bool, bool]
    ignore_index: int = IGNORE
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    @property
    def accumulate(self) -> torch.dtype:
        return torch.promote_types(self.compute, torch.float32)

    @property
    def needs_loss_scale(self) -> bool:
        """True if the gradients are computed in the backward pass, where the loss scale is known."""
        return self.compute == torch.float16


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    weight_V: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Return the sum over rows of the cross-entropy of ``F.linear(hidden_ND, weight_VD, bias_V)``.

    Equals ``F.cross_entropy(logits.float(), target, weight_V, reduction="sum", ...)``, extended by ``options``. Needs
    memory for one chunk and the gradients. Under autocast the matmuls use its dtype and accumulate in float32. On CUDA
    the kernel of the package ``liger-kernel`` is used if it is installed (not for fp16).

    Args:
        hidden_ND: Inputs of the linear layer.
        weight_VD: Weight of the linear layer.
        target_N: Class of each row.
        bias_V: Bias of the linear layer.
        weight_V: Weight of each class, applied to the smoothing too, but not to the z-loss.
        options: See ``Options``.

    Returns:
        A 0-d tensor in float32 or float64.

    Raises:
        IndexError: A target is not a class (on the CPU).
        UsageError: A second derivative or a derivative with respect to ``weight_V`` is requested; both are not
            implemented.
    """
    tensors = [each for each in (hidden_ND, weight_VD, target_N, bias_V, weight_V) if each is not None]
    if has_torch_function(tensors):  # torch function modes record this call like calls of F
        total: Tensor = handle_torch_function(
            chunked_cross_entropy, tensors, hidden_ND, weight_VD, target_N, bias_V=bias_V, weight_V=weight_V, **options
        )
        return total
    has_grad = torch.is_grad_enabled()
    if has_grad and weight_V is not None and weight_V.requires_grad:
        raise UsageError("the weights of classes are not learned", remedy="give weight_V.detach()")
    compute = _compute_dtype(hidden_ND)
    if (liger := _usable_liger(hidden_ND, compute, has_class_weights=weight_V is not None)) is not None:
        hidden_ND, weight_VD = hidden_ND.to(compute), weight_VD.to(compute)
        return _liger_cross_entropy(liger, hidden_ND, weight_VD, target_N, bias_V, weight_V, **options)
    config = _Config(
        compute=compute,
        rows=_chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type, compute),
        wanted=(
            has_grad and hidden_ND.requires_grad,
            has_grad and weight_VD.requires_grad,
            has_grad and bias_V is not None and bias_V.requires_grad,
        ),
        **options,
    )
    loss: Tensor = _Chunked.apply(hidden_ND, weight_VD, bias_V, weight_V, target_N, config)  # type: ignore[no-untyped-call]
    return loss


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would compute now, under autocast or not."""
    kind = hidden.device.type
    is_autocast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype


def _chunk_rows(rows: int, classes: int, kind: str, compute: torch.dtype) -> int:
    """Return C. All chunks but the last have C rows; C depends on shapes and dtypes only."""
    size = max(4, compute.itemsize) + (compute.itemsize if compute.itemsize < 4 else 0)
    most = max(1, CHUNK_BYTES.get(kind, CHUNK_BYTES_ELSEWHERE) // (size * classes))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, config = args
        early = replace(config, wanted=(False,) * 3) if config.needs_loss_scale else config
        total, made = _pass(_Inputs(*tensors), early)
        ctx.config = config
        ctx.spent = config.needs_loss_scale  # True: the backward pass computes the gradients
        ctx.save_for_backward(*tensors, *made)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "the chunked loss has no second derivative", remedy="set loss.chunked: false, or leave create_graph out"
            )
        inputs, made = _Inputs(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        # If all targets are ignored, the gradient is 0 as in torch, even if the sum was divided by 0 rows.
        grad = grad.where((inputs.target != ctx.config.ignore_index).any(), 0.0)
        if torch.compiler.is_compiling() and not ctx.config.needs_loss_scale:
            made = [None if each is None else _scaled(each, grad) for each in made]
        elif ctx.spent:
            made = _pass(inputs, ctx.config, scale=grad)[1]
        else:
            # Scale the saved gradients in place where that is exact, because the gradient of the weight is the largest
            # tensor here. ``.data`` leaves their version counters unchanged, so a second backward pass (retain_graph)
            # is possible. It computes the gradients again.
            ctx.spent = True
            made = [each if each is None else _scaled(each, grad, in_place=True) for each in made]
        return *made, None, None, None


def _scaled(made: Tensor, grad: Tensor, *, in_place: bool = False) -> Tensor:
    """Multiply a gradient by the 0-d ``grad`` without rounding ``grad``, which would affect all elements."""
    if in_place and made.dtype == grad.dtype:
        return made.data.mul_(grad)
    return (made.to(grad.dtype) * grad).to(made.dtype)


class _Inputs(NamedTuple):
    """The tensors of a call. Shapes: (N, D), (V, D), (V,) or None, (V,) or None, (N,)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    of_classes: Tensor | None
    target: Tensor


def _pass(inputs: _Inputs, config: _Config, *, scale: Tensor | None = None) -> tuple[Tensor, list[Tensor | None]]:
    """Return the summed loss, and its gradients (times ``scale``) for hidden, weight and bias; None if not wanted."""
    hidden, weight, bias, of_classes, target = inputs
    with torch.autocast(hidden.device.type, enabled=False):
        compute, wide = config.compute, config.accumulate
        total = torch.zeros((), dtype=wide, device=hidden.device)
        classes = weight.shape[0]
        missing = -classes % CLASS_ALIGNMENT.get(hidden.device.type, 64)
        head = weight.to(compute)
        head_bias = None if bias is None else bias.to(compute)
        if missing:
            head = F.pad(head, (0, 0, 0, missing))
            head_bias = None if head_bias is None else F.pad(head_bias, (0, missing))
        of_classes = None if of_classes is None else of_classes.to(wide)
        leaves, kinds = (hidden, head, head_bias), (hidden.dtype, wide, wide)
        grads = [
            torch.zeros_like(each, dtype=kind) if wanted and each is not None else None
            for each, kind, wanted in zip(leaves, kinds, config.wanted, strict=True)
        ]
        for begin in range(0, hidden.shape[0], config.rows):
            rows = slice(begin, begin + config.rows)
            chunk = hidden[rows].to(compute)
            logits = F.linear(chunk, head, head_bias).to(wide)
            total = total + _to_gradient(logits[:, :classes], target[rows], of_classes, config, scale)
            if any(config.wanted):
                logits[:, classes:] = 0
                _add(grads, rows, logits.to(compute), chunk, head)
            del logits  # frees it before the next chunk is computed
        if missing:
            grads[1:] = [None if each is None else each[:classes] for each in grads[1:]]
        made = [
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(grads, inputs[:3], strict=True)
        ]
    return total, made


def _to_gradient(
    logits: Tensor, target: Tensor, of_classes: Tensor | None, config: _Config, scale: Tensor | None
) -> Tensor:
    """Return the summed loss of a chunk. If any gradient is wanted, ``logits`` (C, V) becomes its gradient, in place.

    With class weights w, smoothing e and label y the loss of a row is (1 - e) w_y (-log p_y)
    + e / V sum_v w_v (-log p_v). The factor of the log-denominator in it is (1 - e) w_y + e / V sum_v w_v.
    """
    slope = _softcap(logits, config.softcap) if config.softcap else None
    smoothing, is_counted = config.label_smoothing, target != config.ignore_index
    classes = target.where(is_counted, 0)
    top = logits.amax(1, keepdim=True)
    logits -= top
    loss = F.nll_loss(logits, target, of_classes, ignore_index=config.ignore_index, reduction="none") * (1 - smoothing)
    of_target: Tensor | float = 1.0 if of_classes is None else of_classes[classes]
    of_denominator = 1.0 if of_classes is None else (1 - smoothing) * of_target + smoothing * of_classes.mean()
    if smoothing:
        loss = loss - smoothing * (logits.mean(1) if of_classes is None else logits @ of_classes / len(of_classes))
    denominator = logits.exp_().sum(1)
    log_denominator = denominator.log()
    logsumexp = log_denominator + top.squeeze(1)
    loss = loss + (of_denominator * log_denominator + config.z_loss * logsumexp.square())
    if any(config.wanted):
        factor = is_counted.to(logits.dtype) * (1.0 if scale is None else scale.to(logits.dtype))
        logits *= (factor * (of_denominator + 2 * config.z_loss * logsumexp) / denominator).unsqueeze(1)
        if smoothing:
            even = torch.ones_like(logits[0]) if of_classes is None else of_classes
            logits.addr_(factor, even, alpha=-smoothing / logits.shape[1])
        logits.scatter_add_(1, classes.unsqueeze(1), ((smoothing - 1) * factor * of_target).unsqueeze(1))
        if slope is not None:
            logits *= slope
    return loss.where(is_counted, 0.0).sum()


def _softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound ``logits`` in place; return the derivative of the bounded logits with respect to the original ones."""
    bounded = logits.div_(cap).tanh_()
    slope = 1 - bounded.square()
    logits *= cap
    return slope


def _add(grads: list[Tensor | None], rows: slice, by_logits: Tensor, chunk: Tensor, head: Tensor) -> None:
    """Add the contribution of a chunk to the gradients of hidden, weight and bias."""
    hidden, weight, bias = grads
    if hidden is not None:
        hidden[rows] = by_logits @ head
    if weight is not None and weight.dtype == by_logits.dtype:
        weight.addmm_(by_logits.t(), chunk)
    elif weight is not None:  # in parts, because the low-precision product is a temporary tensor
        parts = WEIGHT_GRADIENT_PARTS.get(weight.device.type, 1)
        for part, columns in zip(weight.chunk(parts), by_logits.chunk(parts, dim=1), strict=True):
            part += columns.t() @ chunk
    if bias is not None:
        bias += by_logits.sum(0, dtype=bias.dtype)


class _Liger(NamedTuple):
    kernel: Callable[..., Tensor]
    parameters: frozenset[str]


@cache
def _liger() -> _Liger | None:
    """Return the kernel of ``liger-kernel`` and the names of its parameters; None if it is not installed."""
    if find_spec("liger_kernel") is None:
        return None
    kernel = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return _Liger(kernel, frozenset(inspect.signature(kernel).parameters))


def _usable_liger(hidden: Tensor, compute: torch.dtype, *, has_class_weights: bool) -> _Liger | None:
    """Return the kernel if it can compute this loss.

    fp16 is not supported, because the kernel computes gradients before the loss scale is known. Class weights need a
    kernel with the parameter ``ce_weight``. The weights do not apply to its z-loss, as in ``chunked_cross_entropy``.
    """
    if not hidden.is_cuda or compute not in (torch.float32, torch.bfloat16):
        return None
    liger = _liger()
    return None if liger is None or (has_class_weights and "ce_weight" not in liger.parameters) else liger


def _liger_cross_entropy(
    liger: _Liger,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None,
    weight_V: Tensor | None,
    **options: Unpack[Options],
) -> Tensor:
    """Return the loss of the liger kernel, summed over all rows."""
    options_of_liger: dict[str, Any] = {
        "ignore_index": options.get("ignore_index", IGNORE),
        "label_smoothing": options.get("label_smoothing", 0.0),
        "lse_square_scale": options.get("z_loss", 0.0),
        "softcap": options.get("softcap") or None,
    }
    if weight_V is not None:
        options_of_liger["ce_weight"] = weight_V.float()
    if "accum_dtype" in liger.parameters:  # since 0.6
        options_of_liger["accum_dtype"] = torch.float32
    return liger.kernel(hidden_ND, weight_VD, target_N, bias=bias_V, reduction="sum", **options_of_liger).float()
