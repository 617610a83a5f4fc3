"""What one rank sees of a step in a loop that somebody else owns: calls, exchanges, gradients, random numbers."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.measure.ranks.exchange import Exchange
from trainwright.doctor.measure.ranks.reduction import SumWatch
from trainwright.doctor.measure.ranks.replica import KnownSums, Replica, is_due
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import tensors_of
from trainwright.recorder.ranks import num_collectives, own_part
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.state.checksums import Checksums, no_checksums, start_checksums


@dataclass(slots=True)
class StepSoFar:
    """What was seen of the step in progress. ``collectives`` had been begun before it; ``joint_s`` was waited."""

    calls: int = 0
    wrapped: int = 0
    synced: int = 0
    last_synced: bool = False
    micro_batches: int = 0
    collectives: int = 0
    joint_s: float = 0.0
    backward_at_s: float = 0.0
    rng: int | None = None
    first_rng: int | None = None
    draws: bool = False
    inputs: Checksums = no_checksums
    buffers: KnownSums = no_checksums
    reduced: Checksums = no_checksums
    norm: Tensor | None = None
    factor: float | None = None
    gradients: list[Checksums] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class StepListener(Probe):
    """Collects what a rank tells of the step in progress."""

    name = RanksFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._parameters, self._optimizers = watched.subject.parameters, watched.subject.optimizers
        self._replica = Replica(watched.subject)
        self._exchange: Exchange | None = None
        self._steps = 0
        self._step = StepSoFar()
        self._sums = SumWatch(self._parameters)

    def _at(self, phase: str) -> None:
        if self._exchange is not None:
            self._exchange.at(self._steps, phase)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._at("forward" if torch.is_grad_enabled() else "evaluation")
        if not torch.is_grad_enabled():
            return
        step = self._step
        step.calls += 1
        if step.calls == 1:
            step.collectives = num_collectives()
        if is_due(self._steps + 1):
            step.rng = _generators(self._parameters)
            if step.calls == 1:
                step.first_rng, step.inputs = step.rng, start_checksums(tensors_of((args, kwargs), 3))
                step.buffers = self._replica.shared_buffers()

    def on_output(self, root: nn.Module, output: object) -> None:
        self._at("between")
        step = self._step
        if step.rng is not None and torch.is_grad_enabled() and not step.draws:
            step.draws = _generators(self._parameters) != step.rng

    def on_wrapped_call(self, wrapper: nn.Module, is_synced: bool) -> None:
        if torch.is_grad_enabled():
            step = self._step
            step.wrapped, step.synced, step.last_synced = step.wrapped + 1, step.synced + is_synced, is_synced

    def on_waited(self, seconds: float) -> None:
        self._step.joint_s += seconds
        if is_due(self._steps + 1) and self._step.calls <= 1 and torch.is_grad_enabled():
            self._step.buffers = self._replica.shared_buffers()  # DistributedDataParallel has just made them alike

    def on_reduce(self, tensor: Tensor, operation: object) -> None:
        self._at("exchange")
        if is_due(self._steps + 1):
            self._sums.before(tensor, operation)

    def on_reduced(self, tensor: Tensor, seconds: float) -> None:
        self._at("between")
        self._step.joint_s += seconds
        if is_due(self._steps + 1):
            self._sums.after(tensor)

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._at("backward")
        self._step.micro_batches += 1
        self._step.backward_at_s = time.perf_counter()

    def on_gradients(self) -> None:
        self._step.joint_s += time.perf_counter() - self._step.backward_at_s
        self._at("between")
        if is_due(self._steps + 1):
            self._sums.made()
            self._step.reduced = no_checksums if self._replica.is_split else self._sums.as_made
            self._step.norm = self._norm()

    def _norm(self) -> Tensor | None:
        """Of the gradients of this rank's part, where each rank has a part of them."""
        grads = [own_part(p.grad) for p in self._parameters if p.grad is not None] if self._replica.is_split else []
        return nn.utils.get_total_norm(grads) if grads else None

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._sums.used()

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        self._sums.used()

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if optimizer not in self._optimizers:
            return  # one within another, which updates a part (ZeRO)
        self._at("update")
        self._replica.before_update()
        if is_due(self._steps + 1) and (before := self._step.norm) is not None and (now := self._norm()) is not None:
            self._step.factor = float(now / before) if float(before) > 0 else None
        if is_due(self._steps + 1) and not self._replica.is_split:
            self._sums.used()
            self._step.gradients.append(self._replica.gradients(optimizer))
            owned = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            named = zip(self._replica.names, self._parameters)
            self._step.missing += [name for name, p in named if id(p) in owned and p.grad is None]


def _generators(parameters: Sequence[Tensor]) -> int:
    """A checksum of the state of torch's generators, of the CPU and of the device of the parameters."""
    states = [torch.default_generator.get_state()]
    if parameters and parameters[0].is_cuda:
        states.append(torch.cuda.get_rng_state(parameters[0].device))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))
