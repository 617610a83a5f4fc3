"""Predicts the memory of a replay before it begins, so that an examination leaves enough for training."""

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

NOT_ENOUGH_MEMORY = "not examined, because there is not enough memory"
MAX_STEP_MEMORY_RATIO = 2.0
"""Maximum memory of an experiment / memory of the step: weights, gradients and activations."""
SMALL_BYTES = 256 * 2**20
"""An experiment may always use this much if it is free."""
AMPLE_MEMORY_RATIO = 8
"""Free memory is not read again if an earlier reading showed this multiple of the need."""
PEAK_TENSORS = 3
"""Memory besides the saved tensors at the peak, in largest tensors: its input and the gradients of both."""
WEIGHT_COPIES = 3
"""A replay copies the weights, makes gradients besides those of the loop, and its result copies the gradients."""


class ReplayMemory:
    """Memory of the replays of a step. A measurement holds for all steps with inputs of that size."""

    def __init__(self) -> None:
        self._of_size: dict[int, int] = {}
        self._free, self._asked_at = 0, 0  # free bytes, and the step of the reading, which takes a millisecond

    @property
    def is_measured(self) -> bool:
        """True if a step was measured. The first replaying experiment takes an additional forward pass."""
        return bool(self._of_size)

    def require(self, session: ReplaySession, times: float, *, is_capped: bool = True) -> None:
        """Raises NotReplayable if less than ``times`` the step's memory is available.

        ``is_capped``: an experiment takes at most MAX_STEP_MEMORY_RATIO of the step's memory, and not all that is free.
        """
        weights = WEIGHT_COPIES * sum([p.nbytes for p in session.replayer.subject.parameters])
        batch = self._of_batch(session)
        if self._asked_at != session.step and times * (batch + weights) > self._free / AMPLE_MEMORY_RATIO:
            self._asked_at, self._free = session.step, free_bytes(session.replayer.device)
        cap = max(SMALL_BYTES, MAX_STEP_MEMORY_RATIO * (batch + weights)) if is_capped else math.inf
        if times * (batch + weights) > min(self._free, cap):
            wanted = _mib(times * (batch + weights))
            limit = f"{_mib(self._free)} are free" if self._free <= cap else f"it may take {_mib(cap)}"
            raise NotReplayable(f"{NOT_ENOUGH_MEMORY}: it takes about {wanted}, and {limit}")

    def _of_batch(self, session: ReplaySession) -> int:
        """Returns the memory of the step without the weights, in bytes."""
        size = _size_of(session.recorded_step)
        if size not in self._of_size:
            self._of_size[size] = _measured(session)
        return self._of_size[size]


def free_what_it_holds(error: Exception, device: torch.device) -> bool:
    """Frees the tensors in the frames of ``error``. Returns True if memory had run out."""
    traceback.clear_frames(error.__traceback__)
    has_run_out = is_out_of_memory(error)
    if has_run_out:
        give_back(device)
    return has_run_out


def _measured(session: ReplaySession) -> int:
    """Returns the bytes that a forward pass saves for the backward pass, and those besides them at the peak."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if is_dense(tensor):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        else:
            seen[id(tensor)] = num_bytes(tensor)
        return tensor.detach()  # an op that saves its own result would form a reference cycle with the tensor itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        session.run(upto="forward")
    return sum(seen.values()) + PEAK_TENSORS * max(seen.values(), default=0)


def _size_of(recorded: RecordedStep) -> int:
    return sum(num_bytes(c.tensor) for call in recorded.calls for c in constants_of((call.args, call.kwargs)))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
