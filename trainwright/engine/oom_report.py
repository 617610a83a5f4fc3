"""Reports of a try that ran out of memory: where it happened, and what held the memory."""

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

_SAYINGS = (
    "can't allocate memory",  # torch's allocator on the CPU: posix_memalign
    "not enough memory: you tried to allocate",  # the same on Windows
    "Cannot allocate memory",  # strerror(ENOMEM), of torch's file mappings
    "std::bad_alloc",
    "could not create a memory object",  # oneDNN
    "out of memory",  # CUDA, HIP, MPS, XPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_SHORT_SAYINGS = ("could not create a primitive", "could not execute a primitive")
"""Of oneDNN, which says the same of a shape that it cannot compute."""
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}


@dataclass(frozen=True)
class OomSnapshot:
    """What is known at the instant of the error, as plain values: nothing in it keeps a tensor alive.

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
        """The size of the allocation that failed, from the message of the allocator."""
        found = _ASKED.search(self.error)
        return int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else None


def is_out_of_memory(error: BaseException, *, was_short: bool = False) -> bool:
    """Whether ``error`` is, or was caused by, an allocation that failed.

    ``was_short``: memory ran out before in this run, so what may have another cause is taken for the same.
    """
    sayings = (*_SAYINGS, *_SHORT_SAYINGS) if was_short else _SAYINGS
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(saying in text_of(seen) for saying in sayings):
            return True
        if isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        seen = seen.__cause__
    return False


def oom_snapshot(error: Exception, state: TrainState, batch: StepBatch, device: torch.device) -> OomSnapshot:
    """Describes a failed try while its tensors are alive; then clears its frames, which hold them."""
    try:
        in_use, reserved = held_bytes(device), reserved_bytes(device)
        phase, module = _place(error.__traceback__, state.model)
    except (MemoryError, OSError):  # no memory to look with: first it is freed, and with it the names of modules
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
            phase = "forward" if phase == "loss" else phase  # else it is computed again in the backward pass
            module = names[id(me)]
        trace = trace.tb_next
    return phase, module


def holdings(state: TrainState, batch: StepBatch) -> dict[str, int]:
    """Bytes of what a step works on, by kind; tensors that share memory count once."""
    parameters = list(state.model.parameters())
    shadow = getattr(state.ema, "shadow", {})
    kinds: dict[str, Iterable[object]] = {
        "weights": parameters,
        "buffers": state.model.buffers(),
        "gradients": [p.grad for p in parameters],
        "optimizer": [
            each for own in state.optimizer.state.values() for each in own.values() if _beside(each, parameters)
        ],
        "average": shadow.values(),
        "batch": batch.tensors,
    }
    return {kind: _bytes(tensors) for kind, tensors in kinds.items()}


def _beside(tensor: object, parameters: Sequence[Tensor]) -> bool:
    """Whether it is where the weights are: an offloaded optimizer's state is not."""
    return isinstance(tensor, Tensor) and any(tensor.device.type == p.device.type for p in parameters[:1])


def _bytes(tensors: Iterable[object]) -> int:
    strided = [local(each) for each in tensors if isinstance(each, Tensor) and each.layout == torch.strided]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in strided}
    return sum(sizes.values())


def oom_report(
    seen: OomSnapshot, *, step: int, micro: int, next_micro: int | None, device: torch.device, notes: tuple[str, ...]
) -> OomReport:
    """Makes the report, after the tensors of the failed try have been freed."""
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
        notes=notes,
    )
