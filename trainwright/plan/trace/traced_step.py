"""Traces one optimizer step of the Trainwright engine under fake tensors and returns a Trace."""

from __future__ import annotations

import logging
import traceback
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from trainwright.assembly.checkpointing import apply_checkpointing
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.step import StepFn, make_step
from trainwright.errors import UsageError
from trainwright.optim.clip import make_clip
from trainwright.plan.call_trace import KINDS, HiddenBytes, Kind, Moment, Trace
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.fake_tensors import DeviceName, fake_tensors, simulated_device, use_foreach
from trainwright.plan.trace.hidden_memory import CUDA_STEP_MEMORY
from trainwright.plan.trace.simulated_cuda import CASTS
from trainwright.plan.trace.tracker import MemoryEvent, TrackedStorage, Tracker

MIB = 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
LARGE_UNIT = 2 * MIB
SMALLEST_BLOCK = 512


@dataclass(eq=False, slots=True)
class AllocatorBlock:
    """A part of a segment; ``before`` and ``after`` are its neighbours in the segment."""

    size: int
    number: int
    small: bool
    free: bool = False
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


class CachingAllocator:
    """Simulates torch's CUDA caching allocator, with its size limits. ``reserved`` are the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, AllocatorBlock]]] = {True: [], False: []}  # by size, then age
        self._count = 0

    def allocate(self, size: int) -> AllocatorBlock:
        """Return a block of at least ``size`` bytes, a multiple of 512."""
        small = size <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left >= SMALLEST_BLOCK if small else left > SMALL:
            self._split(block, size)
        return block

    def release(self, block: AllocatorBlock) -> None:
        """Free the block and merge it with free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool = self._free[other.small]
                del pool[bisect_left(pool, (other.size, other.number))]
                self._join(block, other)
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _segment(self, size: int, small: bool) -> AllocatorBlock:
        if small:
            whole = SMALL_SEGMENT
        else:
            whole = MEDIUM_SEGMENT if size < MEDIUM else -(-size // LARGE_UNIT) * LARGE_UNIT
        self.reserved += whole
        return self._block(whole, small)

    def _block(self, size: int, small: bool) -> AllocatorBlock:
        self._count += 1
        return AllocatorBlock(size, self._count, small)

    def _split(self, block: AllocatorBlock, size: int) -> None:
        rest = self._block(block.size - size, block.small)
        rest.before = block
        rest.after = block.after
        rest.free = True
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[block.small], (rest.size, rest.number, rest))

    def _join(self, block: AllocatorBlock, other: AllocatorBlock) -> None:
        block.size += other.size
        if other is block.before:
            block.before = other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block


WHY_RESERVED = "simulated gaps in the caching allocator's segments; it frees most of them when memory is short"


@dataclass(frozen=True)
class TracedObjects:
    """Model, loss, optimizer and one micro-batch, made under fake tensors on the simulated device.

    ``loss`` is ``(model, batch)`` or ``(output, target)``. Without an optimizer only the forward and backward passes
    are traced. ``micro`` is the data of one micro-batch; its first tensor's first dimension counts samples.
    """

    model: nn.Module
    loss: Callable[..., Loss | Tensor]
    optimizer: Optimizer | None
    micro: Any


def trace_step(
    make: Callable[[torch.device], TracedObjects],
    *,
    device: DeviceName,
    precision: PrecisionName = "fp32",
    accumulation: int = 1,
    checkpointing: Checkpointing | None = None,
    clip: bool = True,
    caches: bool = True,
) -> Trace:
    """Return the memory and work of one steady-state step on ``device``, which need not be present.

    ``make`` is called under fake tensors, so it may build a model of any size, on the device that it gets. One step
    runs; the optimizer state that the step makes counts as held before it. ``caches`` is passed to ``Precision``. The
    state of the process (random numbers, default dtype, autocast) is restored, except for the simulated CUDA device,
    which stays registered: see ``simulated_cuda``.

    Raises UsageError for a step that cannot be simulated, such as one whose shapes depend on values, and whatever
    ``make`` raises.
    """
    place = simulated_device(device)
    with _restore_process(), fake_tensors():
        with torch.device(place):
            objects = make(place)
        if checkpointing is not None:
            apply_checkpointing(objects.model, checkpointing)
        optimizer = objects.optimizer or _NoUpdate(objects.model)
        if device == "cuda":
            use_foreach(optimizer)
        tracker = Tracker(objects.model, device)
        numbers = Precision(precision, place.type, caches)
        loss_module = objects.loss if isinstance(objects.loss, nn.Module) else None
        state = TrainState(objects.model, optimizer, scaler=numbers.scaler(place), loss=loss_module)
        batch = _batch(objects.micro, accumulation)
        advance = _advance(objects, tracker, numbers, clip)
        with tracker, ExitStack() as hooks:
            hooks.callback(tracker.paths.close)
            hooks.callback(CASTS.clear)
            _set_kinds(tracker, state, batch)
            _set_kind_of_gradients(hooks, tracker, objects.model)
            tracker.record()
            with _as_usage_error():
                advance(state, batch)
            tracker.end()
            tracker.move_before("optimizer", _state_tensors(optimizer))
    held = moments(tracker.before, tracker.events)
    unseen = [*tracker.unseen.values()]
    if device == "cuda":
        gaps = reserved_bytes(tracker.before, tracker.events) - max(moment.total for moment in held)
        unseen += [*CUDA_STEP_MEMORY, HiddenBytes("reserved", "", WHY_RESERVED, gaps)]
    return Trace(device, held, kept_for_backward(tracker.events), tracker.work.rows(), tuple(unseen))


