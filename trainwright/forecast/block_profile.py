"""What the blocks of a model compute in a forward pass, and which of it backward needs: found under fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.build.checkpointing import find_blocks
from trainwright.build.selective import draws_random_numbers, family_of, written
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.forecast.traced_step import TracedObjects
from trainwright.forecast.work import WorkLog, tensors_in


@dataclass(slots=True)
class OpCall:
    """One operator that makes new tensors: ``size`` bytes. ``site`` is how a Recompute names it."""

    site: str
    size: int
    flops: int
    moved: int
    keepable: bool
    storages: frozenset[int]


@dataclass
class BlockProfile:
    """The forward pass of one block.

    ``whole`` are the bytes that backward needs without recomputation, by storage; of ``calls``, the first
    ``needed`` are computed again when nothing is kept: what comes after them, backward does not need. ``ops`` counts
    views too.
    """

    calls: list[OpCall] = field(default_factory=list)
    needed: int = 0
    ops: int = 0
    whole: dict[int, int] = field(default_factory=dict)

    @property
    def again(self) -> list[OpCall]:
        return self.calls[: self.needed]


class ForwardSeen(Exception):
    """Ends the step of a survey: of it, only the first forward pass is of use."""


class BlockSurvey(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the first forward pass of what ``make`` makes, which fills ``blocks`` and their ``paths``.

    Its loss then raises ``ForwardSeen``: what is watched is held longer, so the step would not be the plain one.
    """

    def __init__(self, make: Callable[[torch.device], TracedObjects]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[BlockProfile] = []
        self.paths: list[str] = []
        self._make = make
        self._open: list[BlockProfile] = []
        self._indices: list[Counter[str]] = []
        self._known: set[int] = set()  # storages that are held anyhow
        self._alive: list[Any] = []  # so that no storage gets the number of another

    def make(self, device: torch.device) -> TracedObjects:
        """The subject, whose loss tells the survey of its first call, and ends there."""
        subject = self._make(device)
        inner = as_loss_fn(subject.loss)

        def loss(model: nn.Module, batch: Any) -> Loss | Tensor:
            with self._watching(model):
                inner(model, batch)
            raise ForwardSeen

        return replace(subject, loss=loss)

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[None]:
        blocks = find_blocks(model)
        self.blocks = [BlockProfile() for _ in blocks]
        names = {id(module): path for path, module in model.named_modules()}
        self.paths = [names[id(block)] for block in blocks]
        self._known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        handles: list[Any] = []
        for block, anatomy in zip(blocks, self.blocks, strict=True):
            enter = partial(self._enter, anatomy)
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave, always_call=True))
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()

    def _enter(self, anatomy: BlockProfile, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._known |= {_storage(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        self._open.append(anatomy)
        self._indices.append(Counter())

    def _leave(self, *_: object) -> None:
        self._open.pop()
        self._indices.pop()

    def _saved(self, tensor: Tensor) -> Tensor:
        if self._open:
            block = self._open[-1]
            block.needed = len(block.calls)
            if (key := _storage(tensor)) not in self._known:
                block.whole[key] = tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._open:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        block, family = self._open[-1], family_of(func)
        block.ops += 1
        site = ""
        if family is not None:
            site = f"{family}:{self._indices[-1][family]}"
            self._indices[-1][family] += 1
        if func._schema.is_mutable:
            _forbid(block.calls, written(func, args))
        outputs = list(tensors_in((out,)))
        before = {_storage(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        made = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        new = frozenset(made.keys() - before)
        if not new and not func._schema.is_mutable:
            return  # a view
        self._alive += [tensor.untyped_storage() for tensor in outputs]
        log = WorkLog()
        log.add("forward", "", func, args, kwargs, out)
        (work,) = log.rows()
        keepable = family is not None and not draws_random_numbers(func, args, kwargs)
        size = sum(made[key] for key in new)
        block.calls.append(OpCall(site, size, work.flops, work.bytes, keepable, new))


def _forbid(calls: Sequence[OpCall], changed: Sequence[Tensor]) -> None:
    """What is changed in place later must not be kept."""
    touched = {_storage(tensor) for tensor in changed}
    for call in calls:
        if call.storages & touched:
            call.keepable = False


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
