"""Plans activation checkpointing: chooses what each block keeps so that a step's peak stays within a budget.

Each block has a ladder of levels, from keeping only its input to keeping all activations. Outputs are ordered by
recomputation seconds per byte. All blocks start at the lowest level. The outputs that a block keeps are held while the
loss and all later blocks run backward, so the block may keep more as long as memory stays within the budget at all
these moments. Levels that save the most seconds per byte are chosen first; among equal ones, those of later blocks.
The moments come from a trace of the complete step, and each choice is traced again: only its traced peak counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainwright.assembly.checkpointing import draws_random_numbers, family_of, find_blocks, storage_number, written
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.plan.call_trace import Trace
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, OpKwargs, OpResult, WorkLog, tensors_in
from trainwright.plan.trace.traced_step import TracedObjects


@dataclass(slots=True)
class BlockOp:
    """One call of an operator that makes new tensors of ``num_bytes``. ``site`` is its name in a Checkpointing."""

    site: str
    num_bytes: int
    flops: int
    moved: int
    keepable: bool
    storages: frozenset[int]


@dataclass
class BlockProfile:
    """The forward pass of one block.

    ``whole`` are the bytes by storage that backward needs without activation checkpointing. With checkpointing that
    keeps no output, backward recomputes the first ``needed`` of ``ops``; the rest is not needed. ``num_calls`` includes
    views.
    """

    ops: list[BlockOp] = field(default_factory=list)
    needed: int = 0
    num_calls: int = 0
    whole: dict[int, int] = field(default_factory=dict)

    @property
    def computed_again(self) -> list[BlockOp]:
        """The operators that backward recomputes when no output is kept."""
        return self.ops[: self.needed]


class ForwardDone(Exception):
    """Ends the step of a BlockSurvey after its first forward pass."""


class BlockSurvey(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first forward pass of the objects of ``make``; fills ``blocks`` and their ``paths``.

    The loss then raises ``ForwardDone``: recording holds tensors longer, so the rest of the step would not be
    realistic.
    """

    def __init__(self, make: Callable[[torch.device], TracedObjects]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[BlockProfile] = []
        self.paths: list[str] = []
        self._make = make
        self._open: list[BlockProfile] = []
        self._indices: list[Counter[str]] = []
        self._known: set[int] = set()  # storages that are held with and without checkpointing
        self._alive: list[torch.UntypedStorage] = []  # keeps storages alive, so that no address is reused

    def make(self, device: torch.device) -> TracedObjects:
        """Return the objects, with a loss that records its first call and then ends the step."""
        objects = self._make(device)
        inner = as_loss_fn(objects.loss)

        def loss(model: nn.Module, batch: Any) -> Loss | Tensor:
            with self._recording(model):
                inner(model, batch)
            raise ForwardDone

        return replace(objects, loss=loss)

    @contextmanager
    def _recording(self, model: nn.Module) -> Iterator[None]:
        blocks = find_blocks(model)
        self.blocks = [BlockProfile() for _ in blocks]
        names = {id(module): path for path, module in model.named_modules()}
        self.paths = [names[id(block)] for block in blocks]
        self._known = {storage_number(tensor) for tensor in (*model.parameters(), *model.buffers())}
        handles: list[RemovableHandle] = []
        for block, profile in zip(blocks, self.blocks, strict=True):
            enter = partial(self._enter, profile)
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave, always_call=True))
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._on_saved, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()

    def _enter(self, profile: BlockProfile, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._known |= {storage_number(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        self._open.append(profile)
        self._indices.append(Counter())

    def _leave(self, *_: object) -> None:
        self._open.pop()
        self._indices.pop()

    def _on_saved(self, tensor: Tensor) -> Tensor:
        if self._open:
            block = self._open[-1]
            block.needed = len(block.ops)
            if (key := storage_number(tensor)) not in self._known:
                block.whole[key] = tensor.untyped_storage().nbytes()
        is_open, self._open = self._open, []  # the detach is not an operator of the model
        detached = tensor.detach()  # saving the tensor would make a cycle through C++, see engine/dry_run.py
        self._open = is_open
        return detached

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> OpResult:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._open:
            self._record(OperatorCall(func, args, kwargs, result))
        return result

    def _record(self, call: OperatorCall) -> None:
        block, family = self._open[-1], family_of(call.op)
        block.num_calls += 1
        site = ""
        if family is not None:
            site = f"{family}:{self._indices[-1][family]}"
            self._indices[-1][family] += 1
        if call.is_mutable:
            _forbid_keeping(block.ops, written(call.op, call.args))
        outputs = list(call.outputs())
        before = {storage_number(tensor) for tensor in call.inputs()}
        made = {storage_number(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        new = frozenset(made.keys() - before)
        if not new and not call.is_mutable:
            return  # a view
        self._alive += [tensor.untyped_storage() for tensor in outputs]
        log = WorkLog()
        log.add("forward", "", call)
        (work,) = log.rows()
        keepable = family is not None and not draws_random_numbers(call.op, call.args, call.kwargs)
        size = sum(made[key] for key in new)
        block.ops.append(BlockOp(site, size, work.flops, work.bytes, keepable, new))


def _forbid_keeping(ops: Sequence[BlockOp], changed: Sequence[Tensor]) -> None:
    """Forbid keeping outputs that a later operator changes in place."""
    touched = {storage_number(tensor) for tensor in changed}
    for op in ops:
        if op.storages & touched:
            op.keepable = False


Keep = tuple[str, ...] | None
Rungs = tuple[int, ...]
"""For each block the index of its level."""


@dataclass(frozen=True)
class Speed:
    """Rates of a device, and host seconds per operator, checkpointed block, and operator observed in Python.

    If a block keeps some outputs, all its operators pass through Python. A device that works while the host continues
    (``overlaps``) hides the time of Python, unless its operators are small.
    """

    flops_per_s: float
    bytes_per_s: float
    overlaps: bool
    call_s: float = 6e-6
    block_s: float = 6e-4
    watch_s: float = 1e-5

    def seconds(self, op: BlockOp) -> float:
        """Return the device seconds of one call, by the roofline."""
        return max(op.flops / self.flops_per_s, op.moved / self.bytes_per_s)

    def together(self, device_s: float, host_s: float) -> float:
        """Return the seconds until both the device and the host are done."""
        return max(device_s, host_s) if self.overlaps else device_s + host_s


@dataclass(frozen=True)
class Level:
    """One level of a block: the outputs that it keeps, their bytes until backward, and the seconds that it adds."""

    keep: Keep
    held: int
    extra_s: float


@dataclass(frozen=True)
class Candidate:
    """A choice that was traced. ``extra_s`` is the estimated time that it adds to each micro-batch."""

    checkpointing: Checkpointing
    trace: Trace
    extra_s: float
    rungs: Rungs

    @cached_property
    def peak_bytes(self) -> int:
        return self.trace.peak.total


def levels(block: BlockProfile, speed: Speed) -> list[Level]:
    """Return the levels of a block, from least memory to least time.

    Outputs that save most seconds per byte come first.
    """
    worth = [(op, speed.seconds(op)) for op in block.computed_again if op.keepable and op.num_bytes]
    worth.sort(key=lambda pair: pair[1] / pair[0].num_bytes, reverse=True)
    again_s, forward_s = (sum(map(speed.seconds, ops)) for ops in (block.computed_again, block.ops))
    start_s = speed.call_s * block.num_calls
    plain_s = speed.together(forward_s, start_s)
    watched_s = 2 * (start_s + speed.watch_s * block.num_calls) + speed.block_s
    held = 0
    ladder = [Level((), held, speed.together(forward_s + again_s, 2 * start_s + speed.block_s) - plain_s)]
    kept: list[str] = []
    for op, seconds in worth:
        held, again_s = held + op.num_bytes, again_s - seconds
        kept.append(op.site)
        ladder.append(Level(tuple(kept), held, speed.together(forward_s + again_s, watched_s) - plain_s))
    return _drop_dominated(ladder, Level(None, sum(block.whole.values()), 0.0))


def _drop_dominated(ladder: Sequence[Level], whole: Level) -> list[Level]:
    """Return the levels without those that cost more memory and more time than another."""
    found: list[Level] = []
    for level in ladder:
        if level.held < whole.held and (not found or level.extra_s < found[-1].extra_s):
            found.append(level)
    return [*found, whole]


def hull(ladder: Sequence[Level]) -> list[int]:
    """Return the indices of the levels on the lower convex hull of seconds over bytes."""
    found: list[int] = []
    for index, level in enumerate(ladder):
        while len(found) > 1 and _gain(ladder[found[-2]], ladder[found[-1]]) <= _gain(ladder[found[-2]], level):
            found.pop()
        found.append(index)
    return found


def _gain(lower: Level, upper: Level) -> float:
    """Return the seconds saved per additional byte."""
    return (lower.extra_s - upper.extra_s) / max(1, upper.held - lower.held)


def peaks_by_block(trace: Trace, paths: Sequence[str]) -> list[int]:
    """Return the peak bytes while each block runs backward; the last entry is the peak of forward pass and loss."""
    peaks = [0] * (len(paths) + 1)
    blocks: dict[str, int | None] = {}
    reached = len(paths)
    for moment in trace.moments:
        if moment.phase == "update":
            continue
        if moment.phase == "forward":
            reached = len(paths)
        else:
            if moment.module not in blocks:
                within = (i for i, path in enumerate(paths) if f"{moment.module}.".startswith(f"{path}."))
                blocks[moment.module] = next(within, None)
            block = blocks[moment.module]
            reached = reached if block is None else min(reached, block)
        peaks[reached] = max(peaks[reached], moment.total)
    return peaks


class CheckpointingPlanner:
    """Plans for one model and step. No choice is traced twice.

    ``trace`` is ``trace_step`` with the settings of the step.

    The constructor costs two traces and a forward pass. It raises UsageError when the model has no blocks or cannot be
    traced.
    """

    def __init__(
        self, make: Callable[[torch.device], TracedObjects], trace: Callable[..., Trace], speed: Speed
    ) -> None:
        survey = BlockSurvey(make)
        self._make, self._trace = make, trace
        with suppress(ForwardDone):
            trace(survey.make)
        none = trace(make)
        self._paths = survey.paths
        self._ladders = [levels(block, speed) for block in survey.blocks]
        self._hulls = [hull(ladder) for ladder in self._ladders]
        top = tuple(len(ladder) - 1 for ladder in self._ladders)
        self.none = Candidate(Checkpointing.none(len(top)), none, 0.0, top)
        self._seen = {top: self.none}
        self.every = self._trace_rungs((0,) * len(top))

    def choose(self, budget_bytes: int, *, most_traces: int = 4) -> Candidate:
        """Return the fastest choice whose traced peak is within the budget, or the one with least memory if none is."""
        if self.none.peak_bytes <= budget_bytes:
            return self.none
        best, margin = self.every, 0
        if best.peak_bytes > budget_bytes:
            return best
        for _ in range(most_traces):
            rungs = self._raise_levels(best, budget_bytes - margin)
            if rungs == best.rungs:
                break
            candidate = self._trace_rungs(rungs)
            if candidate.peak_bytes > budget_bytes:
                margin += candidate.peak_bytes - budget_bytes
            elif candidate.extra_s < best.extra_s:
                best = candidate
        return best

    def _trace_rungs(self, rungs: Rungs) -> Candidate:
        if rungs not in self._seen:
            picked = [ladder[rung] for ladder, rung in zip(self._ladders, rungs, strict=True)]
            checkpointing = Checkpointing(tuple(level.keep for level in picked))
            trace = self._trace(self._make, checkpointing=checkpointing)
            self._seen[rungs] = Candidate(checkpointing, trace, sum(level.extra_s for level in picked), rungs)
        return self._seen[rungs]

    def _raise_levels(self, start: Candidate, budget: int) -> Rungs:
        """Return the highest levels that fit into the memory left at the moments of ``start``.

        Raises levels along the hulls first, then to any level that still fits.
        """
        rungs = list(start.rungs)
        room = [budget - peak for peak in peaks_by_block(start.trace, self._paths)]
        stuck: set[int] = set()
        for _, block, rung in self._steps():
            if rung > rungs[block] and block not in stuck and not self._raise(rungs, room, block, rung):
                stuck.add(block)
        for block in reversed(range(len(rungs))):
            for rung in reversed(range(rungs[block] + 1, len(self._ladders[block]))):
                if self._raise(rungs, room, block, rung):
                    break
        return tuple(rungs)

    def _steps(self) -> list[tuple[float, int, int]]:
        """Return (-seconds per byte, block, level), the best first; among equal ones the last block first."""
        steps = [
            (-_gain(ladder[lower], ladder[upper]), block, upper)
            for block, (ladder, best) in enumerate(zip(self._ladders, self._hulls, strict=True))
            for lower, upper in pairwise(best)
        ]
        return sorted(steps, key=lambda step: (step[0], -step[1], step[2]))

    def _raise(self, rungs: list[int], room: list[int], block: int, rung: int) -> bool:
        """Raise the block to the level if all later moments have room for it; return True if they have."""
        ladder = self._ladders[block]
        more = ladder[rung].held - ladder[rungs[block]].held
        if more > min(room[block + 1 :]):
            return False
        for later in range(block + 1, len(room)):
            room[later] -= more
        rungs[block] = rung
        return True
