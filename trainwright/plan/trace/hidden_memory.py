"""Memory that fake tensors do not show: allocations inside kernels, and buffers sized by a library.

Each row of the tables gives one operator's real size, or a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainwright.plan.call_trace import HiddenBytes
from trainwright.plan.trace import simulated_lstm
from trainwright.plan.trace.fake_tensors import DeviceName
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, nbytes, tensors_in

MAX_MEASURED_FLOPS = 2e9
"""The most FLOPs of one measured call."""
MAX_MEASURED_BYTES = 2**27
"""The most bytes in the row arguments of one measured call."""


class TensorShape(NamedTuple):
    """A tensor argument without its values, so that equal calls are measured once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


ArgumentKey = tuple[object, ...]
"""Comparable arguments: a ``TensorShape`` for each tensor, a tuple for each list, other values unchanged."""


class KernelMemory(NamedTuple):
    """Bytes that one call allocates: ``scratch`` only inside the call; ``left`` remains after it.

    ``left`` includes the outputs and hidden memory. If not ``exact``, the call was too large to make, and the bytes are
    scaled from one smaller call.
    """

    scratch: int
    left: int
    exact: bool = True


class Rows(NamedTuple):
    """The positions of the arguments whose first dimension counts rows, and the FLOPs of one row."""

    places: tuple[int, ...]
    flops: float


