"""Captures the kernels of a step in a CUDA graph and replays it, so that the host launches one graph per step.

If launching the kernels of a step takes longer than running them, the step takes as long as the host needs.
``StepGraphs`` captures forward, backward, clipping, guard and update of all micro-batches in one graph. The batch and
the learning rates are copied into static tensors before each replay. CUDA graphs advance the random state of the GPU.
Counting, schedule, ledger and log run on the host, outside of the graph.

A replay does not run Python code. Therefore some replays are compared bit for bit with the eager step, and a step that
the recorder records in full runs eagerly. If a step cannot be captured, all later steps run eagerly, and the reason is
reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.average import NoAverage
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.cursor import MicroBatch, StepBatch, tensors_in
from trainwright.checkpoint.rng import RngBag, TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Accumulated

WARM_UP_STEPS = 3
"""Eager steps with a batch shape before its capture. They choose kernels and create the optimizer state. The last one
runs on a side stream."""
MAX_CAPTURES = 8
"""Maximum number of captures in a run. Each graph holds the activations of a step."""
MAX_SHAPES = 64
"""Maximum number of different batch shapes. If there are more, all further steps run eagerly."""
CHECKED_REPLAYS = frozenset({0, 1, 64})
"""Indices of the replays of a graph that are compared with the eager step. The late one detects a model whose Python
code changes its behavior after some steps."""
LAUNCH_BOUND_FRACTION = 0.9
"""Minimum of (time to launch a step / time to launch and compute it) for a step that is launch-bound."""

T = TypeVar("T")
Replay: TypeAlias = Callable[[], None]


class CudaGraphs:
    """The graphs of ``torch.cuda``. All captures share a memory pool, because they never run at the same time.

    The backend of the tests calls the Python function again instead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a side stream, as CUDA graphs require before a capture."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            done = work()
        current.wait_stream(side)
        return done

    def capture(self, work: Callable[[], T]) -> tuple[T, Replay]:
        """Capture ``work`` without changing any tensor. Return its result, whose tensors each replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            done = work()
        return done, graph.replay

    def launch_fraction(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run ``work``. Return its result and (launch time / full time). Synchronizes with the device."""
        torch.cuda.synchronize(self._device)
        begin_s = time.perf_counter()
        done = work()
        launched_s = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return done, (launched_s - begin_s) / (time.perf_counter() - begin_s)


class StepOutputs(NamedTuple):
    """Results of a step: sums over micro-batches, gradient norm before clipping, and whether the update was skipped."""

    done: Accumulated
    grad_norm: Tensor
    skipped: Tensor


class StepWork(Protocol):
    """The part of a step that runs on the device. It must not synchronize with the host."""

    def gradients(self, state: TrainState, batch: StepBatch) -> tuple[Accumulated, Tensor]:
        """Run forward and backward passes, and clip. Return sums over micro-batches, and the gradient norm."""

    def update(self, state: TrainState, done: Accumulated, grad_norm: Tensor) -> Tensor:
        """Update weights and buffers if the gradients are finite. Return a 0-d bool: True if the update was skipped."""

    def undo(self, state: TrainState, *, has_run: bool) -> None:
        """Clear the gradients, and if ``has_run`` restore the buffers, after ``gradients`` raised an error.

        In a capture no kernel has run, so buffers are unchanged.
        """


class NotCapturable(Exception):
    """This step cannot be captured. The message is the reason."""


@dataclass(eq=False)
class _Graph:
    batch: StepBatch
    outputs: StepOutputs
    replay: Replay
    grads: list[tuple[Tensor, Tensor | None]]
    num_replays: int = 0


@dataclass(eq=False)
class _Group:
    """A parameter group, its learning rate on the device, and the same number as it was written there last."""

    group: dict[str, Any]
    lr: Tensor
    written: float | None = None


