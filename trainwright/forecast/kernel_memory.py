"""What an operator of a library allocates inside: found by calling it, on zeros, and listening to torch's allocator.

oneDNN's formats, paddings and buffers depend on its version, the processor and the shapes, so no formula foresees them.
A call that would be large is made with fewer rows, twice: each allocation grows linearly with the rows. The allocator
is heard through torch's older profiler, a private part; without it, what is inside is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.forecast.fake_tensors import without_fake_tensors

MOST_FLOPS = 2e9
MOST_BYTES = 2**27
"""Of one call."""
aten = torch.ops.aten
Described = tuple[Any, ...]
"""An argument so that it can be compared: ``("tensor", shape, strides, dtype)``, or a value."""


class KernelMemory(NamedTuple):
    """``scratch`` lives only inside the call, ``left`` is all that it leaves: its outputs, and what they hide, bytes.

    Where not ``sure``, the call was too large, and smaller ones of it differ in more than size.
    """

    scratch: int
    left: int
    sure: bool = True


class Rows(NamedTuple):
    """The arguments whose first dimension counts rows, and the FLOPs of one row."""

    places: tuple[int, ...]
    flops: float


def inside(op: Any, args: Sequence[Any], rows: Rows) -> KernelMemory | None:
    """What a call with such arguments allocates; None where that cannot be heard."""
    count = args[rows.places[0]].shape[0]
    size = sum(args[place].nbytes for place in rows.places) / max(1, count)
    most = max(1, int(min(MOST_FLOPS / max(1, rows.flops), MOST_BYTES / max(1, size))))
    if count <= most:
        heard = _heard(op, _described(args, rows, count))
        return None if heard is None else _summed(heard)
    less = max(1, most // 2)
    small, large = (_heard(op, _described(args, rows, some)) for some in (less, most))
    if small is None or large is None:
        return None
    if less < most and len(small) == len(large):
        further = (count - most) / (most - less)
        return _summed([round(b + (b - a) * further) for a, b in zip(small, large, strict=True)])
    found = _summed(large)
    return KernelMemory(round(found.scratch * count / most), round(found.left * count / most), sure=False)


def _summed(changes: Sequence[int]) -> KernelMemory:
    held = list(accumulate(changes, initial=0))
    return KernelMemory(max(held) - held[-1], held[-1])


def _described(args: Sequence[Any], rows: Rows, count: int) -> Described:
    return tuple(_one(arg, count if place in rows.places else None) for place, arg in enumerate(args))


def _one(arg: Any, count: int | None) -> Any:
    if isinstance(arg, Tensor):
        shape = tuple(arg.shape) if count is None else (count, *arg.shape[1:])
        return ("tensor", shape, arg.stride(), arg.dtype)
    return tuple(arg) if isinstance(arg, list) else arg


@lru_cache(maxsize=1024)
def _heard(op: Any, described: Described) -> tuple[int, ...] | None:
    with without_fake_tensors(), torch.enable_grad():  # an LSTM makes its workspace only where gradients are
        args = [_made(each) for each in described]
        if op._overloadpacket is aten.mkldnn_rnn_layer_backward:
            args[-1] = _workspace(args)
        return _listened(lambda: op(*args))


def _made(described: Any) -> Any:
    if isinstance(described, tuple) and described and described[0] == "tensor":
        _, shape, strides, dtype = described
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()
    return list(described) if isinstance(described, tuple) else described


def _workspace(args: Sequence[Any]) -> Tensor:
    """What the LSTM's forward pass keeps for ``args`` of its backward pass."""
    backward, mode, hidden, layers, has_biases, train, both, sizes, first = args[13:22]
    made = aten.mkldnn_rnn_layer(*args[:7], backward, sizes, mode, hidden, layers, has_biases, both, first, train)
    workspace: Tensor = made[3]
    return workspace


def _listened(call: Callable[[], object]) -> tuple[int, ...] | None:
    """Each allocation of the call in order, releases as negative numbers, bytes."""
    private: Any = torch.autograd
    try:
        from torch._C._profiler import _ExperimentalConfig

        cpu = private.ProfilerState.CPU
        config = private.ProfilerConfig(cpu, False, True, False, False, False, _ExperimentalConfig())
        private._enable_profiler_legacy(config)
    except (ImportError, AttributeError, TypeError, RuntimeError):  # another torch, or somebody else is listening
        return None
    try:
        out = call()
    finally:
        threads: Any = private._disable_profiler_legacy()
    del out
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return tuple(event.cpu_memory_usage() for event in events)


def flops_of_a_row(positions: Sequence[int], *weights: Tensor) -> float:
    """Each position multiplies with each weight once."""
    return 2.0 * prod(positions) * sum(weight.numel() for weight in weights)
