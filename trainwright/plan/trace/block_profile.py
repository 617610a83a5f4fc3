"""Profiles the forward pass of each block of a model, and the part of it that backward needs, under fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainwright.assembly.checkpointing import find_blocks
from trainwright.assembly.selective import draws_random_numbers, family_of, storage_number, written
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, OpKwargs, OpResult, tensors_in
from trainwright.plan.trace.traced_step import TracedObjects
from trainwright.plan.trace.work import WorkLog


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
        detached = tensor.detach()  # the tensor itself would be a cycle through C++, see engine/dry_run.py
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
