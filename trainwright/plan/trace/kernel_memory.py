"""Measures what a library's operator allocates inside, by calling it on zeros while torch's allocator is recorded.

oneDNN's formats, paddings and buffers depend on its version, the processor and the shapes, so no formula gives them.
A call that would be large is replaced by two with fewer rows: each allocation grows linearly with the rows. The
allocations are recorded by torch's older profiler, which is private; without it the memory inside stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainwright.plan.trace.fake_tensors import without_fake_tensors
from trainwright.plan.trace.operator_call import OpArgs

MAX_MEASURED_FLOPS = 2e9
"""The most FLOPs of one measured call."""
MAX_MEASURED_BYTES = 2**27
"""The most bytes in the row arguments of one measured call."""
aten = torch.ops.aten


class TensorShape(NamedTuple):
    """A tensor argument without its values, so that equal calls are measured once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


ArgumentKey = tuple[object, ...]
"""Comparable arguments: a ``TensorShape`` for each tensor, a tuple for each list, other values unchanged."""


class KernelMemory(NamedTuple):
    """Bytes that one call allocates: ``scratch`` only inside the call; ``left`` remains after it.

    ``left`` includes the outputs and hidden memory. If not ``exact``, the call was too large to make, and two smaller
    ones differ in more than size.
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
    with without_fake_tensors(), torch.enable_grad():  # an LSTM makes its workspace only if gradients are enabled
        args: list[Any] = [_make_argument(each) for each in described]
        if op._overloadpacket is aten.mkldnn_rnn_layer_backward:
            args[-1] = _workspace(args)
        return _record_allocations(lambda: op(*args))


def _make_argument(described: object) -> object:
    if isinstance(described, TensorShape):
        return torch.empty_strided(described.shape, described.strides, dtype=described.dtype).zero_()
    return list(described) if isinstance(described, tuple) else described


def _workspace(args: Sequence[Any]) -> Tensor:
    """Return what the LSTM's forward pass keeps for ``args`` of its backward pass."""
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
