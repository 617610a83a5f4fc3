"""Collects the records of a run: its steps, the facts of experiments, and the findings of the doctor."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from trainwright.doctor.check import Check, CheckState
from trainwright.doctor.context import Decoded, RunContext
from trainwright.doctor.diagnose import Diagnosis, diagnose
from trainwright.doctor.finding import Calls
from trainwright.errors import text_of
from trainwright.recorder.hooks import Listener, muted
from trainwright.recorder.numbers import Numbers, as_record
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ring import Ring
from trainwright.report.examination import Examination
from trainwright.runs import records
from trainwright.runs.findings import FindingsWriter
from trainwright.runs.json_values import Facts
from trainwright.runs.reader import without_half_of_the_steps
from trainwright.runs.records import Found, Record
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.places import Lines

EVERY_STEP, EVERY_EIGHTH = 64, 1024
"""Ordinary steps become records: each up to the first number, every eighth up to the second, then every 64th."""
KEPT_RECORDS, UNRECORDED = 1024, 16  # records in memory; newest steps that are not records yet
ORDINARY = {"grads", "step_s", "wait_s", "on_device", "lines"}
"""Values that every step has. A step with other values always becomes a record."""
ROUNDS = 4
"""Maximum number of rounds in which the doctor may request further experiments in one examination."""
TRIED = ("critical", "warning")
"""Severities of findings whose remedies are tried."""


class FindingsLog:
    """Records every step, examines a step on request, and collects the findings.

    ``write`` is called with every record that is kept. ``known`` are the records of an earlier process. ``checks`` are
    the checks to run; None: all of them. ``place_of`` returns the line that causes a finding, and one that shows it.
    """

    def __init__(
        self,
        runner: ExperimentRunner,
        probes: Sequence[Probe],
        write: Callable[[Record], None],
        *,
        known: Iterable[Record] = (),
        checks: Sequence[Check] | None = None,
        place_of: Callable[[Found, Calls], Lines] = lambda found, _calls: (found.where.source, None),
    ) -> None:
        self._checks, self._place_of = checks, place_of
        self._runner, self._probes, self._write = runner, probes, write
        self._records = list(known)
        self._decoded: dict[Decoded, object] = {}
        self._unrecorded: deque[tuple[RecordedStep, Numbers]] = deque()
        self._findings = FindingsWriter(write)
        self._states: tuple[CheckState, ...] = ()
        self._untried: set[str] = set()  # codes of findings whose remedy there was no time to try

    @property
    def records(self) -> list[Record]:
        """The records in memory. In a long run, not every step has a record."""
        self.record_all()
        return self._records

    def findings(self) -> list[Found]:
        """Returns the findings so far, root causes first."""
        return self._findings.findings

    def note(self, step: RecordedStep, numbers: Numbers) -> None:
        """Adds a finished step. It becomes a record at the next examination, or earlier if enough steps follow."""
        self._unrecorded.append((step, numbers))
        if len(self._unrecorded) > UNRECORDED:
            self._record_oldest()

    def examine(
        self,
        step: int,
        *reasons: str,
        limits: Facts | None = None,
        allowed_s: float = math.inf,
        repeats: bool = True,
        finished: bool = False,
    ) -> float:
        """Runs the experiments of these ``reasons`` on ``step``, then the doctor, which may request more.

        ``reasons`` are "checkup", "incident" or "end". ``limits`` lists what the recorder could not do. Experiments
        that do not fit into ``allowed_s`` are left to a later examination. ``repeats``: experiments that
        are repeated are due, too. The measurements of the probes are always evaluated. Returns the duration in seconds,
        without replays.
        """
        begin_s = self._runner.now_s()
        with muted():
            self._runner.allow(allowed_s)
            self.record_all()
            self.examined(step, self._probed())
            self.examined(step, limits or {})
            replayed = step if "incident" in reasons else self._runner.nearest(step)
            for reason in reasons:
                self.examined(replayed, self._runner.run_due(replayed, reason, repeats=repeats))
            for _ in range(ROUNDS):
                diagnosis = diagnose(self._context(finished=finished), self._checks)
                facts = self._runner.run_requested(replayed, diagnosis.requests)
                if not facts:
                    break
                self.examined(replayed, facts)
            self._conclude(diagnosis, replayed)
        return self._runner.now_s() - begin_s - self._runner.replayed_s

    def _context(self, *, finished: bool = False) -> RunContext:
        return RunContext(self._records, finished=finished, decoded=self._decoded)

    def _probed(self) -> Facts:
        """Returns the facts of each probe. A probe that raises is stopped."""
        found: Facts = {}
        for probe in self._probes:
            try:
                facts = probe.values() if probe.failed is None else None
            except Exception as error:
                probe.fail(error)
                continue
            if facts is not None:
                found[probe.name] = facts
                self._runner.is_measured(probe.name, int(facts.get("step", 0)))
        return found

    def examined(self, step: int, outcomes: Facts) -> None:
        """Records the facts of experiments and probes, by name."""
        for name, values in outcomes.items():
            at = values.pop("step", step)
            self.remember(records.Examined(time_s=time.time(), step=at, experiment=name, values=values))

    def _conclude(self, diagnosis: Diagnosis, step: int) -> None:
        """Stores the findings of this diagnosis. A known finding keeps its time, step, trials and source line.

        A remedy that there is no time to try is tried at a later examination.
        """
        now = []
        for each in diagnosis.findings:
            known, found = self._findings.get(each.found.code), each.found
            is_new_place = known is None or (known.where.module is None and found.where.module is not None)
            if known is None or known.where.source is None or is_new_place:
                source, shown_at = self._place_of(found, self._context().calls_at(found.step))
            else:
                source, shown_at = known.where.source, known.where.shown_at
            where = dataclasses.replace(found.where, source=source, shown_at=shown_at)
            found = dataclasses.replace(found, where=where)
            at = step
            if known is None:
                at, found = found.step, dataclasses.replace(found, time_s=time.time())
            else:
                found = dataclasses.replace(found, time_s=known.time_s, step=known.step, tried=known.tried)
            if known is None or found.code in self._untried:
                tried = self._runner.try_remedy(at, each.trial if found.severity in TRIED else None)
                (self._untried.add if tried is None else self._untried.discard)(found.code)
                found = dataclasses.replace(found, tried=(*found.tried, *(tried or ())))
            now.append(found)
        self._findings.update(now, step)
        self._states = diagnosis.checks

    def examination(self) -> Examination:
        """Returns what was examined so far, and what could not be."""
        return Examination.of(self.records, self._states, self._runner.not_run())

    def _record_oldest(self) -> None:
        """Turns the oldest pending step into a record if it is due or has unusual values."""
        step, numbers = self._unrecorded.popleft()
        is_unusual = step.blind is not None or not step.values.keys() <= ORDINARY
        every = 1 if step.step <= EVERY_STEP else 8 if step.step <= EVERY_EIGHTH else 64
        if is_unusual or step.step % every == 0:
            self.remember(as_record(step, numbers))

    def record_all(self) -> None:
        """Turns all pending steps into records."""
        while self._unrecorded:
            self.remember(as_record(*self._unrecorded.popleft()))

    def remember(self, record: Record) -> None:
        """Writes and keeps a record."""
        self._write(record)
        self._records.append(record)
        if len(self._records) > KEPT_RECORDS:
            self._records = without_half_of_the_steps(self._records)
            self._decoded.clear()


def limits_of(ring: Ring, listeners: Mapping[str, Listener]) -> Facts:
    """Returns the limits of the recorder: listeners that failed, a state that is too large. Empty if there are none."""
    failures = failures_of(listeners)
    if not failures and not ring.refused_bytes:
        return {}
    return {
        "limits": {"failures": failures, "refused_bytes": ring.refused_bytes, "budget_bytes": ring.budget_bytes},
    }


def failures_of(listeners: Mapping[str, Listener]) -> list[str]:
    """Returns the exceptions of listeners that were stopped."""
    failed = {name: each.failed for name, each in listeners.items() if each.failed is not None}
    return [f"{name}: {text_of(error)[:200]}" for name, error in failed.items()]
