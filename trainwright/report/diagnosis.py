"""The diagnosis of a run folder, from its log."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.law import LawState
from trainwright.report.findings import LookedAt, exit_code, lines_of
from trainwright.runlog.files import read_text
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.json_values import JsonValue, strict
from trainwright.runlog.reader import LogContents, read_newest
from trainwright.runlog.records import FORMAT_VERSION, Ended, Examined, Found, Started, Watched
from trainwright.version import __version__


@dataclass(frozen=True)
class Report:
    """Findings of one run, the first cause first. ``experiments`` are those that would tell more.

    ``laws`` say what became of each law. ``can_be_trained_again``: from its recipe alone, so that any of its steps can
    be replayed. ``unreadable`` counts the lines of the log that hold no record, ``unknown`` the records of a kind that
    this version does not know; ``format_version`` is that of the run folder.
    """

    run: Path
    findings: tuple[Found, ...]
    experiments: tuple[str, ...]
    looked_at: LookedAt
    step: int
    ended: str | None
    can_be_trained_again: bool
    laws: tuple[LawState, ...] = ()
    unreadable: int = 0
    unknown: int = 0
    format_version: int = FORMAT_VERSION

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{self.run}: step {self.step}, {self.ended or 'no end record: it is running, or was killed'}"
        lines = [head, *self._not_read()]
        if not self.looked_at.steps and not self.findings:
            return [*lines, "no step of it was recorded: set log.doctor: true, or train inside tw.watch(...)"]
        lines += lines_of(self.findings, None, self.looked_at)
        if self.findings:
            lines.append(f"more: trainwright explain {self.findings[0].code}")
        if self.experiments and self.can_be_trained_again:
            lines.append(f"a closer look would tell more: trainwright replay {self.run} --step {self.step}")
        return lines

    def _not_read(self) -> Iterator[str]:
        """What is in the log and not in this diagnosis."""
        if self.format_version > FORMAT_VERSION:
            yield (
                f"its folder has format {self.format_version}, version {__version__} reads format {FORMAT_VERSION}, so "
                "this may be wrong: diagnose it with the version that wrote it"
            )
        if self.unreadable:
            yield f"{self.unreadable:,} lines of its log could not be read: what they say is missing here"
        if self.unknown:
            yield (
                f"{self.unknown:,} records of its log are of kinds that version {__version__} does not know, and are "
                "missing here: diagnose it with the version that wrote it"
            )

    def to_json(self) -> dict[str, JsonValue]:
        """What ``--json`` prints."""
        return {
            "run": str(self.run),
            "step": self.step,
            "ended": self.ended,
            "watched": self.looked_at.steps,
            "looked_at": list(self.looked_at.closely),
            "unreadable": self.unreadable,
            "unknown": self.unknown,
            "format": self.format_version,
            "findings": [strict(found) for found in self.findings],
            "experiments": list(self.experiments),
            "laws": {each.name: {"state": each.state, "why": each.why} for each in self.laws},
        }


def diagnosis_of(folder: RunFolder) -> Report:
    """Reads the log and runs every check again; the results of remedies that the run itself tried are kept."""
    kinds = (Watched, Examined, Found, Ended)
    log = read_newest(folder.log, kinds) if os.path.lexists(folder.log) else LogContents((), 0, torn=False)
    records = log.records
    ends = [record for record in records if isinstance(record, Ended)]
    doctor_was_off = folder.recipe.is_file() and not any(isinstance(record, Watched) for record in records)
    diagnosis = diagnose(Case(records, finished=bool(ends) and not doctor_was_off))
    earlier = {record.code: record for record in records if isinstance(record, Found)}
    findings = [_with_trials_of(earlier.get(each.found.code), each.found) for each in diagnosis.findings]
    steps = [record.step for record in records if isinstance(record, Watched | Examined | Ended)]
    return Report(
        folder.path,
        tuple(findings),
        tuple(dict.fromkeys(each.experiment for each in diagnosis.requests)),  # of several steps: once
        LookedAt.of(records),
        max(steps, default=0),
        f"{ends[-1].ending} {ends[-1].reason}".strip() if ends else None,
        _can_be_trained_again(folder),
        diagnosis.laws,
        log.broken_lines,
        log.unknown,
        max((record.format_version for record in records if isinstance(record, Started)), default=FORMAT_VERSION),
    )


def _can_be_trained_again(folder: RunFolder) -> bool:
    """False for a watched loop, and for a run of live objects (``use: live:Net``)."""
    return folder.recipe.is_file() and "use: live:" not in read_text(folder.recipe)


def _with_trials_of(earlier: Found | None, found: Found) -> Found:
    """``found`` with the time, step, trials and source line of the same finding in the log, if it is there."""
    if earlier is None:
        return found
    where = dataclasses.replace(found.where, source=found.where.source or earlier.where.source)
    return dataclasses.replace(found, time_s=earlier.time_s, step=earlier.step, tried=earlier.tried, where=where)
