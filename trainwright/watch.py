"""Composition for a loop that somebody else owns: ``with tw.watch(model, optimizer):`` around it, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from trainwright import __version__
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import Diagnosis, diagnose
from trainwright.errors import UsageError, require_choice
from trainwright.examine import Examiner
from trainwright.observe import probes
from trainwright.observe.guard import OnNonfinite, Veto
from trainwright.observe.hooks import listening, muted
from trainwright.observe.program import Segment
from trainwright.observe.recording import Recording
from trainwright.observe.ring import Ring, Subject
from trainwright.report.findings import lines_of
from trainwright.runlog import records
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.records import Found, Record
from trainwright.runlog.writer import LogWriter

CHECKUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)
"""The steps that are looked at closely; from there on one in a while, as the share of time allows."""
EARLY_S = 3.0
"""What the looks at these steps may take together; the first four are always looked at."""
SHARE = 0.004
"""Of the time of all later steps: what looking closely may take, and again what snapshots may take."""
KEPT_RECORDS = 1024


class Watch:
    """A context manager around a training loop; made by ``tw.watch``."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        given: dict[str, Any],
        *,
        folder: RunFolder | None,
        on_nonfinite: OnNonfinite,
        keep: int,
        budget_bytes: int,
        console: Console | None,
    ) -> None:
        self.folder, self._console, self._on_nonfinite = folder, console, on_nonfinite
        self.records: list[Record] = []
        self.step = 0
        self._found: dict[str, Found] = {}
        self._open = ExitStack()
        self._log: LogWriter | None = None
        self._veto: Veto
        self._recording = Recording(
            roots, optimizers, self._closed, before_update=self._before, after_update=self._after
        )
        parameters = self._recording.parameters
        self._veto = Veto(roots, parameters, on_nonfinite)
        self._ring = Ring(keep=keep, budget_bytes=budget_bytes)
        self._subject = Subject(roots, optimizers, parameters)
        self._examiner = Examiner(self._subject, self._ring)
        probes.load_all()
        watched = probes.Watched(self._subject, **given)
        self._probes = [make(watched) for make in probes.PROBES]
        self._begin_s, self._looked_s, self._next_look_s = 0.0, 0.0, 0.0
        self._snapshot_every, self._looks_next = 4, False
        self._roots = list(roots)
        self._loss_before: list[float] = []

    # the life of a watch

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._log = self._open.enter_context(closing(LogWriter(self.folder.log)))
        self._begin_s = time.perf_counter()
        self._write(records.Started(time_s=time.time(), step=0, version=__version__, pid=os.getpid()))
        self._open.enter_context(listening(self._recording, self._roots))
        for probe in self._probes:
            self._open.enter_context(listening(probe, []))
        self._prepare_next(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.tape.stop()
        try:
            if error is None or isinstance(error, Exception):
                self._finish(error)
        finally:
            self._open.close()

    def _finish(self, error: BaseException | None) -> None:
        """The last look: at a step that was not finished too, and at what never came."""
        unfinished = self._recording.segment
        if error is not None or unfinished.program:
            told = self._examiner.unfinished(unfinished, self._recording.tape, error)
            self._examined(unfinished.step, {"unfinished": told})
        self._look(self.step, "end", finished=True)
        ending = "failed" if error is not None else "finished"
        last = self.records[-1] if self.records else None
        self._write(
            records.Ended(
                time_s=time.time(),
                ending=ending,
                reason=repr(error) if error is not None else "",
                step=self.step,
                loss=last.loss if isinstance(last, records.Watched) else None,
                val_loss=None,
                skipped=self._veto.vetoed,
                seconds=time.perf_counter() - self._begin_s,
            )
        )
        if self._console is not None:
            for line in lines_of(self.findings(), self.folder.path if self.folder else None):
                self._console.print(line, highlight=False, markup=False)

    # what is heard

    def _before(self, segment: Segment, optimizer: Optimizer) -> None:
        self._veto.before_update(segment, optimizer)

    def _after(self, segment: Segment, optimizer: Optimizer) -> None:
        self._veto.after_update(segment, optimizer)

    def _closed(self, segment: Segment) -> None:
        self.step = segment.step
        self._ring.add(segment)
        record = as_record(segment)
        self._remember(record)
        for probe in self._probes:
            probe.on_closed(segment)
        bad = not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)) or "vetoed" in segment.values
        jumped = self._jumped(record)
        if bad or jumped or self._looks_next:
            begin_s = time.perf_counter()
            self._look(segment.step, "incident" if bad else "checkup", finished=False)
            cost_s = time.perf_counter() - begin_s
            self._looked_s += cost_s
            self._next_look_s = begin_s + cost_s + cost_s / SHARE
        self._prepare_next(segment.step)
        if bad and self._on_nonfinite == "stop":
            raise NonFiniteStep(f"step {segment.step} is not finite", remedy="\n".join(lines_of(self.findings(), None)))

    def _jumped(self, record: records.Watched) -> bool:
        """Whether the loss is far above what it was: at most 32 losses are remembered."""
        before, self._loss_before = self._loss_before, [*self._loss_before[-31:], record.loss]
        if len(before) < 4 or not math.isfinite(record.loss):
            return False
        low = sorted(before)
        spread = low[-1 - len(low) // 8] - low[len(low) // 8]
        return record.loss > low[-1] + max(2 * spread, 0.05 * abs(low[-1]))

    def _prepare_next(self, step: int) -> None:
        """The state before the next step is kept when that one will be looked at, and now and then."""
        self._veto.begin()
        now_s = time.perf_counter()
        if step < CHECKUPS[-1]:
            self._looks_next = step + 1 in CHECKUPS and (step < 4 or self._looked_s < EARLY_S)
        else:
            self._looks_next = step % 16 == 0 and now_s > self._next_look_s
        if self._looks_next or step % self._snapshot_every == 0:
            self._ring.add_snapshot(self._subject.snapshot(step + 1))
            cost_s = time.perf_counter() - now_s
            step_s = max((now_s - self._begin_s) / max(1, step), 1e-6)
            self._snapshot_every = max(
                4 if step < 64 else 16, min(self._ring.keep // 2, math.ceil(cost_s / (SHARE * step_s)))
            )

    # what is thought of it

    def _look(self, step: int, why: str, *, finished: bool) -> None:
        """Examines the newest step and asks the doctor, who may ask for more."""
        with muted():
            self._examined(step, {p.name: told for p in self._probes if (told := p.values()) is not None})
            self._examined(step, self._examiner.look(step, why))
            for _ in range(4):
                diagnosis = diagnose(Case(self.records, finished=finished))
                told = self._examiner.grant(step, diagnosis.wishes)
                if not told:
                    break
                self._examined(step, told)
            self._conclude(step, diagnosis)

    def _examined(self, step: int, told: dict[str, Any]) -> None:
        for name, values in told.items():
            at = values.pop("step", step)
            self._remember(records.Examined(time_s=time.time(), step=at, experiment=name, values=values))

    def _conclude(self, step: int, diagnosis: Diagnosis) -> None:
        now = {}
        for said in diagnosis.findings:
            known = self._found.get(said.found.code)
            found = said.found
            if known is None:
                tried = self._examiner.attempt(found.step, said.trial)
                found = dataclasses.replace(found, time_s=time.time(), tried=(*found.tried, *tried))
                self._write(found)
            else:
                found = dataclasses.replace(found, time_s=known.time_s, step=known.step, tried=known.tried)
            now[found.code] = found
        self._found = now

    @property
    def held_bytes(self) -> int:
        """What the flight recorder holds of its byte budget."""
        return self._ring.num_bytes

    def findings(self) -> list[Found]:
        """What is known by now, the first cause first."""
        return list(self._found.values())

    def _remember(self, record: Record) -> None:
        self.records.append(record)
        if len(self.records) > KEPT_RECORDS:  # every other step of the older half is forgotten
            half = len(self.records) // 2
            old = [r for i, r in enumerate(self.records[:half]) if not isinstance(r, records.Watched) or i % 2]
            self.records = old + self.records[half:]
        step = getattr(record, "step", 0)
        if not isinstance(record, records.Watched) or step <= 64 or step % 10 == 0:
            self._write(record, remember=False)

    def _write(self, record: Record, *, remember: bool = True) -> None:
        if self._log is not None:
            self._log.write(record)


class NonFiniteStep(UsageError):
    """A step was not finite and ``on_nonfinite="stop"`` was asked for."""


def as_record(segment: Segment) -> records.Watched:
    """A segment as numbers. On a GPU this waits for the device."""
    losses = [float(each) for each in segment.losses if each.numel() == 1]
    values = {"losses": losses, "ids": [None if ids is None else len(ids) for ids in segment.ids], **segment.values}
    if "carried" in values:
        values["carried"] = True
    if segment.blind:
        values["blind"] = segment.blind
    return records.Watched(
        time_s=segment.ended_s,
        step=segment.step,
        loss=sum(losses) / len(losses) if losses else math.nan,
        grad_norm=0.0 if segment.grad_norm is None else float(segment.grad_norm),
        lr=segment.lr,
        events=[each if each[0] != "clip" else ("clip", _plain(each[1])) for each in segment.events],
        values=values,
    )


def _plain(clip: dict[str, Any]) -> dict[str, Any]:
    return clip | {"norm": None if clip["norm"] is None else float(clip["norm"])}


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    loader: Any = None,
    loss: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
    out: str | Path | None = "runs/watch",
    on_nonfinite: OnNonfinite = "skip",
    **more: Any,
) -> Watch:
    """Watches a loop that somebody else owns: ``with tw.watch(model, optimizer, loader=loader):`` around it.

    Reads only: with and without it the training is the same bits, but for an update that is not finite. That one is
    vetoed (``on_nonfinite="skip"``), ends the loop (``"stop"``), or is let through (``"observe"``). Several models and
    optimizers (a GAN) are given as sequences. ``accumulation`` declares micro-batches for each step. ``keep`` (steps,
    32) and ``memory_bytes`` (256 MiB) limit the flight recorder; ``quiet`` prints nothing. The run folder is ``out``,
    numbered if it exists; None writes nothing.

    Raises UsageError for what cannot be watched.
    """
    known = {"accumulation": None, "keep": 32, "memory_bytes": 256 * 2**20, "quiet": False}
    if unknown := more.keys() - known.keys():
        raise UsageError(f"watch has no argument {min(unknown)!r}", remedy=f"it has also {', '.join(known)}")
    chosen = known | more
    require_choice("on_nonfinite", on_nonfinite, ("skip", "stop", "observe"))
    roots = _several(model, nn.Module, "model")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        roots.append(loss)
    folder = None if out is None else RunFolder.create(Path(out).parent, Path(out).name)
    given = {
        "loaders": _listed(loader),
        "scalers": _listed(scaler),
        "schedulers": _listed(scheduler),
        "accumulation": chosen["accumulation"],
    }
    return Watch(
        roots,
        _several(optimizer, Optimizer, "optimizer"),
        given,
        folder=folder,
        on_nonfinite=on_nonfinite,
        keep=int(chosen["keep"]),
        budget_bytes=int(chosen["memory_bytes"]),
        console=None if chosen["quiet"] else Console(stderr=True),
    )


def _several(given: Any, kind: type, what: str) -> list[Any]:
    items = [given] if isinstance(given, kind) else list(given) if isinstance(given, Iterable) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise UsageError(f"watch: the {what} is a {type(item).__name__}", remedy=f"give a torch {kind.__name__}")
    return items


def _listed(given: Any) -> tuple[Any, ...]:
    return () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
