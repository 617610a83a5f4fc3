"""Follows every operator of a step under fake tensors: which storages live when, and for what."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.forecast.data_dependent import without_values
from trainwright.forecast.fake_tensors import DeviceName, current_node, forget_casts, in_backward, next_sequence_number
from trainwright.forecast.hidden_memory import hidden
from trainwright.forecast.work import WorkLog, tensors_in
from trainwright.plan.trace import Kind, Phase, Unseen

BLOCK_BYTES: dict[DeviceName, int] = {"cpu": 1, "cuda": 512}
"""What the allocator rounds sizes up to."""


@dataclass(eq=False, slots=True)
class Piece:
    """One storage. ``kind`` is None until it is known what it was for; ``born`` and ``died`` are phases."""

    size: int
    kind: Kind | None
    born: Phase
    module: str
    died: Phase | None = None


@dataclass(slots=True)
class MemoryEvent:
    """One operator that allocated something, with what was freed since the event before."""

    phase: Phase
    micro: int
    module: str
    op: str
    freed: list[Piece]
    made: list[Piece]


class ModulePaths:
    """The path of the module that is computing: by hooks forward, by the number of its autograd node backward."""

    def __init__(self, model: nn.Module) -> None:
        self.stack = [""]
        self._numbers: list[int] = [0]  # from this autograd node on ...
        self._paths: list[str] = [""]  # ... nodes are of this module
        self.handles: list[Any] = []
        named: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            named.setdefault(module, []).append(path)
        for module, paths in named.items():
            self.handles.append(module.register_forward_pre_hook(partial(self._enter, paths)))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, paths: list[str], *_: object) -> None:
        """Of a module that several others share, the path is that under its caller."""
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
        """The module that made the node whose gradient is being computed."""
        node = current_node()
        return self.of(node._sequence_nr()) if node is not None else ""

    def of(self, number: int) -> str:
        """The module that made the autograd node of this number."""
        return self._paths[bisect_right(self._numbers, number) - 1]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode to push above FakeTensorMode. Records while ``recording``; answers always what needs values.

    ``phase`` and ``micro`` are what the caller says; the backward pass is found out, and so is what is
    computed again in it.
    """

    def __init__(self, model: nn.Module, device: DeviceName) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.recording = False
        self.updating = False
        self.micro = -1
        self.before: list[Piece] = []
        self.events: list[MemoryEvent] = []
        self.unseen: dict[str, Unseen] = {}
        self.work = WorkLog()
        self.paths = ModulePaths(model)
        self._block = BLOCK_BYTES[device]
        self._live: dict[int, Piece] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._freed: list[Piece] = []
        self._phase: Phase = "forward"

    def hold(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Says what the storages of these tensors are for, known already or not; what is no tensor is left out."""
        for tensor in tensors_in(tensors):
            piece = self._piece(tensor)
            if piece.kind is None:
                piece.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # only asks for a property
            return func(*args, **kwargs)
        phase, module = self._where()
        if phase != self._phase and phase == "backward":
            forget_casts()
        out = without_values(func, args, kwargs)
        self._phase = phase
        if self.recording:
            self._record(func, args, kwargs, out, module)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, module: str) -> None:
        phase = self._phase
        made = []
        for tensor in tensors_in((out,)):
            if tensor.untyped_storage()._cdata not in self._live:
                made.append(self._piece(tensor, phase, module))
        if made and self.micro < 0:  # the engine's copies of buffers, before the first forward pass
            self.hold("buffers", (out,))
        if made or func._schema.is_mutable:
            self.work.add(phase, module, func, args, kwargs, out)
        op = func._schema.name.split("::")[-1]
        scratch = self._hidden(func, args, out, made, op)
        if made or self._freed:
            self._add_event(module, op, made + scratch)
            self._freed += scratch

    def _hidden(self, func: Any, args: tuple[Any, ...], out: Any, made: list[Piece], op: str) -> list[Piece]:
        """What lives only inside the call, as a piece; a workspace that it leaves is added to its last output."""
        extra = hidden(self.device, func, args, out) if made else None
        if extra is None:
            return []
        module = made[0].module
        made[-1].size += extra.workspace
        if extra.why:
            self._note_unseen(Unseen(op, module, extra.why, extra.bound))
        phase = made[0].born
        return [Piece(extra.scratch, "temporaries", phase, module, phase)] if extra.scratch else []

    def _note_unseen(self, found: Unseen) -> None:
        """One row for an operator: the largest bound, and no module where there are several."""
        before = self.unseen.get(found.op, found)
        unknown = before.bound_bytes is None or found.bound_bytes is None
        bound = None if unknown else max(before.bound_bytes or 0, found.bound_bytes or 0)
        module = found.module if found.module == before.module else ""
        self.unseen[found.op] = Unseen(found.op, module, found.why, bound)

    def _add_event(self, module: str, op: str, made: list[Piece]) -> None:
        freed, self._freed = self._freed, []
        self.events.append(MemoryEvent(self._phase, self.micro, module, op, freed, made))

    def _where(self) -> tuple[Phase, str]:
        if self.updating:
            return "update", ""
        if not in_backward():
            return "forward", self.paths.stack[-1]
        if torch.is_grad_enabled():
            return "recompute", self.paths.stack[-1]
        return "backward", self.paths.backward()

    def _piece(self, tensor: Tensor, phase: Phase = "forward", module: str = "") -> Piece:
        storage = tensor.untyped_storage()
        key = storage._cdata
        piece = self._live.get(key)
        if piece is None:
            size = -(-storage.nbytes() // self._block) * self._block
            piece = self._live[key] = Piece(size, None, phase, module)
            self._refs[key] = weakref.ref(storage, partial(self._free, key))
        return piece

    def _free(self, key: int, _: object) -> None:
        del self._refs[key]
        piece = self._live.pop(key)
        piece.died = self._phase
        self._freed.append(piece)

    def forward(self) -> None:
        """The next micro-batch begins."""
        self.micro += 1

    def update(self) -> None:
        """The last backward pass is over."""
        self.updating, self._phase = True, "update"

    def record(self) -> None:
        """From here on operators are written down."""
        self.before, self._freed, self.recording = list(self._live.values()), [], True

    def end(self) -> None:
        """What is held after the last operator is the last event."""
        if self.recording:
            self.recording = False
            self._add_event("", "", [])

    def as_if_before(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """What the step made for good, such as the optimizer's state: in the steady state it is there already."""
        self.hold(kind, tensors)
        early = {id(piece): piece for piece in self._live.values() if piece.kind == kind}
        for event in self.events:
            made_early = [piece for piece in event.made if id(piece) in early]
            if made_early:
                event.made = [piece for piece in event.made if id(piece) not in early]
                self.before += made_early
