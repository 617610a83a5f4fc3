"""Reports of attempts that ran out of memory: where it happened, and what held the memory."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.shards import local
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.memory import capacity_bytes, held_bytes, reserved_bytes
from trainwright.errors import OomReport, text_of

_OOM_MESSAGES = (
    "can't allocate memory",  # torch's allocator on the CPU: posix_memalign
    "not enough memory: you tried to allocate",  # the same on Windows
    "Cannot allocate memory",  # strerror(ENOMEM), of torch's file mappings
    "std::bad_alloc",
    "could not create a memory object",  # oneDNN
    "out of memory",  # CUDA, HIP, MPS, XPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_AMBIGUOUS_OOM_MESSAGES = ("could not create a primitive", "could not execute a primitive")
"""oneDNN reports these also for shapes that it cannot compute."""
_REQUESTED_SIZE = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}


@dataclass(frozen=True)
class OomSnapshot:
    """Facts recorded at the time of the error, as plain values that keep no tensor alive.

    ``otherwise`` describes an error that is not about memory.
    """

    phase: str = "on another rank"
    module: str = ""
    error: str = "another rank ran out of memory"
    in_use_bytes: int = 0
    reserved_bytes: int | None = None
    held: dict[str, int] = field(default_factory=dict)
    otherwise: str = ""

    @property
    def asked_bytes(self) -> int | None:
        """Size of the allocation that failed, from the message of the allocator; None if unknown."""
        found = _REQUESTED_SIZE.search(self.error)
        return int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else None


def is_out_of_memory(error: BaseException, *, was_short: bool = False) -> bool:
    """Return True if ``error`` is, or was caused by, a failed allocation.

    ``was_short``: memory ran out earlier in this run, so ambiguous errors count too.
    """
    messages = (*_OOM_MESSAGES, *_AMBIGUOUS_OOM_MESSAGES) if was_short else _OOM_MESSAGES
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(text in text_of(seen) for text in messages):
            return True
        if isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        seen = seen.__cause__
    return False


def oom_snapshot(error: Exception, state: TrainState, batch: StepBatch, device: torch.device) -> OomSnapshot:
    """Describe a failed attempt while its tensors are alive; then clear its frames, which hold them."""
    try:
        in_use, reserved = held_bytes(device), reserved_bytes(device)
        phase, module = _place(error.__traceback__, state.model)
    except (MemoryError, OSError):  # too little memory to inspect: free it first, which loses the module names
        traceback.clear_frames(error.__traceback__)
        in_use, reserved = held_bytes(device), reserved_bytes(device)
        phase, module = _place(error.__traceback__, state.model)
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    traceback.clear_frames(error.__traceback__)
    return OomSnapshot(phase, module, message[:400], in_use, reserved, holdings(state, batch))


def _place(trace: TracebackType | None, model: nn.Module) -> tuple[str, str]:
    names = {id(module): name for name, module in model.named_modules()}
    phase, module = "loss", ""
    while trace is not None:
        frame = trace.tb_frame
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "autograd" and path.name in ("__init__.py", "graph.py"):
            phase, module = "backward", ""
        elif frame.f_code.co_name == "_call_impl" and id(me := frame.f_locals.get("self")) in names:
            phase = "forward" if phase == "loss" else phase  # else: recomputation in backward
            module = names[id(me)]
        trace = trace.tb_next
    return phase, module


def holdings(state: TrainState, batch: StepBatch) -> dict[str, int]:
    """Return the bytes used by a step, by kind; tensors that share memory count once."""
    parameters = list(state.model.parameters())
    shadow = getattr(state.ema, "shadow", {})
    kinds: dict[str, Iterable[object]] = {
        "weights": parameters,
        "buffers": state.model.buffers(),
        "gradients": [p.grad for p in parameters],
        "optimizer": [
            each for own in state.optimizer.state.values() for each in own.values() if _on_device_of(each, parameters)
        ],
        "average": shadow.values(),
        "batch": batch.tensors,
    }
    return {kind: _bytes(tensors) for kind, tensors in kinds.items()}


def _on_device_of(tensor: object, parameters: Sequence[Tensor]) -> bool:
    """Return True if the tensor is on the device of the weights. The state of an offloaded optimizer is not."""
    return isinstance(tensor, Tensor) and any(tensor.device.type == p.device.type for p in parameters[:1])


def _bytes(tensors: Iterable[object]) -> int:
    strided = [local(each) for each in tensors if isinstance(each, Tensor) and each.layout == torch.strided]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in strided}
    return sum(sizes.values())


def oom_report(seen: OomSnapshot, *, step: int, micro: int, next_micro: int | None, device: torch.device) -> OomReport:
    """Build the report, after the tensors of the failed attempt have been freed."""
    return OomReport(
        step=step,
        phase=seen.phase,
        module=seen.module,
        error=seen.error,
        micro=micro,
        next_micro=next_micro,
        asked_bytes=seen.asked_bytes,
        in_use_bytes=seen.in_use_bytes,
        given_back_bytes=max(0, seen.in_use_bytes - held_bytes(device)),
        capacity_bytes=capacity_bytes(device),
        reserved_bytes=seen.reserved_bytes,
        held=seen.held,
    )
