"""Predicts the memory of a replay before it begins, so that an examination leaves enough memory for training."""

from __future__ import annotations

import math
import traceback

import torch
from torch import Tensor

from trainwright.distributed.memory import free_bytes, give_back
from trainwright.engine.recover import is_out_of_memory
from trainwright.recorder.plain_tensors import is_dense, num_bytes
from trainwright.recorder.program import RecordedStep, constants_of
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession

NOT_ENOUGH_MEMORY = "not examined, because there is not enough memory"
MAX_STEP_MEMORY_RATIO = 2.0
"""Maximum memory of an experiment / memory of the step: weights, gradients and activations."""
SMALL_BYTES = 256 * 2**20
"""An experiment may always use this much memory if it is free."""
AMPLE_MEMORY_RATIO = 8
"""Free memory is not read again if the last reading was at least this multiple of the required memory."""
PEAK_TENSORS = 3
"""Memory at the peak besides the saved tensors, as a multiple of the largest saved tensor."""
WEIGHT_COPIES = 3
"""A replay needs copies of the weights, gradients besides those of the loop, and copies of these gradients."""


class ReplayMemory:
    """Predicts the memory of replays. A measured step predicts all steps with inputs of the same size."""

    def __init__(self) -> None:
        self._bytes_by_size: dict[int, int] = {}
        self._free, self._free_step = 0, 0  # free bytes and the step at which they were read, which takes 1 ms

    @property
    def is_measured(self) -> bool:
        """True if a step was measured. The measurement costs one forward pass."""
        return bool(self._bytes_by_size)

    def require(self, session: ReplaySession, times: float, *, is_capped: bool = True) -> None:
        """Raises NotReplayable if less than ``times`` the memory of the step is available.

        ``is_capped``: also if ``times`` exceeds MAX_STEP_MEMORY_RATIO and the required memory exceeds SMALL_BYTES.
        """
        weights = WEIGHT_COPIES * sum([p.nbytes for p in session.replayer.subject.parameters])
        batch = self._batch_bytes(session)
        if self._free_step != session.step and times * (batch + weights) > self._free / AMPLE_MEMORY_RATIO:
            self._free_step, self._free = session.step, free_bytes(session.replayer.device)
        cap = max(SMALL_BYTES, MAX_STEP_MEMORY_RATIO * (batch + weights)) if is_capped else math.inf
        if times * (batch + weights) > min(self._free, cap):
            required = _mib(times * (batch + weights))
            limit = f"{_mib(self._free)} are free" if self._free <= cap else f"its limit is {_mib(cap)}"
            raise NotReplayable(f"{NOT_ENOUGH_MEMORY}: it needs about {required}, but {limit}")

    def _batch_bytes(self, session: ReplaySession) -> int:
        """Returns the memory of the step without the weights, in bytes."""
        size = _input_bytes(session.recorded_step)
        if size not in self._bytes_by_size:
            self._bytes_by_size[size] = _measure_batch_bytes(session)
        return self._bytes_by_size[size]


def free_what_it_holds(error: Exception, device: torch.device) -> bool:
    """Frees the tensors in the frames of ``error``. Returns True for an out-of-memory error."""
    traceback.clear_frames(error.__traceback__)
    has_run_out = is_out_of_memory(error)
    if has_run_out:
        give_back(device)
    return has_run_out


def _measure_batch_bytes(session: ReplaySession) -> int:
    """Returns the bytes that a forward pass saves for the backward pass, and an estimate of the rest at the peak."""
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


def _input_bytes(recorded: RecordedStep) -> int:
    return sum(num_bytes(c.tensor) for call in recorded.calls for c in constants_of((call.args, call.kwargs)))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