@dataclass(eq=False)
class StepGraphs:
    """Captures and replays the steps of a run. Steps that cannot be captured are left to the caller.

    Args:
        backend: Runs, captures and replays the work of a step.
        only_if_launch_bound: Capture only if a measured step is launch-bound (LAUNCH_BOUND_FRACTION).
        runs_eagerly: Returns True if the next step must run its Python code, for example for hooks that measure.
        report: Called once with the reason if graphs are not used, or not used any more.
    """

    backend: CudaGraphs
    only_if_launch_bound: bool = False
    runs_eagerly: Callable[[TrainState], bool] = lambda _state: False
    report: Callable[[str], None] = lambda _reason: None
    num_captures: int = 0
    num_replays: int = 0
    ended: str = ""
    """The reason why graphs are not used any more."""
    _graphs: dict[object, _Graph] = field(default_factory=dict)
    _seen: dict[object, int] = field(default_factory=dict)
    _objects: object = None
    _groups: list[_Group] = field(default_factory=list)
    _attached: _Graph | None = None
    _is_launch_bound: bool = False

    def end(self, reason: str) -> None:
        """Free all graphs. Later steps run eagerly."""
        if not self.ended:
            self.ended = reason
            self._graphs.clear()
            self._attached = None
            self.report(reason)

    def step(self, state: TrainState, batch: StepBatch, work: StepWork) -> StepOutputs | None:
        """Run the step and return its outputs, or return None if the caller must run it eagerly.

        The parameter groups must already have the learning rates of this step.
        """
        if self.ended:
            return None
        outputs = None
        if not self.runs_eagerly(state) and state.micro_limit is None:
            try:
                outputs = self._step(state, batch, work)
            except NotCapturable as reason:
                self.end(str(reason))
        if outputs is None:
            self._attached = None
        return outputs

    def _step(self, state: TrainState, batch: StepBatch, work: StepWork) -> StepOutputs | None:
        key = self._key(state, batch)
        graph = self._graphs.get(key)
        if graph is None:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if len(self._seen) > MAX_SHAPES:
                raise NotCapturable(f"the batches had {len(self._seen)} shapes so far, and each shape needs a graph")
            if seen < WARM_UP_STEPS:
                return None
            if seen == WARM_UP_STEPS:
                return self._warm_up(state, batch, work)
            if self.num_captures == MAX_CAPTURES:
                raise NotCapturable(
                    f"{MAX_CAPTURES} graphs were captured, and the batch shape or an optimizer setting changed again"
                )
            graph = self._graphs[key] = self._capture(state, batch, work)
        self._load(graph, batch)
        is_checked = graph.num_replays in CHECKED_REPLAYS
        graph.num_replays += 1
        self.num_replays += 1
        if is_checked:
            return self._check_replay(graph, state, work)
        self._attach(graph)
        graph.replay()
        return _cloned(graph.outputs)

    def _key(self, state: TrainState, batch: StepBatch) -> object:
        """Return the values that a graph fixes. Drops all graphs if the state has new objects."""
        parts = parts_of(state.optimizer)
        groups = state.optimizer.param_groups
        first: Tensor = groups[0]["params"][0]
        objects = (id(state.model), first.data_ptr(), *((id(part.state), len(part.state)) for part in parts))
        if objects != self._objects:
            _require_capturable(state, parts)
            self._objects, self._attached = objects, None
            self._graphs.clear()
            self._seen.clear()
            self._groups = [_Group(group, torch.zeros((), device=first.device)) for group in groups]
        settings = tuple((name, value) for group in groups for name, value in group.items() if name not in _NOT_FIXED)
        shapes = tuple((micro.size, _shape_of(micro.data)) for micro in batch.micro)
        return settings, shapes, state.model.training

    def _write_lrs(self) -> None:
        for each in self._groups:
            value = each.group["lr"]
            if isinstance(value, Tensor):
                raise NotCapturable("the learning rate of the optimizer is a tensor, which other code may change")
            if value != each.written:
                each.written = value
                each.lr.fill_(value)

    def _load(self, graph: _Graph, batch: StepBatch) -> None:
        """Copy everything that differs between steps into static tensors."""
        self._write_lrs()
        static, live = tensors_in([m.data for m in graph.batch.micro]), tensors_in([m.data for m in batch.micro])
        torch._foreach_copy_(static, live, non_blocking=True)

    def _attach(self, graph: _Graph) -> None:
        """Set ``.grad`` to the tensors that the graph writes, if the previous step did not use this graph."""
        if self._attached is not graph:
            for parameter, grad in graph.grads:
                parameter.grad = grad
            self._attached = graph

    @contextmanager
    def _lrs_on_device(self) -> Iterator[None]:
        """Context in which parameter groups have their learning rates as tensors on the device."""
        before = [(each.group, each.group["lr"], each.group.get("capturable")) for each in self._groups]
        try:
            for each in self._groups:
                each.group["lr"] = each.lr
                if "capturable" in each.group and each.lr.device.type != "cpu":
                    each.group["capturable"] = True
            yield
        finally:
            for group, lr, capturable in before:
                group["lr"] = lr
                if "capturable" in group:
                    group["capturable"] = capturable

    def _eager(self, state: TrainState, batch: StepBatch, work: StepWork) -> StepOutputs:
        """Run the Python code of the step. Raises NotCapturable if the passes fail; the state is unchanged then."""
        draws = RngBag.capture()
        with self._lrs_on_device():
            try:
                done, grad_norm = work.gradients(state, batch)
            except Exception as error:
                work.undo(state, has_run=True)
                draws.restore()
                raise NotCapturable(f"an eager step before the capture raised {_first_line(error)}") from error
            return StepOutputs(done, grad_norm, work.update(state, done, grad_norm))

    def _warm_up(self, state: TrainState, batch: StepBatch, work: StepWork) -> StepOutputs | None:
        self._write_lrs()
        if self.only_if_launch_bound and not self._is_launch_bound:
            outputs, fraction = self.backend.launch_fraction(lambda: self._eager(state, batch, work))
            if fraction < LAUNCH_BOUND_FRACTION:
                self.end(f"the host launches a step in {fraction:.0%} of its time, so a graph would not make it faster")
            else:  # the next step is the warm-up of the capture
                self._is_launch_bound = True
                self._seen = {key: seen - (seen == WARM_UP_STEPS) for key, seen in self._seen.items()}
            return outputs
        return self.backend.warm_up(lambda: self._eager(state, batch, work))

    def _capture(self, state: TrainState, batch: StepBatch, work: StepWork) -> _Graph:
        """Capture the step for batches of this shape. Raises NotCapturable; the state is unchanged then."""
        self.num_captures += 1
        static = StepBatch(tuple(MicroBatch(_cloned(micro.data), micro.ids) for micro in batch.micro))
        draws = _HostDraws.now(state.device)

        def captured() -> StepOutputs:
            done, grad_norm = work.gradients(state, static)
            return StepOutputs(done, grad_norm, work.update(state, done, grad_norm))

        try:
            with self._lrs_on_device():
                outputs, replay = self.backend.capture(captured)
        except Exception as error:
            work.undo(state, has_run=False)
            draws.bag.restore()  # the eager step must draw the same numbers
            raise NotCapturable(f"the capture raised {_first_line(error)}") from error
        if not draws.are_unchanged():
            draws.bag.restore()  # the eager step must draw the same numbers
            raise NotCapturable("the step draws random numbers on the host, which a graph would repeat")
        return _Graph(static, outputs, replay, [(each, each.grad) for each in state.parameters])

    def _check_replay(self, graph: _Graph, state: TrainState, work: StepWork) -> StepOutputs:
        """Replay the step, run it again eagerly, and compare. Keeps the state and the result of the eager step.

        Copies the state to the host three times.
        """
        device, before = state.device, _HostCopy.of(state)
        generators = TorchGenerators.read(device)
        self._attach(graph)
        graph.replay()
        replayed, outputs = _HostCopy.of(state), _cloned(graph.outputs)
        draws = TorchGenerators.read(device)
        before.write_to(state)
        generators.restore(device)
        eager = self._eager(state, graph.batch, work)
        self._attached = None  # the eager step has set .grad
        differing = _HostCopy.of(state).differing(replayed)
        if not same_bits(eager.done.loss.cpu(), outputs.done.loss.cpu()):
            differing.append("the loss")
        if not _are_equal(draws, TorchGenerators.read(device)):
            differing.append("the random state")
        if differing:
            self.end(
                f"replay {graph.num_replays} of the graph differs from the eager step in {len(differing)} values: "
                f"{', '.join(differing[:3])}. The usual causes are nondeterministic kernels, and Python code that "
                "changes from step to step"
            )
        return eager


