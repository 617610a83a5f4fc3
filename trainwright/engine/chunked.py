"""The last linear layer and cross-entropy in one, a chunk of rows at a time: the logits never exist whole.

The gradients are made beside the loss, while the logits of a chunk are there (as in https://arxiv.org/abs/2410.10989),
so that no matmul is done twice. Under fp16 they are made in the backward pass instead, from logits computed again:
only then is the loss scale known, without which small ones would vanish.

Shapes: N rows (tokens), D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

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


class Options(TypedDict, total=False):
    """What the loss of a row is: ``ignore_index`` and ``label_smoothing`` as in F.cross_entropy, -100 and 0 by default.

    ``softcap`` bounds the logits to (-cap, cap) by tanh, 0 is off. ``z_loss`` times the squared logarithm of the
    softmax's denominator is added for each counted row (https://arxiv.org/abs/2204.02311, section 5).
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


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
    weight_V: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """The sum over rows of cross-entropy on ``F.linear(hidden_ND, weight_VD, bias_V)``: 0-d, float32 or float64.

    ``F.cross_entropy(logits.float(), target, weight_V, reduction="sum", ...)``, and what ``options`` add to it.
    ``weight_V`` is the weight of each class, also in the smoothing; a z-loss is not weighed. Under autocast the matmuls
    are in its dtype; what they give is summed in float32. The memory is that of one chunk, and of the gradients. On
    CUDA the kernel of the package ``liger-kernel`` is used where it is installed (not for fp16).

    Raises IndexError for a target that is no class (on the CPU), UsageError for a second derivative or a derivative by
    ``weight_V``, which it has not.
    """
    tensors = [t for t in (hidden_ND, weight_VD, target_N, bias_V, weight_V) if t is not None]
    if has_torch_function(tensors):  # seen by whoever records torch's functions, as those of F are
        total: Tensor = handle_torch_function(
            chunked_cross_entropy, tensors, hidden_ND, weight_VD, target_N, bias_V=bias_V, weight_V=weight_V, **options
        )
        return total
    on = torch.is_grad_enabled()
    if on and weight_V is not None and weight_V.requires_grad:
        raise UsageError("the weights of classes are not learned", remedy="give weight_V.detach()")
    compute = _compute_dtype(hidden_ND)
    if usable_liger(hidden_ND, compute, is_weighed=weight_V is not None):
        return liger_cross_entropy(hidden_ND.to(compute), weight_VD.to(compute), target_N, bias_V, weight_V, **options)
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
    loss: Tensor = _Chunked.apply(hidden_ND, weight_VD, bias_V, weight_V, target_N, how)  # type: ignore[no-untyped-call]
    return loss


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
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, how = args
        early = replace(how, wanted=(False,) * 3) if how.is_late else how
        total, made = _pass(_Given(*tensors), early)
        ctx.how, ctx.spent = how, how.is_late
        ctx.save_for_backward(*tensors, *made)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "the chunked loss has no second derivative", remedy="set loss.chunked: false, or leave create_graph out"
            )
        given, made = _Given(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        # where no row counts the gradient is 0 as it is of torch's, also if the sum was divided by their number
        grad = grad.where((given.target != ctx.how.ignore_index).any(), 0.0)
        if torch.compiler.is_compiling() and not ctx.how.is_late:
            made = [None if each is None else _scaled(each, grad) for each in made]
        elif ctx.spent:
            made = _pass(given, ctx.how, scale=grad)[1]
        else:
            # in place where that is exact: the gradient of the weight is the largest tensor here. Its version does not
            # count: who goes backward a second time (retain_graph) gets it computed again.
            ctx.spent = True
            made = [each if each is None else _scaled(each, grad, in_place=True) for each in made]
        return *made, None, None, None


def _scaled(made: Tensor, grad: Tensor, *, in_place: bool = False) -> Tensor:
    """A gradient times the 0-d ``grad``, which a low precision would round for all elements alike."""
    if in_place and made.dtype == grad.dtype:
        return made.data.mul_(grad)
    return (made.to(grad.dtype) * grad).to(made.dtype)


class _Given(NamedTuple):
    """The tensors of a call: (N, D), (V, D), (V,) or None, (V,) or None, (N,)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    of_classes: Tensor | None
    target: Tensor


def _pass(given: _Given, how: _How, *, scale: Tensor | None = None) -> tuple[Tensor, list[Tensor | None]]:
    """The sum, and its gradients (times ``scale``) by hidden, weight and bias, as far as they are wanted."""
    hidden, weight, bias, of_classes, target = given
    with torch.autocast(hidden.device.type, enabled=False):
        compute, wide = how.compute, how.accumulate
        total = torch.zeros((), dtype=wide, device=hidden.device)
        head = weight.to(compute)
        of_classes = None if of_classes is None else of_classes.to(wide)
        inputs, kinds = (hidden, weight, bias), (hidden.dtype, wide, wide)
        grads = [
            torch.zeros_like(each, dtype=kind) if wanted and each is not None else None
            for each, kind, wanted in zip(inputs, kinds, how.wanted, strict=True)
        ]
        for begin in range(0, hidden.shape[0], how.rows):
            rows = slice(begin, begin + how.rows)
            chunk = hidden[rows].to(compute)
            logits = F.linear(chunk, head, None if bias is None else bias.to(compute)).to(wide)
            total = total + _to_gradient(logits, target[rows], of_classes, how, scale)
            if any(how.wanted):
                _add(grads, rows, logits.to(compute), chunk, head)
            del logits  # or it would be there beside the next one
        made = [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
    return total, made


def _to_gradient(logits: Tensor, target: Tensor, of_classes: Tensor | None, how: _How, scale: Tensor | None) -> Tensor:
    """The summed loss of a chunk; ``logits`` (C, V) become its gradient by them in place, where any is wanted.

    With weights w of the classes, smoothing e and label y the loss of a row is (1 - e) w_y (-log p_y)
    + e / V sum_v w_v (-log p_v). The logarithm of the denominator is in it (1 - e) w_y + e / V sum_v w_v times.
    """
    slope = _softcap(logits, how.softcap) if how.softcap else None
    smoothing, is_counted = how.label_smoothing, target != how.ignore_index
    classes = target.where(is_counted, 0)
    top = logits.amax(1, keepdim=True)
    logits -= top
    loss = F.nll_loss(logits, target, of_classes, ignore_index=how.ignore_index, reduction="none") * (1 - smoothing)
    own: Tensor | float = 1.0 if of_classes is None else of_classes[classes]
    times = 1.0 if of_classes is None else (1 - smoothing) * own + smoothing * of_classes.mean()
    if smoothing:
        loss = loss - smoothing * (logits.mean(1) if of_classes is None else logits @ of_classes / len(of_classes))
    denominator = logits.exp_().sum(1)
    log_denominator = denominator.log()
    whole = log_denominator + top.squeeze(1)  # the logsumexp of the logits
    loss = loss + (times * log_denominator + how.z_loss * whole.square())
    if any(how.wanted):
        share = is_counted.to(logits.dtype) * (1.0 if scale is None else scale.to(logits.dtype))
        logits *= (share * (times + 2 * how.z_loss * whole) / denominator).unsqueeze(1)
        if smoothing:
            even = torch.ones_like(logits[0]) if of_classes is None else of_classes
            logits.addr_(share, even, alpha=-smoothing / logits.shape[1])
        logits.scatter_add_(1, classes.unsqueeze(1), ((smoothing - 1) * share * own).unsqueeze(1))
        if slope is not None:
            logits *= slope
    return loss.where(is_counted, 0.0).sum()


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
