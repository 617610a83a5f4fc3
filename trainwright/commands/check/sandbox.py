"""Trains in a check: a job with a new state for each experiment, which is discarded afterwards."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import StepBatch, tensors_in
from trainwright.checkpoint.rng import preserved_rng, seed_all
from trainwright.distributed.threads import undisturbed_s
from trainwright.training.custom_objects import Live, build_live
from trainwright.training.job import Job

T = TypeVar("T")
MAX_BATCHES_KEPT = 4
MAX_BATCH_BYTES_KEPT = 2**28


@contextmanager
def untouched(*roots: object) -> Iterator[None]:
    """Restore weights, buffers, train and eval modes and random state on exit, and drop gradients."""
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    modes = [(module, module.training) for module in modules]
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)) if _has_storage(t)]
    before = [(tensor, tensor.detach().clone()) for tensor in {id(t): t for t in tensors}.values()]
    places = [(m, name, b) for m in modules for name, b in m.named_buffers(recurse=False)]
    with preserved_rng():
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for module, name, buffer in places:  # a forward pass may assign another tensor
                    setattr(module, name, buffer)
                for tensor, was in before:
                    tensor.copy_(was)
                    tensor.grad = None


def _has_storage(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.device.type != "meta"


@dataclass
class Sandbox:
    """A planned job and its first batches. ``load_s`` has the undisturbed seconds for reading each."""

    job: Job
    kept: list[StepBatch] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def keep(self, seconds: float) -> None:
        """Read a few of the first batches, for at most ``seconds``."""
        end_s, size = time.perf_counter() + seconds, 0
        while len(self.kept) < MAX_BATCHES_KEPT and size < MAX_BATCH_BYTES_KEPT and time.perf_counter() < end_s:
            begin_s = undisturbed_s()
            batch = next(self.job.batches, None)
            if batch is None:
                return
            self.load_s.append(undisturbed_s() - begin_s)
            self.kept.append(batch)
            size += sum(tensor.nbytes for micro in batch.micro for tensor in tensors_in(micro.data))

    def stream(self) -> Iterator[StepBatch]:
        """Yield all batches in the order of a run. May be called once."""
        return chain(self.kept, self.job.batches)

    @contextmanager
    def built(self) -> Iterator[Live]:
        """Provide the state before the first step, and its schedule. Model and random state are restored on exit."""
        job = self.job
        with untouched(job.parts.model, job.parts.loss):
            live = build_live(_with_new_optimizer(job.parts), job.loaded, job.plan)
            seed_all(job.recipe.seed)
            live.state.loss, live.state.scaler = job.state.loss, job.precision.scaler(job.device)
            yield live


def _with_new_optimizer(parts: Parts) -> Parts:
    """Return the same model with copies of the user's optimizer and schedule objects, so the originals never train."""
    kept = {id(parameter): parameter for parameter in parts.model.parameters()}
    optimizer, schedule = copy.deepcopy((parts.custom.optimizer, parts.custom.schedule), kept)
    custom = replace(parts.custom, optimizer=optimizer, schedule=schedule, observers=())
    return replace(parts, custom=custom)


def within(batches: Iterator[T], seconds: float) -> Iterator[T]:
    """Yield batches until the time is over, at least one."""
    end_s = time.perf_counter() + seconds
    for batch in batches:
        yield batch
        if time.perf_counter() > end_s:
            return