_NOT_FIXED = ("params", "lr", "initial_lr", "capturable", "param_names")


def _require_capturable(state: TrainState, parts: Sequence[Optimizer]) -> None:
    """Raise NotCapturable if a part of the state must run on the host in each step."""
    if state.scaler.scale is not None:
        raise NotCapturable("the host adapts the loss scale of fp16; use precision: bf16")
    if not isinstance(state.ema, NoAverage):
        raise NotCapturable("the host updates the average of the weights; leave model.ema and model.swa out")
    for part in parts:
        name = type(part).__name__
        if not getattr(part, "_step_supports_amp_scaling", False):
            raise NotCapturable(f"{name} cannot skip an update on the device; use adamw, adam or sgd with fused=True")
        if part.state and not all(
            value.device == parameter.device
            for parameter, values in part.state.items()
            for value in values.values()
            if isinstance(value, Tensor)
        ):
            raise NotCapturable(f"{name} keeps a part of its state on the host; use fused=True")


def _shape_of(data: object) -> object:
    """Return the properties of a batch that a graph fixes: structure, shapes, dtypes, and values of Python numbers."""
    if isinstance(data, Tensor):
        return data.shape, data.dtype, data.device, data.requires_grad
    if isinstance(data, tuple | list):
        return type(data), *map(_shape_of, data)
    if isinstance(data, Mapping):
        return type(data), *((name, _shape_of(each)) for name, each in data.items())
    if data is None or isinstance(data, bool | int | float | str):
        return data
    raise NotCapturable(f"the batch contains a {type(data).__name__}, which cannot be copied into static tensors")


