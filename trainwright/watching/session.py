"""Composition of watch, replay and doctor around a loop, whoever owns it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import nn
from torch.optim import Optimizer

from trainwright.errors import StorageError, TrainwrightError
from trainwright.recorder import probes
from trainwright.recorder.calls import parts_of
from trainwright.recorder.hooks import calls_heard, listening
from trainwright.recorder.listener import careful
from trainwright.recorder.numbers import Numbers, ask, lateness
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.recording import LoopRecorder
from trainwright.recorder.ring import LiveObjects, Ring, put_back
from trainwright.recorder.spikes import OnSpike, Spikes
from trainwright.recorder.veto import OnNonfinite, Veto
from trainwright.replay.bundle import prune
from trainwright.report.findings import lines_of
from trainwright.runlog import records
from trainwright.runlog.records import Found, Record
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.findings import FindingsLog

CHECKUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)
"""The steps that are looked at closely; from there on one in a while, as the share of time allows."""
EARLY_S = 6.0
"""What the looks at these steps may take together; the first four are always looked at."""
SHARE = 0.004
"""Of the time of all later steps: what looking closely may take, and again what snapshots may take."""
KEEP, LEAST_BYTES = 32, 256 * 2**20
"""Of the flight recorder: steps, and what they and their snapshots may hold at least."""


def enough_bytes(roots: Sequence[nn.Module]) -> int:
    """Room for three states with two moments a weight (Adam), if that is no more than a quarter of the free memory."""
    weights = sum(parameter.nbytes for root in roots for parameter in root.parameters())
    return max(LEAST_BYTES, min(3 * 3 * weights, psutil.virtual_memory().available // 4))


@dataclass(frozen=True)
class WatchOptions:
    """What a watch may do to a loop, what its recorder holds, and where bundles of incidents go (None: nowhere).

    ``skip`` are the samples of steps whose update is left out.
    """

    on_nonfinite: OnNonfinite = "skip"
    on_spike: OnSpike = "warn"
    keep: int = KEEP
    budget_bytes: int = LEAST_BYTES
    bundles: Path | None = None
    skip: frozenset[frozenset[int]] = frozenset()


class WatchSession:
    """Hears a loop, keeps its last steps, looks closely when that is due, and asks the doctor.

    ``write`` takes every record that is to be kept. ``own_loop_at`` is the step that our engine's loop stands at:
    whoever runs it closes each step. ``point_at`` gives the line of the user's source that a code is about.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        given: dict[str, Any],
        terms: WatchOptions,
        *,
        write: Callable[[Record], None],
        own_loop_at: int | None = None,
        point_at: Callable[[str], str | None] = lambda code: None,
    ) -> None:
        self._write, self._terms = write, terms
        self.first_step = self.step = own_loop_at or 0
        self._open = ExitStack()
        self._veto: Veto
        self.recording = LoopRecorder(
            roots,
            optimizers,
            self._closed,
            before_update=lambda segment, optimizer: self._veto.before_update(segment, optimizer),
            after_update=lambda segment, optimizer: self._veto.after_update(segment, optimizer),
            first_step=self.step + 1,
            own_loop=own_loop_at is not None,
        )
        self.recording.budget_bytes = terms.budget_bytes
        parameters = self.recording.parameters
        self._incidents = 0
        spikes = None if own_loop_at is not None else Spikes(terms.on_spike)
        self._veto = Veto(roots, parameters, terms.on_nonfinite, spikes, terms.skip)
        self._ring = Ring(keep=terms.keep, budget_bytes=terms.budget_bytes)
        self._subject = LiveObjects(roots, optimizers, parameters)
        self._examiner = ExperimentRunner(self._subject, self._ring)
        probes.load_all()
        watched = probes.WatchedObjects(self._subject, **given)
        self._probes = [make(watched) for make in probes.PROBES]
        self.casebook = FindingsLog(self._examiner, self._probes, write, point_at)
        self._begin_s, self._looked_s, self._next_look_s = 0.0, 0.0, 0.0
        self._snapshot_every, self._went_back, self._looked_at = 4, -1, -16
        self._due: set[int] = set()  # steps that will be looked at
        self._asked: deque[tuple[RecordedStep, Callable[[], Numbers]]] = deque()
        self._late = lateness(self.recording.device)
        self._hear_closed = [careful(p, "on_closed") for p in self._probes if type(p).on_closed is not Probe.on_closed]
        self._hear_read = [careful(p, "on_read") for p in self._probes if type(p).on_read is not Probe.on_read]
        self._roots, self._hears_parts = list(roots), False
        self._mean = self._deviation = 0.0  # of the loss, moving
        self._bad_in_a_row = 0

    def begin(self) -> None:
        """From here on the loop is heard."""
        self._begin_s = time.perf_counter()
        self._open.enter_context(listening([self.recording, *self._probes], self._roots))
        self._prepare_next(self.step)

    def hear_parts(self) -> None:
        """Hears the modules right inside of the roots too: a loop may call these and never the root."""
        if not self._hears_parts:
            self._hears_parts = True
            parts = [part for root in self._roots for part in parts_of(root)]
            self._open.enter_context(calls_heard([self.recording, *self._probes], parts))

    def end(self, error: BaseException | None) -> None:
        """The last look: at a step that was not finished too, and at what never came. Nothing is heard any more."""
        self.recording.tape.stop()
        try:
            if error is None or isinstance(error, Exception):
                unfinished = self.recording.segment
                if error is not None or unfinished.program or self.step == self.first_step:
                    told = self._examiner.unfinished(unfinished, self.recording.tape, error)
                    told = {"unfinished": told, **self._examiner.abandoned(unfinished, self.recording.tape)}
                    self.casebook.examined(unfinished.step, told)
                while self._asked:
                    self._judge(*self._asked.popleft())
                self.casebook.look(self.step, "end", self._limits(), finished=True)
        except Exception as failure:  # the loop is over, well or by an exception of its own: that is what comes out
            self.recording.fail(failure)
        finally:
            self._open.close()

    @property
    def failures(self) -> list[str]:
        """Our own mistakes: who heard the loop and had to stop, and why."""
        heard = {"recording": self.recording, **{probe.name: probe for probe in self._probes}}
        failed = {name: each.failed for name, each in heard.items() if each.failed is not None}
        return [f"{name}: {type(error).__name__}: {str(error)[:200]}" for name, error in failed.items()]

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin_s

    @property
    def num_vetoed(self) -> int:
        """Updates that were not finite and so were not made."""
        return self._veto.vetoed

    def _closed(self, segment: RecordedStep) -> None:
        self.step = segment.step
        self._ring.add(segment)
        for tell in self._hear_closed:
            tell(segment)
        self._asked.append((segment, ask(segment)))
        at_once = "vetoed" in segment.values  # the host knows: it has waited for it
        bad = False
        while len(self._asked) > (0 if at_once else self._late):
            bad |= self._judge(*self._asked.popleft())
        if self.recording.misses_calls:
            self.hear_parts()
        if at_once:
            self._tell_veto(segment)
        self._prepare_next(segment.step)
        if bad and self._terms.on_nonfinite == "stop":
            raise NonFiniteStep(f"step {segment.step} is not finite", remedy="\n".join(lines_of(self.findings(), None)))

    def _judge(self, segment: RecordedStep, read: Callable[[], Numbers]) -> bool:
        """Whether a step is bad; looks at it closely if that is due or there is reason to."""
        numbers = read()
        if self._veto.was_vetoed_on_device(segment, numbers.norm):
            self._tell_veto(segment)
        for tell in self._hear_read:
            tell(segment, numbers)
        vetoed = segment.values.get("vetoed", "skip list") != "skip list"
        bad = not numbers.are_finite or vetoed or "nonfinite" in segment.values
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        is_news = bad and (self._bad_in_a_row <= 4 or self._bad_in_a_row % 4 == 0)  # each look replays the step
        is_due = segment.step in self._due
        jumped = self._jumped(segment.step, numbers.loss) and segment.step > self._looked_at + 16
        self.casebook.note(segment, numbers)
        if is_news or is_due or jumped or any(probe.urgent for probe in self._probes):
            self._due.discard(segment.step)
            self._looked_at = segment.step
            begin_s = time.thread_time()  # of the processor: on a busy machine the looks are the same
            self.casebook.look(segment.step, "incident" if bad else "checkup", self._limits(), finished=False)
            cost_s = time.thread_time() - begin_s
            self._looked_s += cost_s
            self._next_look_s = time.perf_counter() + cost_s / SHARE
        if bad:
            self._keep_bundle(segment.step)
        return bad

    def _keep_bundle(self, step: int) -> None:
        """What it takes to run an incident again elsewhere: of the 1st, 2nd, 4th, 8th, ... of a run."""
        self._incidents += 1
        if self._terms.bundles is None or self._incidents & (self._incidents - 1):
            return
        try:
            self._examiner.keep(self._terms.bundles, step, {"findings": [found.code for found in self.findings()]})
            prune(self._terms.bundles)
        except StorageError as error:
            self._write(records.NotSaved(time_s=time.time(), step=step, reason=f"no bundle: {error}"))

    def _tell_veto(self, segment: RecordedStep) -> None:
        """The ledger: a Skipped record for an update that was not made, or for all that were undone."""
        reason = str(segment.values["vetoed"])
        snapshot = self._ring.before(segment.step) if reason == "spike" and self._terms.on_spike == "rollback" else None
        undone = [segment]
        if snapshot is not None:
            put_back(self._subject, snapshot)
            self._went_back = segment.step
            undone = [each for each in self._ring.segments if snapshot.step <= each.step <= segment.step]
            reason = f"spike in step {segment.step}: back to the state before step {snapshot.step}"
        for each in undone:
            ids = tuple(i for of_batch in each.ids for i in of_batch or ())
            self._write(
                records.Skipped(
                    time_s=time.time(),
                    step=each.step,
                    reason=reason,
                    micro_batch=None,
                    sample_ids=ids,
                    scale_before=None,
                    scale_after=None,
                )
            )

    def _jumped(self, step: int, loss: float) -> bool:
        """Whether the loss is far above its moving average: by more than 6 times its mean deviation."""
        mean, deviation = self._mean, self._deviation
        if not math.isfinite(loss):
            return False
        if step - self.first_step < 4:
            self._mean, self._deviation = loss, max(deviation, abs(loss - mean) if mean else 0.0)
            return False
        self._mean += 0.1 * (loss - mean)
        self._deviation += 0.1 * (abs(loss - mean) - deviation)
        return loss > mean + max(6 * deviation, 0.05 * abs(mean))

    def _prepare_next(self, step: int) -> None:
        """The state before the next step is kept when that one will be looked at, and now and then."""
        self._veto.begin()
        now_s = time.perf_counter()
        if step < CHECKUPS[-1]:
            looks_next = step + 1 in CHECKUPS and (step < 4 or self._looked_s < EARLY_S)
        else:
            looks_next = step % 16 == 0 and now_s > self._next_look_s
        if looks_next:
            self._due.add(step + 1)
        self.recording.careful = looks_next
        is_due = looks_next or step % self._snapshot_every == 0 or self._went_back == step
        if is_due and not self._ring.refused_bytes:
            self._ring.add_snapshot(self._subject.snapshot(step + 1))
            cost_s = time.perf_counter() - now_s
            step_s = max((now_s - self._begin_s) / max(1, step), 1e-6)
            self._snapshot_every = max(
                4 if step < 64 else 32, min(self._ring.keep, math.ceil(cost_s / (SHARE * step_s)))
            )

    def _limits(self) -> dict[str, Any]:
        if not self.failures and not self._ring.refused_bytes:
            return {}
        told = {"refused_bytes": self._ring.refused_bytes, "budget_bytes": self._ring.budget_bytes}
        return {"limits": {"failures": self.failures, **told}}

    @property
    def held_bytes(self) -> int:
        """What the flight recorder holds of its byte budget."""
        return self._ring.num_bytes

    def findings(self) -> list[Found]:
        """What is known by now, the first cause first."""
        return self.casebook.findings()


class NonFiniteStep(TrainwrightError):
    """A step was not finite and ``on_nonfinite="stop"`` was asked for."""