@contextmanager
def _as_usage_error() -> Iterator[None]:
    """Raise torch's errors as UsageError, with the original as cause: the real step may fail like this, too."""
    try:
        yield
    except RuntimeError as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "try one real step: if it works, this model can only be measured on the device, not simulated"
        raise UsageError(f"the step cannot be simulated: {what}{_user_frame(error)}", remedy=remedy) from error


def _user_frame(error: Exception) -> str:
    """Return `` at FILE:LINE`` of the innermost frame in the user's code, or ""."""
    ours, installed = Path(__file__).parent.parent, Path(torch.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    users = [f for f in frames if not {ours, installed} & set(Path(f.filename).parents)]
    return f" at {users[-1].filename}:{users[-1].lineno}" if users else ""


@contextmanager
def _restore_process() -> Iterator[None]:
    """Restore the default dtype and the grad mode; ``fake_tensors`` restores the random state.

    Inside, the backward pass runs on this thread, where the tracker is, and torch does not log operators that fail.
    """
    dtype = torch.get_default_dtype()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            log.disabled = was_disabled


def _batch(data: Any, accumulation: int) -> StepBatch:
    """Return the same micro-batch ``accumulation`` times, each with its own memory."""
    first = next((leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)), None)
    size = first.shape[0] if first is not None and first.dim() else 1
    copies = [data] + [tree_map_only(Tensor, torch.clone, data) for _ in range(accumulation - 1)]
    return StepBatch(tuple(MicroBatch(copy, np.arange(size)) for copy in copies))


def _advance(objects: TracedObjects, tracker: Tracker, precision: Precision, clip: bool) -> StepFn:
    """Return the engine's step, with a loss and a probe that mark the phases for the tracker."""
    inner = as_loss_fn(objects.loss)

    def loss(model: nn.Module, batch: Any) -> Loss | Tensor:
        tracker.begin_micro_batch()
        return inner(model, batch)

    def begin_update(_state: TrainState) -> dict[str, Tensor]:
        if objects.optimizer is None:
            tracker.end()
        tracker.begin_update()
        return {}

    return make_step(loss, precision=precision, clip=make_clip("norm" if clip else "none"), probes=[begin_update])


def _set_kinds(tracker: Tracker, state: TrainState, batch: StepBatch) -> None:
    """Set the kind of everything that is held between two steps."""
    tracker.set_kind("weights", state.model.parameters())
    tracker.set_kind("buffers", state.model.buffers())
    if state.loss is not None:
        tracker.set_kind("weights", state.loss.parameters())
        tracker.set_kind("buffers", state.loss.buffers())
    tracker.set_kind("inputs", (leaf for micro in batch.micro for leaf in tree_flatten(micro.data)[0]))
    tracker.set_kind("optimizer", _state_tensors(state.optimizer))


def _state_tensors(optimizer: Optimizer) -> list[object]:
    leaves: list[object] = tree_flatten([dict(each) for each in optimizer.state.values()])[0]
    return leaves


def _set_kind_of_gradients(hooks: ExitStack, tracker: Tracker, model: nn.Module) -> None:
    def accumulated(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.set_kind("gradients", (parameter.grad,))

    for parameter in model.parameters():
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)


class _NoUpdate(Optimizer):
    """An optimizer that changes nothing, for a step that ends with the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": 0.0})

    def step(self, closure: object = None) -> None: ...  # type: ignore[override]


def kind_of(storage: TrackedStorage) -> Kind:
    """Return the kind of a storage. If none is set: activations if forward made it and did not free it."""
    if storage.kind is not None:
        return storage.kind
    of_forward = storage.made_in in ("forward", "checkpointing")
    return "activations" if of_forward and storage.freed_in not in ("forward", "checkpointing") else "temporaries"


def moments(before: Sequence[TrackedStorage], events: Sequence[MemoryEvent]) -> tuple[Moment, ...]:
    """Return the bytes held after each event. ``before`` are the storages held at the start of the step."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for storage in before:
        held[kind_of(storage)] += storage.num_bytes
    found = []
    for event in events:
        for storage in event.freed:
            held[kind_of(storage)] -= storage.num_bytes
        for storage in event.made:
            held[kind_of(storage)] += storage.num_bytes
        found.append(Moment(event.phase, event.micro, event.module, event.op, dict(held)))
    return tuple(found)


def reserved_bytes(before: Sequence[TrackedStorage], events: Sequence[MemoryEvent]) -> int:
    """Return the bytes that CUDA's caching allocator has reserved after these events, including gaps."""
    allocator = CachingAllocator()
    held = {id(storage): allocator.allocate(storage.num_bytes) for storage in before}
    for event in events:
        for storage in event.freed:
            if id(storage) in held:
                allocator.release(held.pop(id(storage)))
        for storage in event.made:
            if storage.num_bytes:
                held[id(storage)] = allocator.allocate(storage.num_bytes)
    return allocator.reserved


def kept_for_backward(events: Sequence[MemoryEvent]) -> Mapping[str, int]:
    """Return the bytes that the first micro-batch's forward pass keeps for backward, by the module that made them."""
    sums: Counter[str] = Counter()
    for event in events:
        if event.phase == "forward" and event.micro == 0:
            for storage in event.made:
                if kind_of(storage) == "activations":
                    sums[event.module] += storage.num_bytes
    return dict(sums)