def measure_kernel_memory(op: OpOverload, args: OpArgs, rows: Rows) -> KernelMemory | None:
    """Return what a call with these arguments allocates, or None if allocations cannot be recorded."""
    count = args[rows.places[0]].shape[0]
    size = sum(args[place].nbytes for place in rows.places) / max(1, count)
    most = max(1, int(min(MAX_MEASURED_FLOPS / max(1, rows.flops), MAX_MEASURED_BYTES / max(1, size))))
    if count <= most:
        changes = _allocations(op, _describe(args, rows, count))
        return None if changes is None else _sum_changes(changes)
    less = max(1, most // 2)
    small, large = (_allocations(op, _describe(args, rows, some)) for some in (less, most))
    if small is None or large is None:
        return None
    if less < most and len(small) == len(large):
        further = (count - most) / (most - less)
        return _sum_changes([round(b + (b - a) * further) for a, b in zip(small, large, strict=True)])
    found = _sum_changes(large)
    return KernelMemory(round(found.scratch * count / most), round(found.left * count / most), exact=False)


def _sum_changes(changes: Sequence[int]) -> KernelMemory:
    held = list(accumulate(changes, initial=0))
    return KernelMemory(max(held) - held[-1], held[-1])


def _describe(args: OpArgs, rows: Rows, count: int) -> ArgumentKey:
    """Return comparable arguments with ``count`` rows."""
    return tuple(_argument(arg, count if place in rows.places else None) for place, arg in enumerate(args))


def _argument(arg: object, count: int | None) -> object:
    if isinstance(arg, Tensor):
        shape = tuple(arg.shape) if count is None else (count, *arg.shape[1:])
        return TensorShape(shape, arg.stride(), arg.dtype)
    return tuple(arg) if isinstance(arg, list) else arg


@lru_cache(maxsize=1024)
def _allocations(op: OpOverload, described: ArgumentKey) -> tuple[int, ...] | None:
    """Return the allocations of one real call on zeros, as ``_record_allocations`` does."""
    with unset_fake_temporarily(), torch.enable_grad():  # an LSTM makes its workspace only if gradients are enabled
        args: list[Any] = [_make_argument(each) for each in described]
        if op._overloadpacket is aten.mkldnn_rnn_layer_backward:
            args[-1] = _workspace(args)
        return _record_allocations(lambda: op(*args))


def _make_argument(described: object) -> object:
    if isinstance(described, TensorShape):
        return torch.empty_strided(described.shape, described.strides, dtype=described.dtype).zero_()
    return list(described) if isinstance(described, tuple) else described


def _workspace(args: Sequence[Any]) -> Tensor:
    """Return the workspace that the LSTM's forward pass makes for a backward pass with these ``args``."""
    backward, mode, hidden, layers, has_biases, train, both, sizes, first = args[13:22]
    made = aten.mkldnn_rnn_layer(*args[:7], backward, sizes, mode, hidden, layers, has_biases, both, first, train)
    workspace: Tensor = made[3]
    return workspace


def _record_allocations(call: Callable[[], object]) -> tuple[int, ...] | None:
    """Return each allocation of the call in order in bytes, releases as negative numbers."""
    private: Any = torch.autograd
    try:
        from torch._C._profiler import _ExperimentalConfig

        cpu = private.ProfilerState.CPU
        config = private.ProfilerConfig(cpu, False, True, False, False, False, _ExperimentalConfig())
        private._enable_profiler_legacy(config)
    except (ImportError, AttributeError, TypeError, RuntimeError):  # another torch, or another profiler is running
        return None
    try:
        out = call()
    finally:
        threads = private._disable_profiler_legacy()
    del out
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return tuple(event.cpu_memory_usage() for event in events)


def flops_per_row(positions: Sequence[int], *weights: Tensor) -> float:
    """Return the FLOPs of one row: each position is multiplied with each weight once."""
    return 2.0 * prod(positions) * sum(weight.numel() for weight in weights)


aten = torch.ops.aten


class HiddenMemory(NamedTuple):
    """Bytes of one call that its outputs do not show.

    ``scratch`` lives only inside the call. ``workspace`` is what the last output holds in addition to its visible size.
    If these are not exact, ``why`` gives the reason and ``bound`` the largest possible size, None if unknown.
    """

    scratch: int = 0
    workspace: int = 0
    why: str = ""
    bound: int | None = None


Rule = Callable[[OperatorCall], HiddenMemory]


def hidden_memory(device: DeviceName, call: OperatorCall) -> HiddenMemory | None:
    """Return the memory of a call that its outputs do not show, or None if no rule covers the operator."""
    rule = RULES[device].get(call.op._schema.name)
    return rule(call) if rule is not None else None


def _convolution(call: OperatorCall) -> HiddenMemory:
    """Measure oneDNN's blocked copies of input, weight and output, with padded channels."""
    x = call.args[0]
    weight = call.args[1]
    transposed = call.args[6]
    positions = (x if transposed else call.result).shape[2:]
    return _measure(aten.convolution.default, call, Rows((0,), flops_per_row(positions, weight)))


def _convolution_backward(call: OperatorCall) -> HiddenMemory:
    """Measure the blocked copies for the gradient of the input, and then of the weight."""
    grad = call.args[0]
    x = call.args[1]
    weight = call.args[2]
    transposed = call.args[7]
    positions = (x if transposed else grad).shape[2:]
    return _measure(aten.convolution_backward.default, call, Rows((0, 1), 2 * flops_per_row(positions, weight)))


def _lstm(call: OperatorCall) -> HiddenMemory:
    """Measure oneDNN's workspace for backward, one per layer and direction, and its copies. A row is a position."""
    x_TBD, w_input, w_hidden = call.args[:3]
    return _measure(aten.mkldnn_rnn_layer.default, call, Rows((0,), flops_per_row(x_TBD.shape[1:2], w_input, w_hidden)))


def _lstm_backward(call: OperatorCall) -> HiddenMemory:
    """Measure blocked copies of the weights and the gradients, and the gradients of the gates in fp32."""
    x_TBD, w_input, w_hidden = call.args[:3]
    places = tuple(place for place in (0, 7, 10) if call.args[place] is not None)
    rows = Rows(places, 2 * flops_per_row(x_TBD.shape[1:2], w_input, w_hidden))
    return _measure(aten.mkldnn_rnn_layer_backward.default, call, rows)


def _measure(op: OpOverload, call: OperatorCall, rows: Rows) -> HiddenMemory:
    """Return the memory that ``op`` allocates on this CPU for these arguments, or a bound if it cannot be measured."""
    found = measure_kernel_memory(op, call.args, rows)
    if found is None:
        copies = 2 * sum(nbytes(tensor) for tensor in tensors_in(call.args))
        why = "oneDNN's copies cannot be seen with this version of torch"
        return HiddenMemory(copies, why=why, bound=2 * copies)
    workspace = max(0, found.left - sum(nbytes(tensor) for tensor in call.outputs()))
    if not found.exact:
        return HiddenMemory(found.scratch, workspace, "oneDNN was measured with fewer rows", found.scratch)
    return HiddenMemory(found.scratch, workspace)


def _copies(call: OperatorCall) -> HiddenMemory:
    """Return the copies of inputs that are not dense, because the operator works on dense tensors."""
    return HiddenMemory(sum(nbytes(tensor) for tensor in tensors_in(call.args) if not tensor.is_contiguous()))


def _mean(call: OperatorCall) -> HiddenMemory:
    """Return the fp32 copy from which the mean of a 16-bit tensor is computed."""
    x = call.args[0]
    return HiddenMemory(4 * x.numel() if x.is_floating_point() and x.element_size() == 2 else 0)


def _matmul(call: OperatorCall) -> HiddenMemory:
    """Return a bound for the blocks that oneDNN packs in 16 bits; their size does not grow with the inputs."""
    if call.args[-1].element_size() != 2:
        return HiddenMemory()
    return HiddenMemory(why="blocks that oneDNN packs, for each thread", bound=2**20 * torch.get_num_threads())


def _promotion(call: OperatorCall) -> HiddenMemory:
    """Return the converted copies of inputs whose dtype is not the common one (pointwise operators)."""
    inputs = [tensor for tensor in tensors_in(call.args) if tensor.dim()]
    if len({tensor.dtype for tensor in inputs}) < 2:
        return HiddenMemory()
    common = reduce(torch.promote_types, (tensor.dtype for tensor in inputs))
    return HiddenMemory(sum(tensor.numel() * common.itemsize for tensor in inputs if tensor.dtype is not common))


def _cudnn_convolution(_call: OperatorCall) -> HiddenMemory:
    why = "cuDNN chooses an algorithm, and with it the size of its workspace, on the device"
    return HiddenMemory(why=why, bound=None)


def _cudnn_lstm(call: OperatorCall) -> HiddenMemory:
    why = "the reserve of cuDNN's LSTM is counted by an unverified formula: it may be twice as large"
    return HiddenMemory(why=why, bound=nbytes(call.result[-1]))


RULES: dict[DeviceName, dict[str, Rule]] = {
    "cpu": {
        "aten::convolution": _convolution,
        "aten::convolution_backward": _convolution_backward,
        "aten::mkldnn_rnn_layer": _lstm,
        "aten::mkldnn_rnn_layer_backward": _lstm_backward,
        "aten::mean": _mean,
        **dict.fromkeys(("aten::add", "aten::sub", "aten::mul", "aten::div"), _promotion),
        **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _matmul),
        "aten::native_layer_norm": _copies,
        "aten::native_layer_norm_backward": _copies,
        "aten::native_batch_norm_backward": _copies,
        "aten::embedding": _copies,
        "aten::embedding_dense_backward": _copies,
    },
    "cuda": {
        "aten::convolution": _cudnn_convolution,
        "aten::convolution_backward": _cudnn_convolution,
        f"{simulated_lstm.NAMESPACE}::lstm": _cudnn_lstm,
    },
}
WHY_CUBLAS = (
    "workspaces of the matrix library, made at its first calls and kept: one for the thread of the forward "
    "pass and one for that of the backward pass (32 MiB each on Hopper, 8 MiB elsewhere), and 1 MiB of cublasLt"
)
CUDA_STEP_MEMORY = (
    HiddenBytes("cublas", "", WHY_CUBLAS, 2 * 2**25 + 2**20),
    HiddenBytes("context", "", "CUDA context and kernels, outside of the allocator: 300 to 600 MiB", 600 * 2**20),
)
