"""Writes the evidence for one finding as a Markdown file, for an issue, a colleague or a language model.

Secrets and the user's home folder are masked. Text from the run is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainwright.doctor.context import RunContext
from trainwright.doctor.discovery import check_of
from trainwright.doctor.finding import Calls, line_of_stage
from trainwright.errors import UsageError, suggest
from trainwright.report.diagnosis import Report, diagnosis_of
from trainwright.report.findings import place, value_in_words
from trainwright.report.pages.rows import column
from trainwright.report.pages.view import RunView
from trainwright.report.source_lines import excerpt_of
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import JsonValue
from trainwright.runs.printing import visible
from trainwright.runs.reader import read_newest
from trainwright.runs.records import Evaluated, Examined, Found, Record, Replayed, Started, Watched
from trainwright.runs.secrets import masked_code
from trainwright.runs.storage import write_atomically
from trainwright.version import __version__

RECORDS_AROUND = 6
"""Number of records shown before and after the step at which the finding began, and before and after its last step."""
MAX_TEXT_CHARS = 2000
MAX_RECIPE_CHARS = 6000
MAX_EVALUATIONS = 8


class CurvePoint(NamedTuple):
    """One recorded step. A value is None if it was not recorded."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None


@dataclass(frozen=True)
class WrittenEvidence:
    """The result of ``write_evidence``."""

    path: Path
    code: str
    num_chars: int
    exit_code = 0

    def lines(self) -> list[str]:
        return [f"{self.path}  ({self.num_chars:,} characters; secrets are masked, but read it before you send it)"]

    def to_json(self) -> dict[str, JsonValue]:
        return {"path": str(self.path), "code": self.code, "characters": self.num_chars}


def write_evidence(
    folder: RunFolder, code: str | None = None, *, code_root: Path | None = None, out: Path | None = None
) -> WrittenEvidence:
    """Write the evidence for a finding as Markdown.

    Args:
        folder: The run.
        code: The code of the finding; None for the first finding.
        code_root: The folder of the user's code. Default: the current folder.
        out: The file to write. Default: ``evidence-CODE.md`` in the run folder.

    Raises:
        UsageError: The run has no such finding.
        StorageError: The file cannot be written.
    """
    report = diagnosis_of(folder)
    found = finding_in(report, code)
    text = _markdown(folder, report, found, code_root or Path.cwd())
    path = out or folder.path / f"evidence-{re.sub(r'[^A-Za-z0-9._-]', '_', found.code)[:80]}.md"
    write_atomically(path, text, durable=False)
    return WrittenEvidence(path, found.code, len(text))


def _markdown(folder: RunFolder, report: Report, found: Found, code_root: Path) -> str:
    records = read_newest(folder.log, (Watched, Examined, Replayed)).records
    view = RunView.read(folder.path)
    check = check_of(found.code)
    title = check.page.title if check is not None else ""
    since = "" if found.since_step in (None, found.step) else f", since step {found.since_step:,}"
    evidence = [
        (each.measure, value_in_words(each.seen), "" if each.expected is None else value_in_words(each.expected))
        for each in found.evidence
    ]
    parts = [
        f"# {_inline(found.code)}" + (f": {_inline(title)}" if title else ""),
        f"**{_inline(found.severity)}** in run {_inline(view.name)} {_inline(place(found.where))}, "
        f"step {found.step:,}{since}. Confidence {found.sure:.0%}. Run: {_inline(report.verdict.sentence)}.",
        f"**What is wrong.** {_inline(found.symptom)}",
        "## Expected and seen",
        _table(("measure", "seen", "expected"), evidence),
        f"**Cause.** {_inline(found.cause)}",
        f"**Remedy.** {_inline(found.remedy)}",
        "## What was tried",
        "\n".join(_trials(found, records)) or "Nothing was tried in a replay.",
    ]
    if points := list(points_around(view, found)):
        head = ("step", "loss", "gradient norm", "learning rate")
        parts += ["## Recorded steps", _table(head, _rows_of(points, {found.step, found.since_step}))]
    if evaluations := _nearest_evaluations(view.evaluations, found.step):
        rows = [(f"{each.step:,}", value_in_words(each.loss)) for each in evaluations]
        parts.append(_table(("step", "validation loss"), rows))
    parts += _code_section(found, records, code_root)
    if others := [each for each in (*report.findings, *report.added) if each.code != found.code]:
        lines = [f"- {each.severity}: {_inline(each.code)}: {_inline(each.symptom)}" for each in others]
        parts += ["## Other findings of this run", "\n".join(lines)]
    parts += ["## Environment", _table(("what", "value"), list(environment_of(view)))]
    if view.recipe_text:
        parts += ["## Recipe", _fenced(view.recipe_text[:MAX_RECIPE_CHARS], "yaml")]
    parts.append(
        f"Written by Trainwright {__version__}: `trainwright evidence RUN --finding {_inline(found.code)}`. "
        f"About this finding: `trainwright explain {_inline(found.code)}`. Secrets are masked."
    )
    return "\n\n".join(parts) + "\n"


def _trials(found: Found, records: Sequence[Record]) -> Iterator[str]:
    """Yield the results of remedies and replays, and the experiments that ran on the step of the finding."""
    yield from (f"- {_inline(each.remedy)}: {_inline(each.result)}" for each in found.tried)
    replays = [each for each in records if isinstance(each, Replayed)]
    yield from (f"- replay of step {each.step:,}: {_inline(each.outcome)}" for each in replays)
    examined = [each for each in records if isinstance(each, Examined) and each.step == found.step]
    names = dict.fromkeys(_inline(each.experiment) for each in examined if "blind" not in each.values)
    if names:
        yield f"- experiments on a replay of step {found.step:,}: {', '.join(names)}"


