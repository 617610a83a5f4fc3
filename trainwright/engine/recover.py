"""Recovery from running out of memory: the step starts again with smaller micro-batches, as if it had not failed.

Only a step's passes over its data are retried here, up to the final gradients. They change nothing but gradients,
buffers and generators, which are all restored. The loss weights do not depend on how the batch is split. For the update
see ``step.Update``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from trainwright.checkpoint.batch_cut import cut
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators, TwisterState, read_python, words_of_numpy, write_python
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.distributed.memory import give_back, return_large_blocks
from trainwright.engine.guard import BufferGuard
from trainwright.engine.oom_report import OomSnapshot, is_out_of_memory, oom_report, oom_snapshot
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, OutOfMemoryError, TrainwrightError, UsageError

T = TypeVar("T")
Passes = Callable[[TrainState, StepBatch], T]
NO_LIMIT = 2**62  # the attempt has succeeded on this rank
SAME_LIMIT = NO_LIMIT - 1  # try the same micro-batches once more
ONE_SAMPLE_DOES_NOT_FIT = "a micro-batch of one sample does not fit"


class Recovery:
    """Retries the passes of a step until they fit. ``forget`` clears what a failed attempt leaves in the state.

    The first time memory runs out, it is freed and the same micro-batches are tried once more, because the heap may
    have been fragmented. Then they are halved. Before a single sample is given up, ``witness`` frees its memory.

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
        device = state.optimizer.param_groups[0]["params"][0].device
        self._generators.keep(device, generators)
        versions = batch.versions
        while True:
            pieces = batch if state.micro_limit is None else cut(batch, state.micro_limit)
            seen, done = self._attempt(passes, state, pieces, device, again=bool(reports))
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
            reports.append(make_room(seen or OomSnapshot(), pieces, following, state, device))
            if trouble:
                state.micro_limit = limit_before
                raise out_of_memory_error(reports, trouble + _fit_before_note(limit_before, limit))

    def _attempt(
        self, passes: Passes[T], state: TrainState, pieces: StepBatch, device: torch.device, *, again: bool
    ) -> tuple[OomSnapshot | None, tuple[T] | None]:
        """Run one attempt. On return the error is gone, and with it the frames that hold the tensors of the attempt.

        If this is a retry (``again``), any other error ends the retries too. For example, BatchNorm rejects a single
        sample. On a single rank the state is restored before, so that it can be saved.
        """
        try:
            return None, (passes(state, pieces),)
        except Exception as error:
            if is_out_of_memory(error, was_short=self._ran_out or state.micro_limit is not None):
                return oom_snapshot(error, state, pieces, device), None
            if again and isinstance(error.__cause__, Exception):
                error = error.__cause__  # torch's error, which ``error`` explains
            if not again or isinstance(error, TrainwrightError):
                if self._world.size == 1 and not self.put_back(state):
                    with suppress(AttributeError):  # exceptions of some C extensions
                        error.whole = True  # type: ignore[attr-defined]  # see ``loop.SaveIfWhole``
                raise
            seen = oom_snapshot(error, state, pieces, device)
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


def make_room(
    seen: OomSnapshot, pieces: StepBatch, following: int | None, state: TrainState, device: torch.device
) -> OomReport:
    """Free what the failed attempt held, and return its report."""
    return_large_blocks()
    give_back(device)
    micro = _largest(pieces)
    return oom_report(seen, step=state.step + 1, micro=micro, next_micro=following, device=device)


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
