"""Memory that a run does not release: graphs, outputs, copies of the model, pages of the data in the workers."""

from __future__ import annotations

import gc
import multiprocessing
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from trainwright.doctor.facts.resources import Counted, GraphSize, MemoryFacts
from trainwright.recorder.plain_tensors import num_bytes
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Kwargs, Loader
from trainwright.runlog.json_values import Facts, strict

REMEMBERED = 64
YOUNG = 3  # steps for which a loop may well keep its last losses
MOST_NODES = 20_000
SCAN_EVERY = 8
SCAN_SHARE = 0.01
FREE_SCANS_UNTIL = 64  # where everything is examined


class _Mark:
    """Is put into the metadata of a node of a graph and so lives as long as the node."""


class Memory(Probe):
    """Keeps nothing alive: weak references show what the loop still holds."""

    name = MemoryFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._losses: deque[tuple[int, weakref.ref[Tensor], weakref.ref[_Mark]]] = deque(maxlen=REMEMBERED)
        self._outputs: deque[tuple[int, weakref.ref[Tensor]]] = deque(maxlen=REMEMBERED)
        self._steps = 0
        self._rests = False  # a leak shows in every fourth step as well
        self._graphs: list[GraphSize] = []
        self._counted_at = 0
        self._newest = self._newest_before = -1  # numbers of the last nodes of this step, and of the one before
        self._copies: list[Counted] = []
        self._with_graph: list[Counted] = []
        self._next_scan, self._next_scan_s = SCAN_EVERY, 0.0
        self._loader: Loader | None = None
        self._iterator: Callable[[], object] = lambda: None
        self._private: list[float] = []
        self._held: tuple[int, int] | None = None
        self._free_until = 0

    def begin(self, site: WatchSite) -> None:
        self._free_until = FREE_SCANS_UNTIL if site.examines_all else 0

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        """The workers do not exist yet; ``values`` reads them from the iterator."""
        if getattr(loader, "num_workers", 0) and _is_forked(loader):
            self._loader, self._iterator, self._private = loader, weakref.ref(iterator), []

    def on_output(self, root: nn.Module, output: object) -> None:
        if not self._rests:
            for tensor in tensors_of(output)[:4]:
                if tensor.grad_fn is not None and tensor.numel() > 1:
                    self._outputs.append((self._steps, weakref.ref(tensor)))

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        node = losses[0].grad_fn
        if node is None:
            return
        self._newest = node._sequence_nr()
        if self._rests:
            return
        mark, metadata = _Mark(), cast("dict[str, object]", node.metadata)
        metadata["trainwright"] = mark
        self._losses.append((self._steps, weakref.ref(losses[0]), weakref.ref(mark)))
        if self._steps >= self._counted_at and len(self._graphs) < 32:
            self._counted_at = max(self._steps + 1, self._steps * 5 // 4)
            count, oldest = _count(node)
            goes_back = oldest <= self._newest_before
            self._graphs.append(GraphSize(self._steps + 1, count, bool(options.get("retain_graph")), goes_back))

    def on_closed(self, step: RecordedStep) -> None:
        self._steps, self._newest_before = step.step, self._newest
        self._rests = step.step > REMEMBERED and step.step % 4 > 0

    def values(self) -> Facts | None:
        self._scan()
        self._weigh_workers()
        old = [each for each in self._losses if each[0] < self._steps - YOUNG]
        outputs = [tensor() for step, tensor in self._outputs if step < self._steps - YOUNG]
        with_graph = [each for each in outputs if each is not None and each.grad_fn is not None]
        objects, object_bytes = self._held or (0, 0)
        facts = MemoryFacts(
            old_losses=len(old),
            graphs_alive=sum(mark() is not None for _, _, mark in old),
            losses_alive=sum(loss() is not None for _, loss, _ in old),
            old_outputs=len(outputs),
            outputs_alive=len(with_graph),
            output_bytes=sum(map(num_bytes, with_graph)),
            graphs=tuple(self._graphs),
            with_graph=tuple(self._with_graph),
            copies=tuple(self._copies),
            model_bytes=sum(p.nbytes for p in self._roots[0].parameters()),
            private_bytes=tuple(self._private),
            objects=objects,
            object_bytes=object_bytes,
        )
        return dict(strict(vars(facts)))

    def _scan(self) -> None:
        """Counts tensors with a graph, and other modules of the roots' classes and shapes.

        All but the first scan take at most SCAN_SHARE of the time. An object refers to its class, so the referrers of
        the classes hold all modules and tensors: in half the time that a list of all objects takes.
        """
        begin_s = time.perf_counter()
        if self._steps < self._next_scan or begin_s < self._next_scan_s:
            return
        kinds = {type(root): _shapes(root) for root in self._roots}
        own = {id(root) for root in self._roots}
        found = gc.get_referrers(*kinds, Tensor)
        with_graph = sum(type(each) is Tensor and each.grad_fn is not None for each in found)
        self._with_graph.append(Counted(self._steps, with_graph))
        whole = [each for each in found if type(each) in kinds and id(each) not in own]
        del found
        alike = [each for each in whole if "_parameters" in vars(each)]  # else it is being made
        copies = sum(_shapes(each) == kinds[type(each)] for each in alike)
        self._copies.append(Counted(self._steps, copies))
        del self._copies[:-32], self._with_graph[:-32]
        now_s, self._next_scan = time.perf_counter(), self._steps + SCAN_EVERY
        self._next_scan_s = now_s + (now_s - begin_s) / SCAN_SHARE if self._steps > self._free_until else 0.0

    def _weigh_workers(self) -> None:
        workers = getattr(self._iterator(), "_workers", None) or ()
        private = [_private_bytes(worker.pid) for worker in workers]
        if private and all(private):
            self._private = [*self._private[:1], sum(private) / len(private)]
            if self._held is None:
                self._held = _python_objects(getattr(self._loader, "dataset", None))


def _count(node: Node) -> tuple[int, int]:
    """The nodes of the graph behind this one, up to MOST_NODES: how many, and the lowest number in order of making."""
    seen, todo = {node}, [node]
    while todo and len(seen) < MOST_NODES:
        for other, _ in todo.pop().next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
    return len(seen), min(each._sequence_nr() for each in seen)


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [p.shape for p in module.parameters()]


def _is_forked(loader: Loader) -> bool:
    context = getattr(loader, "multiprocessing_context", None)
    return bool((context or multiprocessing.get_context()).get_start_method() == "fork")


def _private_bytes(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0.0


def _python_objects(dataset: object, depth: int = 4) -> tuple[int, int]:
    """How many Python objects the lists and dicts of a dataset hold, by a sample of each, and their bytes."""
    objects = held = 0
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, list | tuple | dict):
            one, size = _weight(value, 3)
            objects, held = objects + one, held + size
            inner = tuple(value) if isinstance(value, list) and len(value) < 64 else ()
        else:
            inner = (value,)
        for each in inner if depth else ():
            if hasattr(each, "__getitem__") and hasattr(each, "__dict__"):
                one, size = _python_objects(each, depth - 1)
                objects, held = objects + one, held + size
    return objects, held


def _weight(value: object, depth: int) -> tuple[int, int]:
    """The number of objects that a value holds and their bytes; of many items, a sample is measured."""
    if not isinstance(value, list | tuple | dict) or not value or not depth:
        return 1, value.__sizeof__() if isinstance(value, str | bytes | int | float | list | tuple | dict) else 64
    items = list(value.values()) if isinstance(value, dict) else value
    sample = [_weight(items[n], depth - 1) for n in range(0, len(items), max(1, len(items) // 32))]
    share = len(items) / len(sample)
    return 1 + int(share * sum(n for n, _ in sample)), value.__sizeof__() + int(share * sum(size for _, size in sample))