def _rows_of(points: Sequence[CurvePoint], marked: Collection[int | None]) -> list[tuple[str, ...]]:
    """Return a row for each step, with ``...`` between steps that are far apart."""
    gaps = [after.step - before.step for before, after in pairwise(points)]
    stride = max(1, min(gaps, default=1))
    rows: list[tuple[str, ...]] = []
    for gap, each in zip([0, *gaps], points, strict=True):
        if gap > 2 * stride:
            rows.append(("...", "", "", ""))
        step = f"**{each.step:,}**" if each.step in marked else f"{each.step:,}"
        rows.append((step, *(_format_number(value) for value in each[1:])))
    return rows


def _code_section(found: Found, records: Sequence[Record], code_root: Path) -> list[str]:
    calls = RunContext(records).calls_at(found.step)
    began_s = next((each.time_s for each in records if isinstance(each, Started)), None)
    excerpt = excerpt_of(lines_named(found, calls), code_root, began_s=began_s)
    parts = ["## Code"] if calls or excerpt else []
    if calls:
        parts.append("Calls of the step: " + ", ".join(f"{_inline(kind)} {_inline(line)}" for kind, line in calls))
    if excerpt is not None:
        note = f" ({_inline(excerpt.note)})" if excerpt.note else ""
        parts.append(f"{_inline(excerpt.file)}{note}")
        parts += [_fenced("\n".join(excerpt.numbered()), "python")] if excerpt.lines else []
    return parts


def finding_in(report: Report, code: str | None) -> Found:
    """Return the finding with this code, or the first one if ``code`` is None. Raises UsageError if there is none."""
    findings = (*report.findings, *report.added)
    if not findings:
        raise UsageError(
            f"{report.run} has no finding", remedy=f"see what was checked: trainwright checks {report.run}"
        )
    if code is None:
        return findings[0]
    for each in findings:
        if each.code == code:
            return each
    for each in findings:
        if code in {consequence.partition(":")[0] for consequence in each.consequences}:
            raise UsageError(f"{code} is a consequence of {each.code}", remedy=f"name {each.code}")
    raise UsageError(f"{report.run} has no finding {code!r}", remedy=suggest(code, [each.code for each in findings]))


def lines_named(found: Found, calls: Calls) -> list[str]:
    """Return the source lines of the cause and of the symptom; if neither is known, those of the calls of its step."""
    named = [line for line in (found.where.source, found.where.shown_at) if line]
    nearest = line_of_stage(found, calls)
    return named or [*([nearest] if nearest else []), *(line for _, line in calls)]


def points_around(view: RunView, found: Found) -> Iterator[CurvePoint]:
    """Yield the recorded steps around the first and the last step of a finding."""
    rows = view.log.rows
    steps = column(rows, "step")
    kept: set[int] = set()
    for at in {found.step if found.since_step is None else found.since_step, found.step}:
        nearest = int(np.searchsorted(steps, at))
        kept |= set(range(max(0, nearest - RECORDS_AROUND), min(len(steps), nearest + RECORDS_AROUND + 1)))
    for index in {int(steps[each]): each for each in sorted(kept)}.values():  # a step may have two records
        values = (float(column(rows, name)[index]) for name in ("loss", "grad_norm", "lr"))
        yield CurvePoint(int(steps[index]), *(None if np.isnan(each) else each for each in values))


def environment_of(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield the environment of a run: versions, commit, device, command."""
    provenance = view.provenance
    starts = [each for each in view.log.notes(Started) if isinstance(each, Started)]
    if starts:
        yield "trainwright", starts[-1].version
    packages = provenance.get("packages") or {}
    versions = packages.get("versions", {})
    yield from [("python", provenance["python"])] if provenance.get("python") else []
    yield from [(name, str(version)) for name, version in versions.items()][:20]
    git = provenance.get("git") or {}
    if git.get("commit"):
        yield "commit", f"{git['commit']}{' with uncommitted changes' if git.get('dirty') else ''}"
    for name in ("device", "precision", "threads", "parameters"):
        if view.plan.get(name):
            yield name, str(view.plan[name])
    yield from [("driver", provenance["driver"])] if provenance.get("driver") else []
    yield from sorted((provenance.get("environment") or {}).items())[:20]
    if starts and starts[-1].command:
        yield "command", " ".join(starts[-1].command)


def _nearest_evaluations(evaluations: Sequence[Evaluated], step: int) -> list[Evaluated]:
    near = sorted(evaluations, key=lambda each: abs(each.step - step))[:MAX_EVALUATIONS]
    return sorted(near, key=lambda each: each.step)


def _shareable(text: str) -> str:
    """Return a text with secrets masked, invisible characters escaped, and the user's home folder as ``~``."""
    home = str(Path.home())
    text = visible(masked_code(text))
    return text.replace(home, "~") if len(home) > 1 else text


def _inline(text: str) -> str:
    """Return text of the run as one line, with HTML tags and links disabled."""
    line = " ".join(_shareable(text[:MAX_TEXT_CHARS]).split())
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line).replace("](", "]\\(")


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}" if math.isfinite(value) else "not finite"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Nothing was recorded."
    cells = [[_inline(each).replace("|", "\\|") for each in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(text: str, language: str) -> str:
    """Return a code block whose fence is longer than any in the text."""
    ticks = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (ticks + 1)
    return f"{fence}{language}\n{_shareable(text)}\n{fence}"
