"""What is known of a watched loop: its steps as records, what closer looks gave, and what the doctor makes of it."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import Diagnosis, diagnose
from trainwright.recorder.hooks import muted
from trainwright.recorder.numbers import Numbers, as_record
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.runlog import records
from trainwright.runlog.records import Found, Record
from trainwright.watching.experiments import ExperimentRunner

Facts = dict[str, dict[str, Any]]
"""What experiments and probes gave, by name."""
EVERY_STEP, KEPT_RECORDS, UNRECORDED = 64, 1024, 16
ORDINARY = {"grads", "step_s", "wait_s", "on_device"}
"""What every step has to tell."""


class FindingsLog:
    """Takes notes of every step, looks at one when asked to, and keeps the findings.

    ``write`` takes every record that is to be kept; ``point_at`` gives the line of the user's source that a code is
    about.
    """

    def __init__(
        self,
        examiner: ExperimentRunner,
        probes: Sequence[Probe],
        write: Callable[[Record], None],
        point_at: Callable[[str], str | None],
    ) -> None:
        self._examiner, self._probes, self._write, self._point_at = examiner, probes, write, point_at
        self._records: list[Record] = []
        self._unrecorded: deque[tuple[RecordedStep, Numbers]] = deque()
        self._found: dict[str, Found] = {}

    @property
    def records(self) -> list[Record]:
        """What is remembered: of a long run not every step."""
        self._record_all()
        return self._records

    def findings(self) -> list[Found]:
        """What is known by now, the first cause first."""
        return list(self._found.values())

    def note(self, segment: RecordedStep, numbers: Numbers) -> None:
        """A step is over. It becomes a record when somebody looks, or later."""
        self._unrecorded.append((segment, numbers))
        if len(self._unrecorded) > UNRECORDED:
            self._record_oldest()

    def look(self, step: int, why: str, limits: Facts, *, finished: bool) -> None:
        """Examines ``step`` and asks the doctor, who may ask for more. ``limits``: what the recorder could not do."""
        with muted():
            self._record_all()
            self.examined(step, self._probed())
            self.examined(step, limits)
            self.examined(step, self._examiner.look(step, why))
            for _ in range(4):
                diagnosis = diagnose(Case(self._records, finished=finished))
                told = self._examiner.grant(step, diagnosis.requests)
                if not told:
                    break
                self.examined(step, told)
            self._conclude(step, diagnosis)

    def _probed(self) -> Facts:
        """What each probe has to tell; one that raises is told nothing any more."""
        found: Facts = {}
        for probe in self._probes:
            try:
                told = probe.values() if probe.failed is None else None
            except Exception as error:
                probe.fail(error)
                continue
            if told is not None:
                found[probe.name] = told
        return found

    def examined(self, step: int, told: Facts) -> None:
        """Writes down what experiments and probes gave, by name."""
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
                where = found.where
                if where.source is None and (line := self._point_at(found.code)):
                    where = dataclasses.replace(where, source=line)
                found = dataclasses.replace(found, time_s=time.time(), where=where, tried=(*found.tried, *tried))
                self._write(found)
            else:
                where = dataclasses.replace(found.where, source=found.where.source or known.where.source)
                found = dataclasses.replace(found, time_s=known.time_s, step=known.step, tried=known.tried, where=where)
            now[found.code] = found
        self._found = now

    def _record_oldest(self) -> None:
        """Every eighth step of a calm run becomes a record, and each that had something to it."""
        segment, numbers = self._unrecorded.popleft()
        is_plain = segment.blind is None and segment.values.keys() <= ORDINARY
        if segment.step <= EVERY_STEP or segment.step % 8 == 0 or not is_plain:
            self._remember(as_record(segment, numbers))

    def _record_all(self) -> None:
        for segment, numbers in self._unrecorded:
            self._remember(as_record(segment, numbers))
        self._unrecorded.clear()

    def _remember(self, record: Record) -> None:
        self._write(record)
        self._records.append(record)
        if len(self._records) > KEPT_RECORDS:  # every other step of the older half is forgotten
            half = len(self._records) // 2
            old = [r for i, r in enumerate(self._records[:half]) if not isinstance(r, records.Watched) or i % 2]
            self._records = old + self._records[half:]
