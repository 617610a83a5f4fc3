"""Memory that fake tensors do not show: what kernels allocate inside, and buffers whose size a library decides.

Each entry of the tables says it for one operator: with its real size, or with a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.plan.forecast import Unseen
from trainwright.simulate import lstm
from trainwright.simulate.device import DeviceName, without_fake_tensors
from trainwright.simulate.work import nbytes

aten = torch.ops.aten


class Hidden(NamedTuple):
    """``scratch`` bytes live only inside the call; ``workspace`` is what its last output holds beyond what is seen.

    ``bound`` is None where the sizes are the real ones, else the largest that they can be; ``why`` then says it.
    """

    scratch: int = 0
    workspace: int = 0
    why: str = ""
    bound: int | None = None


Rule = Callable[[tuple[Any, ...], Any], Hidden]


def hidden(device: DeviceName, func: Any, args: tuple[Any, ...], out: Any) -> Hidden | None:
    """What a call holds that its outputs do not show, None for nothing."""
    rule = RULES[device].get(func._overloadpacket)
    if rule is None and device == "cuda":
        rule = CUDA_BY_NAME.get(func._schema.name)
    return rule(args, out) if rule is not None else None


def always(device: DeviceName) -> tuple[Unseen, ...]:
    """What every step on the device holds beside its tensors."""
    return CUDA_ALWAYS if device == "cuda" else ()


def _convolution(args: tuple[Any, ...], out: Tensor) -> Hidden:
    """oneDNN computes in a blocked layout: copies of input, weight and output, before the plain output is made."""
    if not _by_onednn(*args[:3], *args[3:9]):
        return Hidden()
    return Hidden(scratch=nbytes(args[0]) + nbytes(args[1]))


def _convolution_backward(args: tuple[Any, ...], out: tuple[Tensor | None, ...]) -> Hidden:
    """First the gradient of the input, then, beside it, that of the weight: each from blocked copies of what it needs.

    With a stride the input's gradient is copied once more.
    """
    grad, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    if not _by_onednn(x, weight, None, stride, padding, dilation, transposed, output_padding, groups):
        return Hidden()
    sums = 4 * weight.numel() if weight.element_size() == 2 else 0  # of the weight's gradient, in fp32
    of_weight = nbytes(x) + nbytes(grad) + sums if mask[1] else 0
    copies = 2 + any(step > 1 for step in stride)
    at_input = max(nbytes(grad) + nbytes(weight) + nbytes(x), copies * nbytes(x)) if mask[0] else 0
    seen = nbytes(x) * mask[0] + nbytes(weight) * mask[1]
    return Hidden(scratch=max(of_weight, at_input - seen, 0))


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> bool:
    return "Mkldnn" in str(torch._C._select_conv_backend(x, weight, bias, *how))


def _lstm(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Hidden:
    """oneDNN's workspace for the backward pass, one per layer and direction: asked of oneDNN itself."""
    x_TBD, _, w_hidden = args[:3]
    length, rows, width = x_TBD.shape
    if not args[-1]:  # not training
        return Hidden()
    short, long = (_lstm_workspace(steps, rows, width, w_hidden.shape[1], x_TBD.dtype) for steps in (1, 3))
    return Hidden(workspace=short + (long - short) * (length - 1) // 2)


def _lstm_backward(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Hidden:
    """Blocked copies of the weights, the gradients of the gates in fp32, and the incoming gradient if it lies apart."""
    x_TBD, w_input, w_hidden, grad = args[0], args[1], args[2], args[10]
    gates = 4 * x_TBD.shape[0] * x_TBD.shape[1] * w_hidden.shape[0]
    apart = nbytes(grad) if grad is not None and not grad.is_contiguous() else 0
    return Hidden(scratch=nbytes(w_input) + nbytes(w_hidden) + gates + apart)


@lru_cache(maxsize=64)
def _lstm_workspace(length: int, rows: int, width: int, hidden_width: int, dtype: torch.dtype) -> int:
    """Bytes, of a real call. They are affine in the length but for padding to pages."""
    with without_fake_tensors(), torch.enable_grad():  # without gradients it makes none
        x, state = torch.zeros(length, rows, width, dtype=dtype), torch.zeros(rows, hidden_width, dtype=dtype)
        weights = [torch.zeros(4 * hidden_width, size, dtype=dtype) for size in (width, hidden_width)]
        bias = torch.zeros(4 * hidden_width, dtype=dtype)
        given = (x, *weights, bias, bias, state, state, False, [], 2, hidden_width, 1, True, False, False, True)
        return nbytes(aten.mkldnn_rnn_layer(*given)[3])


def _cudnn_convolution(args: tuple[Any, ...], out: Any) -> Hidden:
    why = "cuDNN chooses an algorithm, and with it the size of its workspace, on the device"
    return Hidden(why=why, bound=None)


def _cudnn_lstm(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Hidden:
    why = "the reserve of cuDNN's LSTM is counted by a formula that was not compared: it may be as much again"
    return Hidden(why=why, bound=nbytes(out[-1]))


CPU: dict[Any, Rule] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: _lstm_backward,
}
CUDA: dict[Any, Rule] = {aten.convolution: _cudnn_convolution, aten.convolution_backward: _cudnn_convolution}
CUDA_BY_NAME: dict[str, Rule] = {f"{lstm.NAMESPACE}::lstm": _cudnn_lstm}
RULES: dict[DeviceName, dict[Any, Rule]] = {"cpu": CPU, "cuda": CUDA}
CUDA_ALWAYS = (
    Unseen("cublas", "", "workspace of the matrix library, made at its first call and kept (32 MiB on Hopper)", 2**25),
    Unseen("context", "", "CUDA context and kernels, outside of the allocator: 300 to 600 MiB", 600 * 2**20),
)
