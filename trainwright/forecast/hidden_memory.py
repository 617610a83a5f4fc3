"""Memory that fake tensors do not show: what kernels allocate inside, and buffers whose size a library decides.

Each entry of the tables says it for one operator: with its real size, or with a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.forecast import simulated_lstm
from trainwright.forecast.fake_tensors import DeviceName
from trainwright.forecast.kernel_memory import Rows, flops_of_a_row, inside
from trainwright.forecast.work import nbytes, tensors_in
from trainwright.plan.trace import Unseen

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
    """oneDNN computes in a blocked layout: copies of input, weight and output, channels padded."""
    x, weight, transposed = args[0], args[1], args[6]
    positions = (x if transposed else out).shape[2:]
    return _asked(aten.convolution.default, args, Rows((0,), flops_of_a_row(positions, weight)), out)


def _convolution_backward(args: tuple[Any, ...], out: tuple[Tensor | None, ...]) -> Hidden:
    """First the gradient of the input, then, beside it, that of the weight: each from blocked copies."""
    grad, x, weight, transposed = args[0], args[1], args[2], args[7]
    positions = (x if transposed else grad).shape[2:]
    return _asked(aten.convolution_backward.default, args, Rows((0, 1), 2 * flops_of_a_row(positions, weight)), out)


def _lstm(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Hidden:
    """oneDNN's workspace for the backward pass, one per layer and direction, and its copies. A row is a position."""
    x_TBD, w_input, w_hidden = args[:3]
    rows = Rows((0,), flops_of_a_row(x_TBD.shape[1:2], w_input, w_hidden))
    return _asked(aten.mkldnn_rnn_layer.default, args, rows, out)


def _lstm_backward(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Hidden:
    """Blocked copies of the weights and the gradients, and the gradients of the gates in fp32."""
    x_TBD, w_input, w_hidden = args[:3]
    places = tuple(place for place in (0, 7, 10) if args[place] is not None)
    rows = Rows(places, 2 * flops_of_a_row(x_TBD.shape[1:2], w_input, w_hidden))
    return _asked(aten.mkldnn_rnn_layer_backward.default, args, rows, out)


def _asked(op: Any, args: tuple[Any, ...], rows: Rows, out: Any) -> Hidden:
    found = inside(op, args, rows)
    if found is None:
        copies = 2 * sum(nbytes(tensor) for tensor in tensors_in(args))
        return Hidden(copies, why="oneDNN's copies cannot be seen with this version of torch", bound=2 * copies)
    workspace = max(0, found.left - sum(nbytes(tensor) for tensor in tensors_in((out,))))
    if not found.sure:
        return Hidden(found.scratch, workspace, "oneDNN was asked with fewer rows", found.scratch)
    return Hidden(found.scratch, workspace)


def _copied(args: tuple[Any, ...], out: Any) -> Hidden:
    """The operator works on dense tensors, and copies others."""
    return Hidden(sum(nbytes(tensor) for tensor in tensors_in(args) if not tensor.is_contiguous()))


def _mean(args: tuple[Any, ...], out: Tensor) -> Hidden:
    """Of 16 bits it is made in fp32."""
    return Hidden(4 * args[0].numel() if args[0].is_floating_point() and args[0].element_size() == 2 else 0)


def _matmul(args: tuple[Any, ...], out: Tensor) -> Hidden:
    """Of 16 bits: oneDNN packs blocks of its inputs, whose size does not grow with them."""
    if args[-1].element_size() != 2:
        return Hidden()
    return Hidden(why="blocks that oneDNN packs, for each thread", bound=2**20 * torch.get_num_threads())


def _promoted(args: tuple[Any, ...], out: Tensor) -> Hidden:
    """Element by element: an input of another dtype than the others is converted as a whole first."""
    given = [tensor for tensor in tensors_in(args) if tensor.dim()]
    if len({tensor.dtype for tensor in given}) < 2:
        return Hidden()
    common = reduce(torch.promote_types, (tensor.dtype for tensor in given))
    return Hidden(sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype is not common))


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
    aten.mean: _mean,
    **dict.fromkeys((aten.add, aten.sub, aten.mul, aten.div), _promoted),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _matmul),
    **dict.fromkeys(
        (
            aten.native_layer_norm,
            aten.native_layer_norm_backward,
            aten.native_batch_norm_backward,
            aten.embedding,
            aten.embedding_dense_backward,
        ),
        _copied,
    ),
}
CUDA: dict[Any, Rule] = {aten.convolution: _cudnn_convolution, aten.convolution_backward: _cudnn_convolution}
CUDA_BY_NAME: dict[str, Rule] = {f"{simulated_lstm.NAMESPACE}::lstm": _cudnn_lstm}
RULES: dict[DeviceName, dict[Any, Rule]] = {"cpu": CPU, "cuda": CUDA}
CUDA_ALWAYS = (
    Unseen("cublas", "", "workspace of the matrix library, made at its first call and kept (32 MiB on Hopper)", 2**25),
    Unseen("context", "", "CUDA context and kernels, outside of the allocator: 300 to 600 MiB", 600 * 2**20),
)
