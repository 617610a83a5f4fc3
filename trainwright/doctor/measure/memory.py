"""Measures memory and hooks that a run does not release: graphs, outputs, unshared pages of the workers."""

from __future__ import annotations

import multiprocessing
import weakref
from collections import deque
from collections.abc import Callable, Sized
from typing import cast

import psutil
import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules
from trainwright.distributed.memory import unfreed_bytes
from trainwright.doctor.facts.resources import GraphSize, GrowthFacts, HeldResources, MemoryFacts
from trainwright.recorder.graph import graph_behind
from trainwright.recorder.plain_tensors import num_bytes
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Kwargs, Loader

MIN_INTERVAL_STEPS = 16
"""Minimum number of steps between two readings. It doubles when there are more than MAX_READINGS."""
MAX_READINGS = 64
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


class Growth(Probe):
    """Records the resources of the process. A reading costs up to 0.5 ms, and 2 us for each module."""

    name = GrowthFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._modules = dict(named_modules(watched.subject.roots))
        self._parameters = watched.subject.parameters
        self._held: list[HeldResources] = []
        self._every = MIN_INTERVAL_STEPS

    def on_closed(self, step: RecordedStep) -> None:
        if step.step % self._every:
            return
        self._held.append(
            HeldResources(
                step=step.step,
                memory_bytes=unfreed_bytes(),
                device_bytes=sum(torch.cuda.memory_allocated(p.device) for p in self._parameters[:1] if p.is_cuda),
                hooks=sum(map(_hooks_of, self._modules.values())) + sum(map(_hooks_of, self._parameters)),
            )
        )
        if len(self._held) > MAX_READINGS:
            self._held, self._every = self._held[1::2], 2 * self._every

    def facts(self) -> GrowthFacts | None:
        if not self._held:
            return None
        most = max(self._modules, key=lambda name: _hooks_of(self._modules[name]), default="")
        return GrowthFacts(held=tuple(self._held), most_hooks=most)


def _hooks_of(owner: nn.Module | Tensor) -> int:
    """Returns the number of hooks on a module or a parameter, without those of a recorder."""
    tables = [getattr(owner, name, None) for name in _HOOKS]
    return sum(not getattr(hook, "is_recorders", False) for table in tables if table for hook in table.values())


MAX_TRACKED = 64  # last losses, and last outputs, that are tracked
RECENT_STEPS = 3  # recent steps whose losses a loop may hold


class _Mark:
    """A marker in the metadata of an autograd node. It lives as long as the node."""


class Memory(Probe):
    """Tracks with weak references which graphs and outputs the loop still holds."""

    name = MemoryFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._losses: deque[tuple[int, weakref.ref[Tensor], weakref.ref[_Mark]]] = deque(maxlen=MAX_TRACKED)
        self._outputs: deque[tuple[int, weakref.ref[Tensor]]] = deque(maxlen=MAX_TRACKED)
        self._steps = 0
        self._graphs: list[GraphSize] = []
        self._counted_at = 0
        self._newest = self._newest_before = -1  # last sequence numbers of this step and of the previous one
        self._loader: Loader | None = None
        self._iterator: Callable[[], object] = lambda: None
        self._private: list[float] = []

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        """Keeps the iterator. Its workers do not exist yet: ``facts`` reads them later."""
        context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
        if getattr(loader, "num_workers", 0) and context.get_start_method() == "fork":
            self._loader, self._iterator, self._private = loader, weakref.ref(iterator), []

    def on_output(self, root: nn.Module, output: object) -> None:
        for tensor in tensors_of(output)[:4]:
            if tensor.grad_fn is not None and tensor.numel() > 1:
                self._outputs.append((self._steps, weakref.ref(tensor)))

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        node = losses[0].grad_fn
        if node is None:
            return
        self._newest = node._sequence_nr()
        mark, metadata = _Mark(), cast("dict[str, object]", node.metadata)
        metadata["trainwright"] = mark
        self._losses.append((self._steps, weakref.ref(losses[0]), weakref.ref(mark)))
        if self._steps >= self._counted_at and len(self._graphs) < 32:
            self._counted_at = max(self._steps + 1, self._steps * 5 // 4)
            nodes = graph_behind([node])
            goes_back = min(each._sequence_nr() for each in nodes) <= self._newest_before
            self._graphs.append(GraphSize(self._steps + 1, len(nodes), bool(options.get("retain_graph")), goes_back))

    def on_closed(self, step: RecordedStep) -> None:
        self._steps, self._newest_before = step.step, self._newest

    def facts(self) -> MemoryFacts:
        workers = getattr(self._iterator(), "_workers", None) or ()
        private = [_private_bytes(worker.pid) for worker in workers]
        if private and all(private):
            self._private = [*self._private[:1], sum(private) / len(private)]
        old = [each for each in self._losses if each[0] < self._steps - RECENT_STEPS]
        outputs = [tensor() for step, tensor in self._outputs if step < self._steps - RECENT_STEPS]
        with_graph = [each for each in outputs if each is not None and each.grad_fn is not None]
        return MemoryFacts(
            old_losses=len(old),
            graphs_alive=sum(mark() is not None for _, _, mark in old),
            losses_alive=sum(loss() is not None for _, loss, _ in old),
            old_outputs=len(outputs),
            outputs_alive=len(with_graph),
            output_bytes=sum(map(num_bytes, with_graph)),
            graphs=tuple(self._graphs),
            private_bytes=tuple(self._private),
            objects=_python_objects(getattr(self._loader, "dataset", None)) if self._private else 0,
        )


def _private_bytes(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0.0


def _python_objects(dataset: object, depth: int = 4) -> int:
    """Returns the number of items in lists and dicts of a dataset, and of the datasets that it wraps."""
    values = getattr(dataset, "__dict__", {}).values() if depth else ()
    held = sum(_items(value) for value in values if isinstance(value, list | tuple | dict))
    inner = [each for value in values for each in (value if isinstance(value, list) and len(value) < 64 else [value])]
    return held + sum(_python_objects(each, depth - 1) for each in inner if hasattr(each, "__getitem__"))


def _items(value: list[object] | tuple[object, ...] | dict[object, object]) -> int:
    """Returns the number of items, including nested ones estimated from the first item."""
    first = next(iter(value.values() if isinstance(value, dict) else value), None)
    inner = len(first) if isinstance(first, list | tuple | dict) and isinstance(first, Sized) else 0
    return len(value) * (1 + inner)
