"""Shape functions of cuDNN's LSTM: one operator for all layers and positions, with its reserve for the backward pass.

Without this operator, an LSTM on the simulated device would be traced as separate operators for each position. For fake
tensors on a real GPU, the backward pass would fail, because torch's shape function of cuDNN's RNNs returns no buffer of
weights.
Shapes: T positions, B rows, D input width, H hidden width; with ``batch_first`` B and T change places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

RESERVE_VALUES_PER_UNIT = 8
"""Values in the reserve for each position, row, hidden unit and direction of a layer: four gates, the cell, its tanh,
the hidden state, and the mask of dropout. cuDNN does not document its size, and this estimate is unverified.
"""
NAMESPACE = "trainwright_simulated"
_SIMULATED: set[str] = set()
"""The keys of the devices whose LSTM is currently simulated."""
Outputs = tuple[Tensor, Tensor, Tensor]
"""The output of every position, the last hidden state, the last cell."""


@cache
def _operators() -> torch.library.Library:
    """Return the two operators, registered at the first call for the rest of the process."""
    library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "lstm(Tensor x, Tensor h, Tensor c, Tensor[] weights, int layers, bool bidirectional, bool batch_first) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(  # type: ignore[no-untyped-call]
        "lstm_backward(Tensor grad, Tensor x, Tensor h, Tensor c, Tensor[] weights, Tensor reserve) -> Tensor[]"
    )
    library.impl("lstm", _forward, "Meta")  # type: ignore[no-untyped-call]
    library.impl("lstm_backward", _backward, "Meta")  # type: ignore[no-untyped-call]
    return library


@contextmanager
def simulated_lstm(device_key: str) -> Iterator[None]:
    """Enter a context in which ``aten::lstm`` on the device is the simulated operator. It may be nested."""
    if device_key in _SIMULATED:
        yield
        return
    _operators()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("lstm.input", _lstm, f"Autograd{device_key}")
        _SIMULATED.add(device_key)
        try:
            yield
        finally:
            _SIMULATED.discard(device_key)


def forward_flops(
    x: Tensor, _h: Tensor, _c: Tensor, weights: Sequence[Tensor], *_args: object, **_kwargs: object
) -> int:
    """Return the FLOPs of the forward pass: each position with each matrix of weights."""
    positions = prod(x.shape[:-1])
    return 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)


def backward_flops(
    _grad: Tensor, x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], *_args: object, **_kwargs: object
) -> int:
    """Return the FLOPs of the backward pass: twice the FLOPs of the forward pass."""
    return 2 * forward_flops(x, h, c, weights)


def _forward(
    x: Tensor, h: Tensor, c: Tensor, _weights: list[Tensor], layers: int, bidirectional: bool, _batch_first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    hidden_width = h.shape[-1]
    positions = prod(x.shape[:-1])
    out = x.new_empty((*x.shape[:-1], hidden_width * directions))
    reserve = x.new_empty(RESERVE_VALUES_PER_UNIT * layers * directions * positions * hidden_width)
    return out, torch.empty_like(h), torch.empty_like(c), reserve


def _backward(_grad: Tensor, x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], _reserve: Tensor) -> list[Tensor]:
    return [torch.empty_like(each) for each in (x, h, c, *weights)]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, h: Tensor, c: Tensor, options: tuple[int, bool, bool], *weights: Tensor
    ) -> Outputs:
        out, h_last, c_last, reserve = getattr(torch.ops, NAMESPACE).lstm(x, h, c, list(weights), *options)
        ctx.save_for_backward(x, h, c, reserve, out, *weights)
        return out, h_last, c_last

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, h, c, reserve, out, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0] if grads[0] is not None else torch.zeros_like(out)
        found = getattr(torch.ops, NAMESPACE).lstm_backward(grad, x, h, c, weights, reserve)
        return (*found[:3], None, *found[3:])


def _lstm(
    x: Tensor, state: list[Tensor], weights: list[Tensor], _has_biases: bool, layers: int, _dropout: float, *flags: bool
) -> Outputs:
    """``aten::lstm.input``, whose last arguments are train, bidirectional and batch_first."""
    options = (layers, *flags[1:])
    out, h_last, c_last = _Function.apply(x, *state, options, *weights)  # type: ignore[no-untyped-call]
    return out, h_last, c_last