def _cloned(value: T) -> T:
    copied: T = tree_map_only(Tensor, lambda each: each.detach().clone(), value)
    return copied


def _are_equal(one: TorchGenerators, other: TorchGenerators) -> bool:
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@dataclass(frozen=True)
class _HostDraws:
    """States of the generators that a graph does not advance: Python, NumPy, and for a GPU torch on the CPU."""

    bag: RngBag
    device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> _HostDraws:
        return cls(replace(RngBag.capture(), torch_cuda=()), device)

    def are_unchanged(self) -> bool:
        before, now = self.bag, RngBag.capture()
        words, words_now = before.numpy["state"], now.numpy["state"]
        return (
            before.python == now.python
            and words["pos"] == words_now["pos"]
            and np.array_equal(words["key"], words_now["key"])
            and (self.device.type == "cpu" or torch.equal(before.torch_cpu, now.torch_cpu))
        )


@dataclass(frozen=True)
class _HostCopy:
    """Copies in host memory of all tensors of a training state, by name."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: TrainState) -> _HostCopy:
        return cls({name: each.detach().to("cpu", copy=True) for name, each in cls._live(state)})

    @staticmethod
    def _live(state: TrainState) -> Iterator[tuple[str, Tensor]]:
        for module in state.roots:
            yield from chain(module.named_parameters(), module.named_buffers())
        for number, part in enumerate(parts_of(state.optimizer)):
            for place, values in enumerate(part.state.values()):
                tensors = ((key, each) for key, each in values.items() if isinstance(each, Tensor))
                yield from ((f"{key} {number}.{place}", each) for key, each in tensors)

    @torch.no_grad()
    def write_to(self, state: TrainState) -> None:
        for name, live in self._live(state):
            live.copy_(self.tensors[name])

    def differing(self, other: _HostCopy) -> list[str]:
        """Return the names of tensors that differ in any bit."""
        return [name for name, each in self.tensors.items() if not same_bits(each, other.tensors[name])]
