"""Recovery from running out of memory: the step starts again with smaller micro-batches, as if it had not failed.

Each attempt that ran out of memory is reported: where it happened, and what held the memory. Only a step's passes over
its data are retried here, up to the final gradients. They change nothing but gradients, buffers and generators, which
are all restored. The loss weights do not depend on how the batch is split. For the update see ``step.Update``.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.checkpoint.batch_cut import cut
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators, TwisterState, read_python, words_of_numpy, write_python
from trainwright.checkpoint.shards import local
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.distributed.memory import capacity_bytes, give_back, held_bytes, reserved_bytes, return_large_blocks
from trainwright.engine.guard import BufferGuard
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, OutOfMemoryError, TrainwrightError, UsageError, text_of

T = TypeVar("T")
Passes = Callable[[TrainState, StepBatch], T]
NO_LIMIT = 2**62  # the attempt has succeeded on this rank
SAME_LIMIT = NO_LIMIT - 1  # try the same micro-batches once more
ONE_SAMPLE_DOES_NOT_FIT = "a micro-batch of one sample does not fit"
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


def oom_snapshot(error: Exception, state: TrainState, batch: StepBatch) -> OomSnapshot:
    """Describe a failed attempt while its tensors are alive; then clear its frames, which hold them."""
    device = state.device
    try:
        in_use, reserved = held_bytes(device), reserved_bytes(device)
        phase, module = _place(error.__traceback__, state.model)
    except (MemoryError, OSError):  # too little memory to inspect: free it first, which loses the module names
        traceback.clear_frames(error.__traceback__)
        in_use, reserved = held_bytes(device), reserved_bytes(device)
        phase, module = _place(error.__traceback__, state.model)
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    traceback.clear_frames(error.__traceback__)
    return OomSnapshot(phase, module, message[:400], in_use, reserved, _holdings(state, batch))


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


def _holdings(state: TrainState, batch: StepBatch) -> dict[str, int]:
    """Return the bytes used by a step, by kind; tensors that share memory count once."""
    parameters = list(state.model.parameters())
    kinds: dict[str, Iterable[object]] = {
        "weights": parameters,
        "buffers": state.model.buffers(),
        "gradients": [p.grad for p in parameters],
        "optimizer": [
            each
            for own in state.optimizer.state.values()
            for each in own.values()
            if isinstance(each, Tensor) and each.device.type == state.device.type  # else it is offloaded
        ],
        "average": getattr(state.ema, "shadow", {}).values(),
        "batch": batch.tensors,
    }
    return {kind: _bytes(tensors) for kind, tensors in kinds.items()}


def _bytes(tensors: Iterable[object]) -> int:
    strided = [local(each) for each in tensors if isinstance(each, Tensor) and each.layout == torch.strided]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in strided}
    return sum(sizes.values())


class Recovery:
    """Retries the passes of a step until they fit. ``forget`` clears what a failed attempt leaves in the state.

    After each failure ``witness`` frees its memory. The first time, the same micro-batches are tried once more, because
    the heap may have been fragmented. Then they are halved. A single sample is tried again if ``witness`` held memory.

    The limit stays in the state and is never raised again, because memory would run out again, and a resumed run must
    split its batches as the first one did. A step that fits takes 5 us more, for the versions of the batch and the
    generators.
    """

    def __init__(
        self, forget: Callable[[TrainState], None], world: World = SOLO, witness: StepWitness = SILENT
    ) -> None:
        self._forget = forget
        self._world = world
        self._witness = witness
        self._ran_out = False
        self.buffers = BufferGuard()
        self._generators = _Generators()

    def __call__(
        self, passes: Passes[T], state: TrainState, batch: StepBatch, generators: TorchGenerators
    ) -> tuple[T, StepBatch, tuple[OomReport, ...]]:
        """Return the result of ``passes``, the micro-batches that it ran on, and a report of each failed attempt.

        ``generators`` are the current states of torch's generators.

        Raises:
            OutOfMemoryError: A micro-batch of one sample does not fit or cannot be cut. The state is then as it was
                after the last good step.
        """
        reports: list[OomReport] = []
        limit_before = state.micro_limit
        self._generators.keep(state.device, generators)
        versions = batch.versions
        while True:
            pieces = batch if state.micro_limit is None else cut(batch, state.micro_limit)
            seen, done = self._attempt(passes, state, pieces, again=bool(reports))
            limit = self._world.least(self._requested_limit(seen, pieces))
            if limit == NO_LIMIT:
                assert done is not None
                return done[0], pieces, tuple(reports)
            done = None
            trouble = self._restore_all(state, batch, versions) or (seen.otherwise if seen else "")
            following: int | None = _largest(pieces)
            if limit != SAME_LIMIT:
                trouble = trouble or _cannot_shrink(batch, limit)
                following = state.micro_limit = None if trouble else limit
            reports.append(make_room(seen or OomSnapshot(), pieces, following, state))
            if trouble:
                state.micro_limit = limit_before
                raise out_of_memory_error(reports, trouble + _fit_before_note(limit_before, limit))

    def _attempt(
        self, passes: Passes[T], state: TrainState, pieces: StepBatch, *, again: bool
    ) -> tuple[OomSnapshot | None, tuple[T] | None]:
        """Run one attempt. On return the error is gone, and with it the frames that hold the tensors of the attempt.

        If this is a retry (``again``), any other error ends the retries too. For example, BatchNorm rejects a single
        sample. On a single rank the state is restored before, so that it can be saved.
        """
        try:
            return None, (passes(state, pieces),)
        except Exception as error:
            if is_out_of_memory(error, was_short=self._ran_out or state.micro_limit is not None):
                return oom_snapshot(error, state, pieces), None
            if again and isinstance(error.__cause__, Exception):
                error = error.__cause__  # torch's error, which ``error`` explains
            if not again or isinstance(error, TrainwrightError):
                if self._world.size == 1 and not self.put_back(state):
                    with suppress(AttributeError):  # exceptions of some C extensions
                        error.whole = True  # type: ignore[attr-defined]  # see ``loop.run``
                raise
            seen = oom_snapshot(error, state, pieces)
            return replace(seen, otherwise=f"{type(error).__name__} in smaller micro-batches: {seen.error}"), None

    def _requested_limit(self, seen: OomSnapshot | None, pieces: StepBatch) -> int:
        """Return the limit that this rank requests.

        NO_LIMIT, SAME_LIMIT, half of the micro-batch size that was tried, or 0 if no smaller size can help.
        """
        if seen is None:
            return NO_LIMIT
        if seen.otherwise:
            return 0
        has_let_go = self._witness.memory_ran_out()
        first, self._ran_out = not self._ran_out, True
        if first or (has_let_go and _largest(pieces) == 1):
            return SAME_LIMIT
        return 0 if _largest(pieces) == 1 else (_largest(pieces) + 1) // 2

    def put_back(self, state: TrainState) -> list[str]:
        """Restore gradients, generators and buffers. Return the names of buffers that are lost."""
        self._forget(state)
        self._generators.restore()
        return self.buffers.put_back()

    def _restore_all(self, state: TrainState, batch: StepBatch, versions: list[int]) -> str:
        """Restore everything. Return why the step cannot be retried, or ""."""
        if lost := self.put_back(state):
            return f"the failed attempt wrote to the buffer {lost[0]}, which is too large to be copied"
        if batch.versions != versions:
            return "the model writes into its input, so a second attempt would train on other data"
        return ""


def _largest(pieces: StepBatch) -> int:
    return max(micro.size for micro in pieces.micro)


def _cannot_shrink(batch: StepBatch, limit: int) -> str:
    if limit == 0:
        return ONE_SAMPLE_DOES_NOT_FIT
    try:
        cut(batch, limit)
    except UsageError as error:
        return error.message
    return ""


def _fit_before_note(limit_before: int | None, limit: int) -> str:
    """Return a message for a run that recovered in an earlier step: the memory that was enough then no longer is."""
    if limit or limit_before is None:
        return ""
    return (
        f", though {limit_before} at a time did in earlier steps: these samples are larger, or something grows from "
        "step to step (losses or outputs that are kept without detach())"
    )


def make_room(seen: OomSnapshot, pieces: StepBatch, following: int | None, state: TrainState) -> OomReport:
    """Free what the failed attempt held, and return its report. ``following`` is the next micro-batch size."""
    return_large_blocks()
    give_back(state.device)
    return OomReport(
        step=state.step + 1,
        phase=seen.phase,
        module=seen.module,
        error=seen.error,
        micro=_largest(pieces),
        next_micro=following,
        asked_bytes=seen.asked_bytes,
        in_use_bytes=seen.in_use_bytes,
        given_back_bytes=max(0, seen.in_use_bytes - held_bytes(state.device)),
        capacity_bytes=capacity_bytes(state.device),
        reserved_bytes=seen.reserved_bytes,
        held=seen.held,
    )


def out_of_memory_error(reports: list[OomReport], trouble: str) -> OutOfMemoryError:
    """Return the error of a step that does not fit: where it was, what held the memory, what would help."""
    last = reports[-1]
    where = f" in {last.module}" if last.module else ""
    largest = max(last.held, key=lambda kind: last.held[kind], default="")
    held = f"{largest} take {_gib(last.held[largest])}" if largest else "what held it is not known"
    return OutOfMemoryError(
        f"out of memory in step {last.step} ({last.phase}{where}, {last.micro} samples at a time): {trouble}. "
        f"Of {_gib(last.in_use_bytes)} in use {held}, activations and temporaries of the step "
        f"{_gib(last.given_back_bytes)}; {_gib(last.capacity_bytes)} may be used in all",
        reports=reports,
        remedy="smaller batch.micro, model.activation_checkpointing: block, precision: bf16, shorter samples, "
        "an optimizer with less state (sgd, adafactor) or with it on the host of a GPU (optimizer.offload: true), "
        "or a device with more memory",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


class _Generators:
    """States of all generators before the step. Takes 2 us, because NumPy's state is read only if it has changed."""

    def __init__(self) -> None:
        self._torch: tuple[torch.device, TorchGenerators] | None = None
        self._python = read_python()
        self._words: TwisterState | None = None
        self._numpy: dict[str, Any] = {"has_gauss": True}

    def keep(self, device: torch.device, torchs: TorchGenerators) -> None:
        self._torch = device, torchs
        self._python = read_python()
        words = words_of_numpy()
        if words is None or words != self._words or self._numpy["has_gauss"]:  # NumPy's cached normal may be used up
            numpys = np.random.get_state(legacy=False)  # takes 25 us
            assert isinstance(numpys, dict)
            self._words, self._numpy = words, numpys

    def restore(self) -> None:
        assert self._torch is not None
        device, torchs = self._torch
        torchs.restore(device)
        write_python(self._python)
        np.random.set_state(self._numpy)
