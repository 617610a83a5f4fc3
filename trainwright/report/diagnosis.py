"""The diagnosis of a run folder: what its log tells a doctor who comes later."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.report.findings import lines_of
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.json_values import JsonValue, strict
from trainwright.runlog.reader import read
from trainwright.runlog.records import Ended, Examined, Found, Record, Started, Watched

CRITICAL = 3


@dataclass(frozen=True)
class Report:
    """Findings of one run, the first cause first. ``wishes`` are experiments that would tell more."""

    run: Path
    findings: tuple[Found, ...]
    wishes: tuple[str, ...]
    watched: int
    step: int
    ended: str | None

    @property
    def exit_code(self) -> int:
        return CRITICAL if any(found.severity == "critical" for found in self.findings) else 0

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{self.run}: step {self.step}, {self.ended or 'no last word: it runs, or was killed'}"
        if not self.watched:
            return [head, "no step of it was watched: set log.doctor: true, or train inside tw.watch(model, optimizer)"]
        told = lines_of(self.findings, None)
        if self.findings:
            told.append(f"more: trainwright explain {self.findings[0].code}")
        if self.wishes:
            told.append(
                f"this would tell more: {', '.join(self.wishes)} (trainwright replay {self.run} --step {self.step})"
            )
        return [head, *told]

    def to_json(self) -> dict[str, JsonValue]:
        """What ``--json`` prints."""
        return {
            "run": str(self.run),
            "step": self.step,
            "ended": self.ended,
            "watched": self.watched,
            "findings": [strict(found) for found in self.findings],
            "wishes": list(self.wishes),
        }


def diagnosis_of(folder: RunFolder) -> Report:
    """Reads the log and asks every check again; what was tried while the run lived is kept."""
    every = read(folder.log).records if folder.log.is_file() else ()
    records = _last_process(every)
    ends = [record for record in records if isinstance(record, Ended)]
    diagnosis = diagnose(Case(records, finished=bool(ends)))
    told = {record.code: record for record in records if isinstance(record, Found)}
    findings = [_with_what_was_tried(said.found, told.get(said.found.code)) for said in diagnosis.findings]
    steps = [record.step for record in records if isinstance(record, Watched | Examined)]
    return Report(
        folder.path,
        tuple(findings),
        tuple(wish.experiment for wish in diagnosis.requests),
        len([record for record in records if isinstance(record, Watched)]),
        max(steps, default=0),
        f"{ends[-1].ending} {ends[-1].reason}".strip() if ends else None,
    )


def _last_process(records: tuple[Record, ...]) -> tuple[Record, ...]:
    begins = [number for number, record in enumerate(records) if isinstance(record, Started)]
    return records[begins[-1] :] if begins else records


def _with_what_was_tried(found: Found, earlier: Found | None) -> Found:
    if earlier is None:
        return found
    return dataclasses.replace(found, time_s=earlier.time_s, step=earlier.step, tried=earlier.tried)
