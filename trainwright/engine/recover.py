"""Recovery from running out of memory: the step begins again with smaller micro-batches; no trace of the try is left.

Only a step's passes over its data are tried again here, up to the gradients as they will be applied. They write nothing
but gradients, buffers and generators, which are all put back; so are the weights of the sum, which any split leaves the
same. Of the update see ``update.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.cut import cut
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.distributed.memory import give_back, keep_no_blocks
from trainwright.engine.guard import BufferGuard
from trainwright.engine.oom_report import OomSnapshot, is_out_of_memory, oom_report, oom_snapshot
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, OutOfMemoryError, TrainwrightError, UsageError

T = TypeVar("T")
Passes = Callable[[TrainState, StepBatch], T]
FITS = 2**62
AS_IT_IS = FITS - 1
LOOK_EVERY = 256
DRAWN = "Python's or NumPy's generator was drawn from for the first time"
ONE_IS_TOO_MUCH = "a micro-batch of one sample does not fit"


class Recovery:
    """Tries the passes of a step until they fit. ``forget`` clears what a failed try leaves in the state.

    The first time memory runs out, it is given back and the same micro-batches are tried once more: the heap may have
    been in pieces. Then they are halved. Before a single sample is given up, ``witness`` lets go of what it holds.

    The limit that is found stays in the state: it is never raised again, for the memory that was short once will be
    short again, and a resumed run must cut its batches as the first one did. What an ordinary step pays is a look at
    the batch and at the generators (5 us).
    """

    def __init__(
        self, forget: Callable[[TrainState], None], world: World = SOLO, witness: StepWitness = SILENT
    ) -> None:
        self._forget, self._world, self._witness = forget, world, witness
        self._ran_out = False
        self.buffers = BufferGuard()
        self._generators = _Generators()

    def __call__(
        self, passes: Passes[T], state: TrainState, batch: StepBatch, generators: TorchGenerators
    ) -> tuple[T, StepBatch, tuple[OomReport, ...]]:
        """Returns the result of ``passes``, the micro-batches that it ran on, and a report of each try that failed.

        ``generators`` are torch's as they are now.

        Raises OutOfMemoryError when a micro-batch of one sample does not fit or cannot be cut; the state is then that
        of the last good step.
        """
        reports: list[OomReport] = []
        limit_before = state.micro_limit
        device = state.optimizer.param_groups[0]["params"][0].device
        self._generators.keep(device, generators)
        versions = batch.versions
        while True:
            pieces = cut(batch, state.micro_limit)
            seen, done = self._tried(passes, state, pieces, device, again=bool(reports))
            limit = self._world.least(self._wanted(seen, pieces))
            if limit == FITS:
                assert done is not None
                return done[0], pieces, tuple(reports)
            done = None
            notes, trouble = self._as_before(state, batch, versions)
            trouble = trouble or (seen.otherwise if seen else "")
            following: int | None = _largest(pieces)
            if limit != AS_IT_IS:
                trouble = trouble or _cannot_shrink(batch, limit)
                following = state.micro_limit = None if trouble else limit
            reports.append(make_room(seen or OomSnapshot(), pieces, following, state, device, notes))
            if trouble:
                state.micro_limit = limit_before
                raise given_up(reports, trouble + _though_it_did(limit_before, limit))

    def _tried(
        self, passes: Passes[T], state: TrainState, pieces: StepBatch, device: torch.device, *, again: bool
    ) -> tuple[OomSnapshot | None, tuple[T] | None]:
        """One try. When this returns, the error is gone, and with it the frames that hold the tensors of the try.

        Where it is tried ``again``, another error ends the tries as well: BatchNorm takes no single sample.
        """
        try:
            return None, (passes(state, pieces),)
        except Exception as error:
            if is_out_of_memory(error, was_short=self._ran_out or state.micro_limit is not None):
                return oom_snapshot(error, state, pieces, device), None
            if not again or isinstance(error, TrainwrightError):
                raise
            seen = oom_snapshot(error, state, pieces, device)
            return replace(seen, otherwise=f"{type(error).__name__} in smaller micro-batches: {seen.error}"), None

    def _wanted(self, seen: OomSnapshot | None, pieces: StepBatch) -> int:
        """The limit that a rank asks for: FITS, AS_IT_IS, half of what it tried, or 0 when nothing would help."""
        if seen is None:
            return FITS
        if seen.otherwise:
            return 0
        has_let_go = self._witness.memory_ran_out()
        first, self._ran_out = not self._ran_out, True
        if first or (has_let_go and _largest(pieces) == 1):
            return AS_IT_IS
        return 0 if _largest(pieces) == 1 else (_largest(pieces) + 1) // 2

    def put_back(self, state: TrainState) -> tuple[tuple[str, ...], list[str]]:
        """Puts gradients, generators and buffers back. Returns notes of what is not, and names of lost buffers."""
        self._forget(state)
        known = self._generators.restore()
        return () if known else (DRAWN,), self.buffers.put_back()

    def _as_before(self, state: TrainState, batch: StepBatch, versions: list[int]) -> tuple[tuple[str, ...], str]:
        """Puts everything back. Returns what is not quite as before, and why the step cannot be tried again, or ""."""
        notes, lost = self.put_back(state)
        if lost:
            return notes, f"the failed try wrote to the buffer {lost[0]}, which is too large to be kept twice"
        if batch.versions != versions:
            return notes, "the model writes into its input, so a second try would train on other data"
        return notes, ""


def _largest(pieces: StepBatch) -> int:
    return max(micro.size for micro in pieces.micro)


def _cannot_shrink(batch: StepBatch, limit: int) -> str:
    if limit == 0:
        return ONE_IS_TOO_MUCH
    try:
        cut(batch, limit)
    except UsageError as error:
        return error.message
    return ""


def _though_it_did(limit_before: int | None, limit: int) -> str:
    """Of a run that was short of memory in an earlier step and went on: what was enough then is not any more."""
    if limit or limit_before is None:
        return ""
    return (
        f", though {limit_before} at a time did in earlier steps: these samples are larger, or something grows from "
        "step to step (losses or outputs that are kept without detach())"
    )


def make_room(
    seen: OomSnapshot,
    pieces: StepBatch,
    following: int | None,
    state: TrainState,
    device: torch.device,
    notes: tuple[str, ...] = (),
) -> OomReport:
    """Frees what the failed try held, and returns the report of it."""
    keep_no_blocks()
    give_back(device)
    micro = _largest(pieces)
    return oom_report(seen, step=state.step + 1, micro=micro, next_micro=following, device=device, notes=notes)


def given_up(reports: list[OomReport], trouble: str) -> OutOfMemoryError:
    """Returns the error of a step that does not fit: where it was, what held the memory, what would help."""
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
    """All generators as they were before the step. Those of Python and NumPy take 40 us to read.

    So these are read in every step once they were seen to move, until then in the first two and each 256th.
    """

    def __init__(self) -> None:
        self._torch: tuple[torch.device, TorchGenerators] | None = None
        self._slow: _SlowStates | None = None
        self._moving = False
        self._steps = 0

    def keep(self, device: torch.device, torchs: TorchGenerators) -> None:
        self._torch = device, torchs
        if self._moving or self._steps < 2 or self._steps % LOOK_EVERY == 0:
            before, self._slow = self._slow, _slow_generators()
            self._moving = self._moving or (before is not None and _moved(before, self._slow))
            self._looked_at = self._steps
        self._steps += 1

    def restore(self) -> bool:
        """False when Python's or NumPy's moved since they were read last, and it cannot be told where they stood."""
        assert self._torch is not None and self._slow is not None
        device, torchs = self._torch
        torchs.restore(device)
        if self._looked_at != self._steps - 1:
            self._moving = _moved(self._slow, _slow_generators())
            return not self._moving
        random.setstate(self._slow[0])
        np.random.set_state(self._slow[1])
        return True


_SlowStates: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The states of Python's and NumPy's generator, as their modules return them."""


def _slow_generators() -> _SlowStates:
    numpys = np.random.get_state(legacy=False)
    assert isinstance(numpys, dict)
    return random.getstate(), numpys


def _moved(before: _SlowStates, now: _SlowStates) -> bool:
    was, here = before[1], now[1]
    numbers = ("has_gauss", "gauss")
    return bool(
        before[0] != now[0]
        or any(was[name] != here[name] for name in numbers)
        or was["state"]["pos"] != here["state"]["pos"]
        or not np.array_equal(was["state"]["key"], here["state"]["key"])
    )
