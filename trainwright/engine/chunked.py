"""The last linear layer and cross-entropy in one, a chunk of rows at a time: the logits never exist whole.

The gradients are made beside the loss, while the logits of a chunk are there (as in https://arxiv.org/abs/2410.10989),
so that no matmul is done twice. Under fp16 they are made in the backward pass instead, from logits computed again:
only then is the loss scale known, without which small ones would vanish.

Shapes: N rows (tokens), D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from trainwright.engine.liger import liger_cross_entropy, usable_liger
from trainwright.errors import UsageError

IGNORE = -100
CHUNK_BYTES = {"cpu": 1 << 25}
"""Of the logits of one chunk, in float32 and in what they are computed in, by the kind of device. With fewer the
gradient of the weight is read and written more often; see benchmarks/chunked_loss.py."""
CHUNK_BYTES_ELSEWHERE = 1 << 28
PARTS = 8
"""In which the gradient of the weight is made where it cannot be added in the matmul itself."""
WORTH_BYTES = 1 << 28


def is_worth_chunking(rows: int, classes: int) -> bool:
    """Whether logits of so many rows and their gradient, in float32, take more than 256 MiB. Of shapes alone."""
    return 2 * 4 * rows * classes > WORTH_BYTES


@dataclass(frozen=True)
class _How:
    """What the loss of a row is, and how it is computed. ``wanted`` are the gradients by hidden, weight and bias."""

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
    def is_late(self) -> bool:
        """Whether gradients wait for the loss scale."""
        return self.compute == torch.float16


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), target, reduction="sum")``: 0-d, float32 or float64.

    ``softcap`` bounds the logits to (-cap, cap) by tanh, 0 is off. ``z_loss`` times the squared logarithm of the
    softmax's denominator is added for each counted row (https://arxiv.org/abs/2204.02311, section 5). Under autocast
    the matmuls are in its dtype; what they give is summed in float32. The memory is that of one chunk, and of the
    gradients. On CUDA the kernel of the package ``liger-kernel`` is used where it is installed (not for fp16).

    Raises IndexError for a target that is no class (on the CPU), UsageError for a second derivative, which it has not.
    """
    inputs = (hidden_ND, weight_VD, target_N) if bias_V is None else (hidden_ND, weight_VD, target_N, bias_V)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
    }
    if has_torch_function(inputs):  # seen by whoever records torch's functions, as those of F are
        seen: Tensor = handle_torch_function(chunked_cross_entropy, inputs, *inputs[:3], bias_V=bias_V, **options)
        return seen
    compute = _compute_dtype(hidden_ND)
    if usable_liger(hidden_ND, compute):
        return liger_cross_entropy(hidden_ND.to(compute), weight_VD.to(compute), target_N, bias_V, **options)
    on = torch.is_grad_enabled()
    how = _How(
        compute=compute,
        rows=_chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type, compute),
        wanted=(
            on and hidden_ND.requires_grad,
            on and weight_VD.requires_grad,
            on and bias_V is not None and bias_V.requires_grad,
        ),
        **options,
    )
    total: Tensor = _Chunked.apply(hidden_ND, weight_VD, bias_V, target_N, how)  # type: ignore[no-untyped-call]
    return total


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What a linear layer would compute in here and now."""
    kind = hidden.device.type
    on = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else hidden.dtype


def _chunk_rows(rows: int, classes: int, kind: str, compute: torch.dtype) -> int:
    """C: chunks of equal size but for the last, of shapes and dtypes alone."""
    size = max(4, compute.itemsize) + (compute.itemsize if compute.itemsize < 4 else 0)
    most = max(1, CHUNK_BYTES.get(kind, CHUNK_BYTES_ELSEWHERE) // (size * classes))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: _How) -> Tensor:
        early = replace(how, wanted=(False,) * 3) if how.is_late else how
        total, made = _pass(hidden, weight, bias, target, early)
        ctx.how, ctx.spent = how, how.is_late
        ctx.save_for_backward(hidden, weight, bias, target, *made)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "the chunked loss has no second derivative", remedy="set loss.chunked: false, or leave create_graph out"
            )
        hidden, weight, bias, target, *made = ctx.saved_tensors
        if torch.compiler.is_compiling() and not ctx.how.is_late:
            made = [None if each is None else _scaled(each, grad) for each in made]
        elif ctx.spent:
            made = _pass(hidden, weight, bias, target, ctx.how, scale=grad)[1]
        else:
            # in place where that is exact: the gradient of the weight is the largest tensor here. Its version does not
            # count: who goes backward a second time (retain_graph) gets it computed again.
            ctx.spent = True
            made = [each if each is None else _scaled(each, grad, in_place=True) for each in made]
        return *made, None, None


def _scaled(made: Tensor, grad: Tensor, *, in_place: bool = False) -> Tensor:
    """A gradient times the 0-d ``grad``, which a low precision would round for all elements alike."""
    if in_place and made.dtype == grad.dtype:
        return made.data.mul_(grad)
    return (made.to(grad.dtype) * grad).to(made.dtype)


def _pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: _How, *, scale: Tensor | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum, and its gradients (times ``scale``) by hidden, weight and bias, as far as they are wanted."""
    with torch.autocast(hidden.device.type, enabled=False):
        compute, wide = how.compute, how.accumulate
        total = torch.zeros((), dtype=wide, device=hidden.device)
        head = weight.to(compute)
        inputs, kinds = (hidden, weight, bias), (hidden.dtype, wide, wide)
        grads = [
            torch.zeros_like(each, dtype=kind) if wanted and each is not None else None
            for each, kind, wanted in zip(inputs, kinds, how.wanted, strict=True)
        ]
        for begin in range(0, hidden.shape[0], how.rows):
            rows = slice(begin, begin + how.rows)
            chunk = hidden[rows].to(compute)
            logits = F.linear(chunk, head, None if bias is None else bias.to(compute)).to(wide)
            total = total + _to_gradient(logits, target[rows], how, scale)
            if any(how.wanted):
                _add(grads, rows, logits.to(compute), chunk, head)
            del logits  # or it would be there beside the next one
        made = [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
    return total, made


def _to_gradient(logits: Tensor, target: Tensor, how: _How, scale: Tensor | None) -> Tensor:
    """The summed loss of a chunk; ``logits`` (C, V) become its gradient by them in place, where any is wanted."""
    slope = _softcap(logits, how.softcap) if how.softcap else None
    is_counted = target != how.ignore_index
    counted = is_counted.to(logits.dtype)
    top = logits.amax(1, keepdim=True)
    logits -= top
    loss = F.nll_loss(logits, target, ignore_index=how.ignore_index, reduction="none") * (1 - how.label_smoothing)
    if how.label_smoothing:
        loss = loss - how.label_smoothing * (counted * logits.mean(1))
    denominator = logits.exp_().sum(1)
    log_denominator = denominator.log()
    whole = log_denominator + top.squeeze(1)  # the logsumexp of the logits
    loss = loss + counted * (log_denominator + how.z_loss * whole.square())
    if any(how.wanted):
        share = counted if scale is None else counted * scale.to(logits.dtype)
        logits *= (share * (1 + 2 * how.z_loss * whole) / denominator).unsqueeze(1)
        if how.label_smoothing:
            logits -= (share * (how.label_smoothing / logits.shape[1])).unsqueeze(1)
        classes = target.where(is_counted, 0).unsqueeze(1)
        logits.scatter_add_(1, classes, ((how.label_smoothing - 1) * share).unsqueeze(1))
        if slope is not None:
            logits *= slope
    return loss.sum()


def _softcap(logits: Tensor, cap: float) -> Tensor:
    """Bounds ``logits`` in place and returns the derivative."""
    bounded = logits.div_(cap).tanh_()
    slope = 1 - bounded.square()
    logits *= cap
    return slope


def _add(grads: list[Tensor | None], rows: slice, by_logits: Tensor, chunk: Tensor, head: Tensor) -> None:
    """What the gradient by the logits of a chunk gives for hidden, weight and bias."""
    hidden, weight, bias = grads
    if hidden is not None:
        hidden[rows] = by_logits @ head
    if weight is not None and weight.dtype == by_logits.dtype:
        weight.addmm_(by_logits.t(), chunk)
    elif weight is not None:  # what is rounded before it is added is never as large as the whole
        for part, columns in zip(weight.chunk(PARTS), by_logits.chunk(PARTS, dim=1), strict=True):
            part += columns.t() @ chunk
    if bias is not None:
        bias += by_logits.sum(0, dtype=bias.dtype)
