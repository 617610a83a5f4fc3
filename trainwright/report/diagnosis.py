"""The diagnosis of a run folder, from its log."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.report.findings import lines_of
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.json_values import JsonValue, strict
from trainwright.runlog.reader import read_newest
from trainwright.runlog.records import Ended, Examined, Found, Watched

CRITICAL = 3


@dataclass(frozen=True)
class Report:
    """Findings of one run, the first cause first. ``experiments`` are those that would tell more.

    ``can_be_trained_again``: from its recipe alone, so that any of its steps can be replayed.
    """

    run: Path
    findings: tuple[Found, ...]
    experiments: tuple[str, ...]
    watched: int
    step: int
    ended: str | None
    can_be_trained_again: bool

    @property
    def exit_code(self) -> int:
        return CRITICAL if any(found.severity == "critical" for found in self.findings) else 0

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{self.run}: step {self.step}, {self.ended or 'no end record: it is running, or was killed'}"
        if not self.watched:
            return [
                head,
                "no step of it was recorded: set log.doctor: true, or train inside tw.watch(...)",
            ]
        lines = lines_of(self.findings, None)
        if self.findings:
            lines.append(f"more: trainwright explain {self.findings[0].code}")
        if self.experiments and self.can_be_trained_again:
            command = f"trainwright replay {self.run} --step {self.step}"
            lines.append(f"this would tell more: {', '.join(self.experiments)} ({command})")
        return [head, *lines]

    def to_json(self) -> dict[str, JsonValue]:
        """What ``--json`` prints."""
        return {
            "run": str(self.run),
            "step": self.step,
            "ended": self.ended,
            "watched": self.watched,
            "findings": [strict(found) for found in self.findings],
            "experiments": list(self.experiments),
        }


def diagnosis_of(folder: RunFolder) -> Report:
    """Reads the log and runs every check again; the results of remedies that the run itself tried are kept."""
    records = read_newest(folder.log, (Watched, Examined, Found, Ended)).records if folder.log.is_file() else ()
    ends = [record for record in records if isinstance(record, Ended)]
    diagnosis = diagnose(Case(records, finished=bool(ends)))
    earlier = {record.code: record for record in records if isinstance(record, Found)}
    findings = [_with_trials_of(earlier.get(each.found.code), each.found) for each in diagnosis.findings]
    steps = [record.step for record in records if isinstance(record, Watched | Examined)]
    return Report(
        folder.path,
        tuple(findings),
        tuple(dict.fromkeys(each.experiment for each in diagnosis.requests)),  # of several steps: once
        len([record for record in records if isinstance(record, Watched)]),
        max(steps, default=0),
        f"{ends[-1].ending} {ends[-1].reason}".strip() if ends else None,
        _can_be_trained_again(folder),
    )


def _can_be_trained_again(folder: RunFolder) -> bool:
    """False for a watched loop, and for a run of live objects (``use: live:Net``)."""
    return folder.recipe.is_file() and "use: live:" not in folder.recipe.read_text(encoding="utf-8")


def _with_trials_of(earlier: Found | None, found: Found) -> Found:
    """``found`` with the time, step and trials of the same finding in the log, if it is there."""
    if earlier is None:
        return found
    return dataclasses.replace(found, time_s=earlier.time_s, step=earlier.step, tried=earlier.tried)
