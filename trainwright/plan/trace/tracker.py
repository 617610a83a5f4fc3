"""Tracks every operator of a step under fake tensors: when each storage is made and freed, and its kind."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainwright.plan.call_trace import HiddenBytes, Kind, Phase
from trainwright.plan.trace.fake_tensors import (
    UNTRACEABLE,
    DeviceName,
    current_node,
    in_backward,
    next_sequence_number,
    untraceable,
)
from trainwright.plan.trace.hidden_memory import hidden_memory
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, OpKwargs, OpResult, WorkLog, tensors_in
from trainwright.plan.trace.simulated_cuda import CASTS

BLOCK_BYTES: dict[DeviceName, int] = {"cpu": 1, "cuda": 512}
"""The multiple to which the allocator rounds sizes up."""


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """One storage. ``kind`` is None until its use is known; ``made_in`` and ``freed_in`` are phases."""

    num_bytes: int
    kind: Kind | None
    made_in: Phase
    module: str
    freed_in: Phase | None = None


@dataclass(slots=True)
class MemoryEvent:
    """One operator that allocated memory, and the storages freed since the previous event."""

    phase: Phase
    micro: int
    module: str
    op: str
    freed: list[TrackedStorage]
    made: list[TrackedStorage]


class ModulePaths:
    """The path of the running module: from hooks in forward, from the autograd node's sequence number in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.stack = [""]
        self._numbers: list[int] = [0]  # _paths[i] is the module of the nodes from _numbers[i] on
        self._paths: list[str] = [""]
        self.handles: list[RemovableHandle] = []
        named: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            named.setdefault(module, []).append(path)
        for module, paths in named.items():
            self.handles.append(module.register_forward_pre_hook(partial(self._enter, paths)))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, paths: list[str], *_: object) -> None:
        """Enter a module. A module that several others share gets its path below the caller."""
        above = self.stack[-1] and f"{self.stack[-1]}."
        self.stack.append(next((path for path in paths if path.startswith(above)), paths[0]))
        self._mark()

    def _leave(self, *_: object) -> None:
        self.stack.pop()
        self._mark()

    def _mark(self) -> None:
        number = next_sequence_number()
        if self._numbers[-1] == number:
            self._paths[-1] = self.stack[-1]
        else:
            self._numbers.append(number)
            self._paths.append(self.stack[-1])

    def backward(self) -> str:
        """Return the path of the module that made the autograd node that is running."""
        node = current_node()
        return self.of(node._sequence_nr()) if node is not None else ""

    def of(self, number: int) -> str:
        """Return the path of the module that made the autograd node with this sequence number."""
        return self._paths[bisect_right(self._numbers, number) - 1]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode above FakeTensorMode. It calls each operator with ``call_without_values``.

    Events are recorded between ``record`` and ``end``. The caller marks the start of each micro-batch and of the
    update; the tracker detects the backward pass, and the forward passes that activation checkpointing repeats in it.
    """

    def __init__(self, model: nn.Module, device: DeviceName) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.recording = False
        self.updating = False
        self.micro = -1
        self.before: list[TrackedStorage] = []
        self.events: list[MemoryEvent] = []
        self.unseen: dict[str, HiddenBytes] = {}
        self.work = WorkLog()
        self.paths = ModulePaths(model)
        self._block = BLOCK_BYTES[device]
        self._live: dict[int, TrackedStorage] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: list[TrackedStorage] = []
        self._phase: Phase = "forward"

    def set_kind(self, kind: Kind, tensors: Iterable[object]) -> None:
        """Set the kind of these tensors' storages unless it is known; other values are skipped."""
        for tensor in tensors_in(tensors):
            storage = self._storage(tensor)
            if storage.kind is None:
                storage.kind = kind

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> OpResult:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # only reads a property
            return func(*args, **kwargs)
        phase, module = self._where()
        if phase != self._phase and phase == "backward":
            CASTS.clear()  # as autocast does at the end of the forward pass
        result = call_without_values(func, args, kwargs)
        self._phase = phase
        if self.recording:
            self._record(OperatorCall(func, args, kwargs, result), module)
        return result

    def _record(self, call: OperatorCall, module: str) -> None:
        phase = self._phase
        made = [  # if two outputs share a storage, it is in _live from the first of them on
            self._storage(tensor, phase, module)
            for tensor in call.outputs()
            if tensor.untyped_storage()._cdata not in self._live
        ]
        if made and self.micro < 0:  # the engine's copies of buffers, before the first forward pass
            self.set_kind("buffers", (call.result,))
        if made or call.is_mutable:
            self.work.add(phase, module, call)
        scratch = self._hidden(call, made)
        if made or self._freed:
            self._add_event(module, call.name, made + scratch)
            self._freed += scratch

    def _hidden(self, call: OperatorCall, made: list[TrackedStorage]) -> list[TrackedStorage]:
        """Return the memory used only inside the call as one storage; add a workspace that stays to the last output."""
        extra = hidden_memory(self.device, call) if made else None
        if extra is None:
            return []
        module = made[0].module
        made[-1].num_bytes += extra.workspace
        if extra.why:
            self._record_hidden(HiddenBytes(call.name, module, extra.why, extra.bound))
        phase = made[0].made_in
        return [TrackedStorage(extra.scratch, "temporaries", phase, module, phase)] if extra.scratch else []

    def _record_hidden(self, found: HiddenBytes) -> None:
        """Keep one row for each operator: the largest bound, and no module if there are several."""
        before = self.unseen.get(found.op, found)
        unknown = before.bound_bytes is None or found.bound_bytes is None
        bound = None if unknown else max(before.bound_bytes or 0, found.bound_bytes or 0)
        module = found.module if found.module == before.module else ""
        self.unseen[found.op] = HiddenBytes(found.op, module, found.why, bound)

    def _add_event(self, module: str, op: str, made: list[TrackedStorage]) -> None:
        freed, self._freed = self._freed, []
        self.events.append(MemoryEvent(self._phase, self.micro, module, op, freed, made))

    def _where(self) -> tuple[Phase, str]:
        if self.updating:
            return "update", ""
        if not in_backward():
            return "forward", self.paths.stack[-1]
        if torch.is_grad_enabled():
            return "checkpointing", self.paths.stack[-1]
        return "backward", self.paths.backward()

    def _storage(self, tensor: Tensor, phase: Phase = "forward", module: str = "") -> TrackedStorage:
        """Return the record of a tensor's storage, making it if there is none."""
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage = self._live.get(key)
        if storage is None:
            size = -(-untyped.nbytes() // self._block) * self._block
            storage = self._live[key] = TrackedStorage(size, None, phase, module)
            self._refs[key] = weakref.ref(untyped, partial(self._free, key))
        return storage

    def _free(self, key: int, _: object) -> None:
        del self._refs[key]
        storage = self._live.pop(key)
        storage.freed_in = self._phase
        self._freed.append(storage)

    def begin_micro_batch(self) -> None:
        """Mark the start of a micro-batch. Call it before each forward pass."""
        self.micro += 1

    def begin_update(self) -> None:
        """Mark the start of the update. Call it after the last backward pass."""
        self.updating, self._phase = True, "update"

    def record(self) -> None:
        """Start to record events; what is live now is held ``before`` the step."""
        self.before = list(self._live.values())
        self._freed = []
        self.recording = True

    def end(self) -> None:
        """Stop recording; the last event holds what was freed after the last operator."""
        if self.recording:
            self.recording = False
            self._add_event("", "", [])

    def move_before(self, kind: Kind, tensors: Iterable[object]) -> None:
        """Count storages that the step makes and keeps, such as optimizer state, as held before it (steady state)."""
        self.set_kind(kind, tensors)
        early = {id(storage) for storage in self._live.values() if storage.kind == kind}
        for event in self.events:
            made_early = [storage for storage in event.made if id(storage) in early]
            if made_early:
                event.made = [storage for storage in event.made if id(storage) not in early]
                self.before += made_early


aten = torch.ops.aten


def call_without_values(op: OpOverload, args: OpArgs, kwargs: OpKwargs) -> OpResult:
    """Call the operator. If the result depends on values, return the most expensive one.

    ``.item()`` returns False or 1, so that a step is not skipped, a norm is clipped and a loss weight is not 0.
    ``nonzero`` and masks select every element. Raises UsageError for other operators whose result depends on values.
    """
    packet = op._overloadpacket
    if packet is aten._grouped_mm:  # fake tensors accept only bf16, kernels also other types
        return _grouped_product(*args, **kwargs)
    try:
        result = op(*args, **kwargs)
    except UNTRACEABLE as error:
        if packet is aten._local_scalar_dense:
            return _number(args[0].dtype)
        if packet is aten.nonzero:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if packet is aten.masked_select:
            return args[0].new_empty(prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))  # type: ignore[no-untyped-call]
        if packet in (aten.index, aten.index_put, aten.index_put_):
            return op(args[0], _masks_as_positions(args[1]), *args[2:], **kwargs)
        raise untraceable(error) from None
    if packet is aten.native_group_norm_backward:
        return _in_dtype_of(args[1], result)
    return result


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, _bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product of rows (N, I) and matrices (E, I, O): (N, O).

    For two matrices whose common dimension is divided into E groups, the result is (E, I, O).
    """
    groups = [len(offs)] if offs is not None and a.dim() == b.dim() == 2 else []
    groups = [len(a)] if a.dim() == b.dim() == 3 else groups
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype)


def _in_dtype_of(x: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Convert the gradient of ``x`` to the dtype of ``x``. Fake tensors use the weight's: fp32 under autocast."""
    first = grads[0]
    return (first if first is None or first.dtype is x.dtype else first.to(x.dtype), *grads[1:])


def _number(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _masks_as_positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace each mask among the indices by one index of positions for each of its dimensions."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            positions.append(index)
    return positions
