"""The diagnosis of a run folder, from its log, and the list of checks with their results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.check import CheckState
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.discovery import all_checks
from trainwright.report.examination import Examination, can_be_trained_again
from trainwright.report.findings import exit_code, lines_of
from trainwright.report.verdict import verdict_of
from trainwright.runs.findings import findings_in
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import JsonValue, strict
from trainwright.runs.reader import LogContents, read_end, read_newest, state_of
from trainwright.runs.records import (
    FORMAT_VERSION,
    Ended,
    Examined,
    Found,
    RunVerdict,
    Started,
    Step,
    Unexamined,
    Watched,
    Withdrawn,
)
from trainwright.version import __version__


@dataclass(frozen=True)
class Report:
    """The diagnosis of one run. Findings are in order, root causes first.

    Args:
        findings: Findings in the log, which every other view of the run shows, too.
        added: Findings that this version's checks make in the records, but the run itself did not.
        experiments: Names of experiments that checks request, and that a replay could run.
        can_be_trained_again: True if the recipe suffices to train again, so that any step can be replayed.
        unreadable: Number of lines of the log that hold no record.
        unknown: Number of records of a kind that this version does not support.
        had_ranks: True if the run had several ranks when it was started last.
        verbose: Print findings below a warning, too.
    """

    run: Path
    findings: tuple[Found, ...]
    added: tuple[Found, ...]
    experiments: tuple[str, ...]
    examination: Examination
    step: int
    state: str
    verdict: RunVerdict
    can_be_trained_again: bool
    unreadable: int = 0
    unknown: int = 0
    format_version: int = FORMAT_VERSION
    had_ranks: bool = False
    verbose: bool = False

    @property
    def checks(self) -> Sequence[CheckState]:
        return self.examination.checks

    @property
    def exit_code(self) -> int:
        return exit_code((*self.findings, *self.added))

    def lines(self) -> list[str]:
        lines = [f"{self.run}: step {self.step:,}, {self.state}", f"verdict: {self.verdict}", *self._omissions()]
        if not self.examination.steps and not self.findings and not self.added:
            other = "set log.doctor: true, or train inside tw.watch(...)"
            if self.had_ranks:
                other = "several ranks are only compared with each other; all checks need a run in one process"
            return [*lines, f"no step of it was recorded: {other}"]
        if self.findings or not self.added:
            lines += lines_of(self.findings, self.run, verbose=self.verbose)
        if self.added:
            lines += ["found now, and not by the run itself:", *lines_of(self.added, self.run, verbose=self.verbose)]
        lines += self.examination.lines(self.run)
        if self.experiments and self.can_be_trained_again:
            lines.append(f"for a closer examination: trainwright replay {self.run} --step {self.step}")
        return lines

    def _omissions(self) -> Iterator[str]:
        if self.format_version > FORMAT_VERSION:
            yield (
                f"its folder has format {self.format_version}, version {__version__} reads format {FORMAT_VERSION}, so "
                "this may be wrong: diagnose it with the version that wrote it"
            )
        if self.unreadable:
            yield f"{self.unreadable:,} lines of its log could not be read and are missing here"
        if self.unknown:
            yield (
                f"{self.unknown:,} records of its log are of kinds that version {__version__} does not support and "
                "are missing here: diagnose it with the version that wrote it"
            )

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "run": str(self.run),
            "step": self.step,
            "state": self.state,
            "verdict": strict(self.verdict),
            "examined": self.examination.to_json(),
            "unreadable": self.unreadable,
            "unknown": self.unknown,
            "format": self.format_version,
            "findings": [strict(found) for found in self.findings],
            "added": [strict(found) for found in self.added],
            "experiments": list(self.experiments),
            "checks": {each.code: {"state": each.state, "why": each.why} for each in self.checks},
        }


def diagnosis_of(folder: RunFolder) -> Report:
    """Read the findings from the log, and apply every check to its records again."""
    kinds = (Watched, Examined, Unexamined, Found, Withdrawn, Ended)
    log = read_newest(folder.log, kinds) if os.path.lexists(folder.log) else LogContents((), 0, torn=False)
    records = log.records
    newest = read_end(folder.log) if os.path.lexists(folder.log) else ()
    starts = [record for record in records if isinstance(record, Started)]
    ends = [record for record in records if isinstance(record, Ended)]
    doctor_was_off = folder.recipe.is_file() and not any(isinstance(record, Watched) for record in records)
    diagnosis = diagnose(RunContext(records, finished=bool(ends) and not doctor_was_off))
    findings = findings_in(records)
    experiments = tuple(dict.fromkeys(each.experiment for each in diagnosis.requests))
    return Report(
        folder.path,
        tuple(findings),
        tuple(_new_findings([each.found for each in diagnosis.findings], findings)),
        experiments,
        Examination.of(records, diagnosis.checks, experiments),
        max((each.step for each in (*records, *newest) if isinstance(each, Watched | Ended | Step)), default=0),
        state_of(folder.path, records),
        verdict_of(folder),
        can_be_trained_again(folder.path),
        log.broken_lines,
        log.unknown,
        max((each.format_version for each in starts), default=FORMAT_VERSION),
        had_ranks=bool(starts) and "ranks" in starts[-1].settings,
    )


def _new_findings(again: Sequence[Found], known: Sequence[Found]) -> Iterator[Found]:
    """Yield findings that the log has neither directly nor as a consequence of another one."""
    codes = {each.code for each in known} | {each.partition(":")[0] for found in known for each in found.consequences}
    return (each for each in again if each.code not in codes)


_MARKS = {"found": "FOUND", "passed": "passed", "not applicable": "-", "not examined": "?"}


@dataclass(frozen=True)
class CheckList:
    """The list of checks. ``states`` are their results in a run; None without a run."""

    states: Sequence[CheckState] | None = None

    exit_code = 0

    def lines(self) -> list[str]:
        """Return each check with its title, or with its result and reason, as text."""
        if self.states is None:
            checks = all_checks()
            width = max(len(each.code) for each in checks)
            return [f"{each.code:{width}}  {each.page.title}" for each in checks]
        width = max((len(each.code) for each in self.states), default=0)
        lines = [f"{each.code:{width}}  {_MARKS[each.state]:6}  {each.why}" for each in self.states]
        counts: Counter[str] = Counter(each.state for each in self.states)
        return [*lines, ", ".join(f"{counts[state]} {state}" for state in _MARKS)]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the output of ``--json``: by code, what each check finds, or its result in the run."""
        if self.states is None:
            checks = all_checks()
            facts = {
                each.code: {"finds": each.page.title, "severity": each.severity, "stage": each.stage} for each in checks
            }
            return {"checks": facts}
        return {"checks": {each.code: {"state": each.state, "why": each.why} for each in self.states}}
