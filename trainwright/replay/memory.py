"""The memory that a replay takes, predicted before it begins: an examination takes nothing that training needs."""

from __future__ import annotations

import math
import traceback

import torch
from torch import Tensor

from trainwright.distributed.memory import free_bytes, give_back
from trainwright.engine.oom_report import is_out_of_memory
from trainwright.recorder.plain_tensors import is_dense, num_bytes
from trainwright.recorder.program import RecordedStep, constants_of
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession

NO_ROOM = "not looked at, for want of memory"
MAX_TIMES_OF_STEP = 2.0
"""The most that an experiment may take, in relation to the step itself: weights, gradients and activations."""
SMALL_BYTES = 256 * 2**20
"""An experiment may always take this much, where it is free."""
AMPLE = 8
"""So many times what is needed were free at an earlier look: it is not asked again."""
FEWEST = 2
"""Samples: BatchNorm takes no single one."""
WIDEST = 3
"""Of the largest tensor: what lies beside the saved tensors at the peak, its input and the gradients of both."""
OF_WEIGHTS = 3
"""A replay works on a copy of the weights, makes gradients beside those of the loop, and its result copies them."""


class ReplayMemory:
    """How much memory the replays of a step take. What is measured holds for all steps with inputs of that size."""

    def __init__(self) -> None:
        self._of_size: dict[int, int] = {}
        self._free, self._asked_at = 0, 0  # bytes, at the look at which step: to ask takes a millisecond

    @property
    def is_measured(self) -> bool:
        """Whether a step was measured: the first experiment that replays one takes a forward pass more."""
        return bool(self._of_size)

    def rows_for(
        self, session: ReplaySession, times: float, *, can_be_fewer: bool, is_capped: bool = True
    ) -> range | None:
        """The samples of each micro-batch for which ``times`` what the step takes is there; None: all of them.

        ``is_capped``: an experiment takes at most MAX_TIMES_OF_STEP of what the step takes, and not all that is free.

        Raises NotReplayable where all are needed, or even two do not fit.
        """
        size, weights = session.size or 0, OF_WEIGHTS * sum([p.nbytes for p in session.replayer.subject.parameters])
        batch = self._of_batch(session)
        if self._asked_at != session.step and times * (batch + weights) > self._free / AMPLE:
            self._asked_at, self._free = session.step, free_bytes(session.replayer.device)
        cap = max(SMALL_BYTES, MAX_TIMES_OF_STEP * (batch + weights)) if is_capped else math.inf
        room = min(self._free, cap) / times
        if batch + weights <= room:
            return None
        fitting = int(size * (room - weights) / batch) if can_be_fewer and batch else 0
        if fitting < FEWEST:
            wanted = _mib(times * (batch + weights))
            limit = f"{_mib(self._free)} are free" if self._free <= cap else f"it may take {_mib(cap)}"
            raise NotReplayable(f"{NO_ROOM}: it takes about {wanted}, and {limit}")
        return range(fitting)

    def _of_batch(self, session: ReplaySession) -> int:
        """What the step takes beside the weights."""
        size = _size_of(session.recorded_step)
        if size not in self._of_size:
            self._of_size[size] = _measured(session)
        return self._of_size[size]


def free_what_it_holds(error: Exception, device: torch.device) -> bool:
    """Frees the tensors in the frames that ``error`` came through. Returns whether memory had run out."""
    traceback.clear_frames(error.__traceback__)
    has_run_out = is_out_of_memory(error)
    if has_run_out:
        give_back(device)
    return has_run_out


def _measured(session: ReplaySession) -> int:
    """The bytes that a forward pass saves for the backward pass, and what lies beside them at the peak."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if is_dense(tensor):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        else:
            seen[id(tensor)] = num_bytes(tensor)
        return tensor.detach()  # the tensor itself, where an operation saves its result, would be a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        session.run(upto="forward")
    return sum(seen.values()) + WIDEST * max(seen.values(), default=0)


def _size_of(recorded: RecordedStep) -> int:
    return sum(num_bytes(c.tensor) for call in recorded.calls for c in constants_of((call.args, call.kwargs)))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
