"""The read-only tools for agents. They return plain values."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.agent.untrusted import DEFAULT_BUDGET_TOKENS, MAX_KEY_CHARS, MAX_TEXT_CHARS, budget_chars, cleaned
from trainwright.doctor import facts
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.calls import CallsFacts, OptimizerFacts, kinds
from trainwright.doctor.facts.weights import UpdateFacts
from trainwright.doctor.finding import Calls
from trainwright.doctor.pages import page
from trainwright.errors import UsageError
from trainwright.report.diagnosis import Report, diagnosis_of
from trainwright.report.evidence import environment_of, finding_in, lines_named, points_around
from trainwright.report.examination import can_be_trained_again
from trainwright.report.findings import place, value_in_words
from trainwright.report.pages.compare import Difference, RunComparison
from trainwright.report.pages.overview import RunShelf
from trainwright.report.pages.rows import COLUMNS, column, thin_rows
from trainwright.report.pages.view import RunView, flat
from trainwright.report.runs import list_runs
from trainwright.report.source_lines import Excerpt, construction_of, excerpt_of, source_names
from trainwright.runs.files import UnreadableFile, read_end_of_text, read_json
from trainwright.runs.folder import RunFolder
from trainwright.runs.media import FOLDER, SUFFIXES, MediaFile, read_media
from trainwright.runs.printing import readable
from trainwright.runs.reader import read_newest
from trainwright.runs.records import Examined, Found, Layers, Media, OutputGrads, Record, Replayed, Watched

MAX_OPTIMIZERS = 8


def optimizer_lines(run: RunContext) -> dict[int, dict[str, str]]:
    """Return for each optimizer the first recorded lines of its calls of ``step`` and ``zero_grad``.

    A step records its events and their lines in the same order. Steps where a line is missing are left out.
    """
    found: dict[int, dict[str, str]] = {}
    for step in run.steps:
        recorded = step.values.get("lines") or ()
        for kind in ("step", "zero_grad") if recorded else ():
            numbers = _numbers(step, kind)
            lines = [str(line) for each, line in recorded if each == kind]
            for number, line in zip(numbers, lines) if len(numbers) == len(lines) else ():
                if 0 <= number < MAX_OPTIMIZERS:  # -1 is a module
                    found.setdefault(number, {}).setdefault(kind, line)
    return found


def _numbers(step: Watched, kind: str) -> list[int]:
    """Return the numbers of the optimizers of the calls of a kind, in order."""
    values = [value["optimizer"] if isinstance(value, dict) else value for _, value in kinds(step, kind)]
    return [each if isinstance(each, int) else -1 for each in values]


def optimizers_of(run: RunContext, code: Path, began_s: float | None) -> list[dict[str, object]]:
    """Return what is known about each optimizer: construction, line of its step, parameter groups."""
    facts = [each for _, each in run.every(CallsFacts)]
    decays = _weight_decays(run, facts[-1].optimizers) if facts else {}
    lines = optimizer_lines(run)
    made: list[dict[str, object]] = []
    for number in sorted({*lines, *range(len(facts[-1].optimizers) if facts else 0)})[:MAX_OPTIMIZERS]:
        called = lines.get(number, {})
        sources = [called[each] for each in ("step", "zero_grad") if each in called]
        built = next((each for line in sources if (each := construction_of(line, code, began_s=began_s))), None)
        known = {"optimizer": number, **{f"{kind}_line": line for kind, line in called.items()}}
        if built is not None:
            known |= {"class": built.kind, "variable": built.variable, "made_line": built.line, "made_by": built.call}
            known |= {"note": built.note} if built.note else {}
        made.append({**known, "groups": _groups(number, facts, decays.get(number, []))})
    return made


def optimizer_in_words(optimizer: Mapping[str, object]) -> str:
    """Return the class, the variable and the lines of an optimizer as one line; "" if none is known."""
    names = " ".join(str(optimizer[each]) for each in ("class", "variable") if optimizer.get(each))
    lines = [
        f"{word} {optimizer[key]}"
        for word, key in (("made", "made_line"), ("step", "step_line"), ("zero_grad", "zero_grad_line"))
        if optimizer.get(key)
    ]
    parts = [*([names] if names else []), *lines, *([str(optimizer["note"])] if optimizer.get("note") else [])]
    return f"optimizer {optimizer['optimizer']}: {', '.join(parts)}" if parts else ""


def _groups(number: int, facts: list[CallsFacts], decays: list[float]) -> list[dict[str, object]]:
    """Return the groups of an optimizer: number of tensors, first and last learning rate, weight decay."""
    examined = [each.optimizers[number].groups for each in facts if number < len(each.optimizers)]
    groups: list[dict[str, object]] = []
    for index, last in enumerate(examined[-1] if examined else ()):
        first = examined[0][index] if index < len(examined[0]) else last
        group: dict[str, object] = {"tensors": last.parameters, "lr": first.lr}
        group |= {"lr_at_end": last.lr} if last.lr != first.lr else {}
        group |= {"weight_decay": decays[index]} if index < len(decays) else {}
        groups.append(group)
    return groups


def _weight_decays(run: RunContext, optimizers: Sequence[OptimizerFacts]) -> dict[int, list[float]]:
    """Return the weight decays by optimizer. A replayed update lists them in the order in which optimizers step."""
    orders = {each.step: [n for n in _numbers(each, "step") if 0 <= n < len(optimizers)] for each in run.steps}
    found: dict[int, list[float]] = {}
    for at, update in run.every(UpdateFacts):
        rest, order = list(update.weight_decay), orders.get(at, [])
        if len(rest) == sum(len(optimizers[number].groups) for number in order):
            for number in order:
                num_groups = len(optimizers[number].groups)
                found.setdefault(number, rest[:num_groups])
                rest = rest[num_groups:]
    return found


MAX_CHARS = 60
_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(.*))?")
_COMMENT = re.compile(r"    #\s*(.*)")


@cache
def _kinds() -> dict[str, type]:
    """Return the classes of facts by the names of their experiments."""
    modules = [import_module(f"{facts.__name__}.{each.name}") for each in pkgutil.iter_modules(facts.__path__)]
    classes = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
    return {str(vars(each)["experiment"]): each for each in classes if "experiment" in vars(each)}


def described(experiment: str, limit: int = MAX_CHARS) -> str:
    """Return the first sentence about an experiment, shortened; "" for one that has no class."""
    kind = _kinds().get(experiment)
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()) if kind is not None else ""
    return _shortened(re.split(r"(?<=[.:;]) ", text)[0].rstrip(".:;"), limit)


def described_fields(experiment: str) -> dict[str, str]:
    """Return the comments on the fields of an experiment: at the end of the line, or in the lines before it."""
    found: dict[str, str] = {}
    kind, before = _kinds().get(experiment), ""
    for line in inspect.getsource(kind).splitlines() if kind is not None else ():
        if comment := _COMMENT.fullmatch(line):
            before = f"{before} {comment[1]}".strip()
            continue
        if (field := _FIELD.fullmatch(line)) and (text := field[2] or before):
            found[field[1]] = _shortened(text, 2 * MAX_CHARS)
        before = ""
    return found


def _shortened(text: str, limit: int) -> str:
    text = text.replace("`", "")
    return text if len(text) <= limit else f"{text[:limit].rpartition(' ')[0]} ..."


MAX_POINTS = 400
FILE_KINDS = (".json", ".jsonl", ".md", ".txt", ".yaml")
MAX_FILE_BYTES = 8192
DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""Errors of values in a damaged log."""
_HIDDEN_METRICS = {"order", "time_s", "step"}


class RunTools:
    """Reads the runs of the folder ``runs``, which may also be a run, and source lines from the folder ``code``.

    The tools take run names from ``list_runs``, and never build a path from them.
    """

    def __init__(self, runs: Path, code: Path) -> None:
        self.root, self.code = runs, code
        self._shelf = RunShelf([runs])

    def folder(self, run: str) -> RunFolder:
        """Return the run with this name. Raises UsageError for any other text, such as a path."""
        known: dict[str, Path] = {}
        for name, path in sorted(
            self._shelf.runs().items(), key=lambda each: cleaned(each[0], MAX_KEY_CHARS) != each[0]
        ):
            known.setdefault(cleaned(name, MAX_KEY_CHARS), path)  # unchanged names precede cleaned ones, so they win
        if run not in known:
            raise UsageError(
                f"there is no run {run[:MAX_KEY_CHARS]!r}", remedy="use a name from list_runs; paths are refused"
            )
        return RunFolder.open(known[run])

    def is_of_run(self, path: Path) -> bool:
        """Return True if a path is in the folder of the runs. If that folder also holds the code: if it is in a run."""
        runs = self.root.resolve()
        folders = self._shelf.runs().values() if self.code.resolve().is_relative_to(runs) else (runs,)
        return any(path.resolve().is_relative_to(each.resolve()) for each in folders)

    def list_runs(self, query: str = "", limit: int = 20) -> dict[str, object]:
        """List runs, the newest first. query: a part of the name, the state, the verdict or a finding's code."""
        known = {path.resolve() for path in self._shelf.runs().values()}
        is_run = known == {self.root.resolve()}
        table = list_runs(self.root.resolve().parent if is_run else self.root)
        rows = [row for row in reversed(table.rows) if row.run.resolve() in known]
        found = [
            {
                "run": cleaned(readable(row.run.name), MAX_KEY_CHARS),
                "state": row.state,
                "verdict": row.verdict.sentence,
                "step": row.step,
                "loss": row.loss,
                "val_loss": row.val_loss,
                **({"media": list(row.media)} if row.media else {}),
                "began": datetime.fromtimestamp(min(max(row.began_s, 0.0), 4e9), UTC).isoformat(timespec="minutes"),
            }
            for row in rows
            if query.lower() in f"{row.run.name} {row.state} {row.verdict.word} {row.verdict.sentence}".lower()
        ]
        return {"runs": found[: max(1, limit)], "total": len(found)}

    def diagnose_run(self, run: str) -> dict[str, object]:
        """State, verdict and findings of a run, the first cause first: what is wrong, the code line, the cause, the
        remedy.
        """
        folder = self.folder(run)
        report = diagnosis_of(folder)
        records = self._records(folder)
        context = RunContext(records)
        findings = (*report.findings, *report.added)
        calls = _calls_at(context, findings[0].step if findings else report.step)
        experiments = report.examination.unexamined.experiments if report.examination.unexamined else ()
        return {
            "run": run,
            "state": report.state,
            "step": report.step,
            "verdict": report.verdict.sentence,
            "findings": [_finding_values(each) for each in findings],
            "calls": list(dict.fromkeys(f"{kind} {line}" for kind, line in calls)),
            "optimizers": [text for each in self._optimizers(records) if (text := optimizer_in_words(each))],
            "not_examined": [*experiments, *(why for why, _ in report.examination.blind)],
            "replay": _replayable_steps(folder),
        }

    def finding_evidence(self, run: str, code: str = "") -> dict[str, object]:
        """Evidence for one finding beside diagnose_run: all expected and seen values, recorded steps around it, source
        lines, replays. code: as in diagnose_run; default: the first finding.
        """
        folder = self.folder(run)
        found = finding_of(run, diagnosis_of(folder), code)
        records = self._records(folder, Watched, Examined, Replayed)
        lines = lines_named(found, _calls_at(RunContext(records), found.step))
        points = points_around(RunView.read(folder.path), found)
        replays = [each for each in records if isinstance(each, Replayed)]
        return {
            "code": found.code,
            "expected_and_seen": [
                [
                    each.measure,
                    value_in_words(each.seen),
                    "" if each.expected is None else value_in_words(each.expected),
                ]
                for each in found.evidence
            ],
            **_excerpt(excerpt_of(lines, self.code, began_s=_began_s(records))),
            "step_loss_gradnorm_lr": [[each.step, each.loss, each.grad_norm, each.lr] for each in points],
            "replays": [f"replay of step {each.step:,}: {each.outcome}" for each in replays],
        }

    def source_lines(
        self, run: str, code: str = "", line: str = "", budget: int = DEFAULT_BUDGET_TOKENS
    ) -> dict[str, object]:
        """The source lines that cause a finding (default: the first finding) and those at which it shows; without a
        finding those of the loop; or those around line, such as train.py:44. More lines with a larger budget.
        """
        folder = self.folder(run)
        records = self._records(folder)
        context = RunContext(records)
        if line:
            lines = [self._source(line, context)]
        else:
            report = diagnosis_of(folder)
            calls = _calls_at(context, report.step)
            lines = sorted((each for _, each in calls), key=lambda each: ("backward", each) not in calls)
            if report.findings or report.added or code:
                found = finding_of(run, report, code)
                lines = lines_named(found, _calls_at(context, found.step))
        began_s, max_chars = _began_s(records), budget_chars(budget) // 2
        excerpt = excerpt_of(lines, self.code, began_s=began_s, max_chars=max_chars)
        others = [each for each in lines[1:] if excerpt is None or not excerpt.shows(each)]
        shown = excerpt_of(others, self.code, began_s=began_s, max_chars=max_chars // 2)
        return {
            **_excerpt(excerpt),
            "shown_file": shown.file if shown else "",
            "shown_lines": shown.numbered() if shown else [],
            "why": "" if excerpt else "the step made no recorded call from a Python file of the user",
        }

    def _source(self, line: str, run: RunContext) -> str:
        """Return a line such as ``train.py:44`` of a file that exists. Raises UsageError, with the known file names."""
        name, colon, number = line.rpartition("/")[2].partition(":")
        known = source_names(self.code, name)
        if name not in known or not (number if colon else "1").isdecimal():
            of_run = [each.partition(":")[0] for _, each in _calls_at(run, run.last_step)]
            names = dict.fromkeys([*of_run, *source_names(self.code)])
            raise UsageError(
                f"there is no line {line[:MAX_KEY_CHARS]!r}",
                remedy=f"use FILE.py:LINE; known files: {', '.join(list(names)[:20])}",
            )
        return f"{name}:{number if colon else 1}"

    def get_series(
        self, run: str, metric: str = "", points: int = 40, first_step: int = 0, last_step: int = 2**53
    ) -> dict[str, object]:
        """A metric over steps as [step, value]. Downsampling keeps minima and maxima. Without metric: the names of all
        metrics.
        """
        view = RunView.read(self.folder(run).path)
        series = dict(_metric_series(view))
        if metric not in series:
            names = [cleaned(name, MAX_KEY_CHARS) for name in series]
            if metric:
                raise UsageError(f"there is no metric {metric!r}", remedy=f"known metrics: {', '.join(names[:40])}")
            return {"metrics": names}
        steps, values = series[metric]
        wanted = (steps >= first_step) & (steps <= last_step) & ~np.isnan(values)
        thin = _downsample(steps[wanted], values[wanted], min(max(points, 4), MAX_POINTS))
        shown = [[int(step), value if np.isfinite(value) else "not finite"] for step, value in thin]
        return {"metric": metric, "count": int(wanted.sum()), "points": shown}

    def layer_statistics(self, run: str, step: int = 0, top: int = 12) -> dict[str, object]:
        """Statistics by layer at the newest recorded step, or at the one nearest to step. Layers whose gradient norm
        differs from the median by the largest factor come first.
        """
        records = self._records(self.folder(run), Layers, OutputGrads)
        layers = [each for each in records if isinstance(each, Layers)]
        if not layers or not any(each.grad_norm for each in layers):
            raise UsageError(
                "this run has no statistics by layer",
                remedy="read measurements(experiment='layer_outputs' or 'update'), or set log.layers in the recipe",
            )
        names = next((each.layers for each in layers if each.layers), ())
        layers = [each for each in layers if each.grad_norm]
        chosen = min(layers, key=lambda each: abs(each.step - step)) if step else layers[-1]
        columns = ("grad_norm", "update_ratio", "act_mean", "act_std", "act_max")
        recorded = [name for name in columns if len(getattr(chosen, name)) == len(names)]
        if "grad_norm" not in recorded:
            raise UsageError("the statistics by layer are damaged", remedy="read measurements")
        rows = [[name, *(getattr(chosen, each)[index] for each in recorded)] for index, name in enumerate(names)]
        logs = np.log(np.maximum(np.nan_to_num([float(row[1]) for row in rows]), 1e-30))
        order: list[int] = np.argsort(-np.abs(logs - np.median(logs)), kind="stable").tolist() if rows else []
        shown = [rows[index] for index in order[: max(1, top)]]
        steps = [each.step for each in layers]
        return {"step": chosen.step, "columns": ["layer", *recorded], "layers": shown, "steps": [steps[0], steps[-1]]}

    def measurements(self, run: str, experiment: str = "", step: int = 0) -> dict[str, object]:
        """Measurements of the doctor: the values of one experiment at its newest step, or at the one nearest to step.
        Without experiment: the names, their first and last step, and what they measure.
        """
        records = [each for each in self._records(self.folder(run)) if isinstance(each, Examined)]
        matching = [each for each in records if each.experiment == experiment]
        if not matching:
            steps: dict[str, list[int]] = {}
            for each in records:
                steps.setdefault(each.experiment, []).append(each.step)
            return {
                "experiments": {
                    name: f"{found[0]}-{found[-1]}: {described(name)}" for name, found in sorted(steps.items())
                }
            }
        chosen = min(matching, key=lambda each: abs(each.step - step)) if step else matching[-1]
        recorded = {name for name, value in chosen.values.items() if value not in (None, "", [], {})}
        fields = {name: text for name, text in described_fields(experiment).items() if name in recorded}
        return {
            "experiment": experiment,
            "about": described(experiment, MAX_TEXT_CHARS),
            "step": chosen.step,
            "values": chosen.values,
            "fields": fields,
        }

    def get_setup(self, run: str, part: str = "") -> dict[str, object]:
        """The setup of a run: part is recipe, plan or provenance; default: the recipe, the optimizers of a watched run
        with their parameter groups, and the main versions.
        """
        folder = self.folder(run)
        view = RunView.read(folder.path)
        parts: dict[str, Mapping[str, Any]] = {"recipe": view.recipe, "plan": view.plan, "provenance": view.provenance}
        if part in parts:
            return {part: dict(flat(parts[part])) if parts[part] else {}}
        recipe = dict(flat(view.recipe)) if view.recipe else {}
        optimizers = self._optimizers(self._records(folder))
        return {"recipe": recipe, "optimizers": optimizers, "provenance": dict(environment_of(view))}

    def compare_runs(self, runs: list[str]) -> dict[str, object]:
        """Compare two or more runs: differences of recipe, plan and provenance, the first step whose results differ,
        and the outcomes.
        """
        if len(runs) < 2:
            raise UsageError("compare_runs needs two runs or more", remedy="use names from list_runs")
        comparison = RunComparison.of([RunView.read(self.folder(run).path) for run in runs])
        return {
            "runs": runs,
            "recipe": _differences(comparison.recipe),
            "first_difference": list(comparison.first_differences),
            "provenance": _differences(comparison.provenance),
            "outcomes": [
                {
                    "run": each.name,
                    "state": each.state,
                    "verdict": each.verdict,
                    "step": each.step,
                    "loss": each.loss,
                    "val_loss": each.val_loss,
                    "best": each.best,
                    "findings": list(each.findings),
                }
                for each in comparison.outcomes
            ],
            "plan": _differences(comparison.plan),
        }

    def explain_check(self, code: str = "") -> dict[str, object]:
        """The page of a check: what it detects, how, usual causes, fix. Without code, or with a topic: the codes."""
        return {"code": code, "page": page(code)}

    def read_file(self, run: str, file: str) -> str:
        """Return the end of a text file of a run folder, cleaned. ``file`` is a name without a folder."""
        folder = self.folder(run)
        known = [each.name for each in folder.path.iterdir() if each.suffix in FILE_KINDS and not each.is_symlink()]
        if file not in known:
            raise UsageError(f"the run has no file {file[:80]!r}", remedy=f"it has: {', '.join(sorted(known)[:20])}")
        return cleaned(read_end_of_text(folder.path / file, MAX_FILE_BYTES), MAX_FILE_BYTES)

    def read_media(self, run: str, name: str, step: int) -> MediaFile:
        """Return an image, text or histogram that the run logged, checked. ``name`` is a folder in ``media``."""
        folder = self.folder(run)
        found = [f"{FOLDER}/{name}/step-{step:08d}.{suffix}" for suffix in SUFFIXES.values()]
        there = next((each for each in found if os.path.lexists(folder.path / each)), found[0])
        return read_media(folder.path, Media(time_s=0.0, step=step, name=name, file=there))

    def _optimizers(self, records: Sequence[Record]) -> list[dict[str, object]]:
        try:
            return optimizers_of(RunContext(records), self.code, _began_s(records))
        except DAMAGED:
            return []

    def _records(self, folder: RunFolder, *kinds: type[Record]) -> tuple[Record, ...]:
        if not os.path.lexists(folder.log):
            return ()
        return read_newest(folder.log, kinds or (Watched, Examined)).records


def finding_of(run: str, report: Report, code: str = "") -> Found:
    """Return a finding, as ``finding_in`` does. Raises UsageError; without any finding, it suggests tools."""
    if not (report.findings or report.added):
        remedy = "call source_lines without a code for the lines of the loop, or measurements, get_series, get_setup"
        raise UsageError(f"{run} has no finding", remedy=remedy)
    return finding_in(report, code or None)


def _began_s(records: Sequence[Record]) -> float | None:
    return records[0].time_s if records else None


def _calls_at(run: RunContext, step: int) -> Calls:
    try:
        return run.calls_at(step)
    except DAMAGED:
        return ()


def _finding_values(found: Found) -> dict[str, object]:
    return {
        "code": found.code,
        "severity": found.severity,
        "step": found.step,
        "since_step": found.since_step,
        "where": place(found.where).strip(),
        "line": found.where.source or "",
        "shown_at": found.where.shown_at or "",
        "what": found.symptom,
        "seen": [
            f"{each.measure}: {value_in_words(each.seen)}"
            + ("" if each.expected is None else f" (expected {value_in_words(each.expected)})")
            for each in found.evidence[:3]
        ],
        "cause": found.cause,
        "remedy": found.remedy,
        "tried": [f"{each.remedy}: {each.result}" for each in found.tried],
        "explains": [each.partition(":")[0] for each in found.consequences],
    }


def _replayable_steps(folder: RunFolder) -> str:
    """Return a text on the steps that can be replayed, and on what a replay needs."""
    if can_be_trained_again(folder.path):
        return "any step"
    steps: list[int] = []
    for bundle in sorted(folder.bundles.glob("step-*")) if not folder.bundles.is_symlink() else ():
        try:
            steps.append(int(read_json(bundle / "bundle.json").get("step", 0)))
        except (UnreadableFile, ValueError, AttributeError, TypeError):
            continue
    if steps:
        return f"steps {', '.join(map(str, steps[-8:]))}, with model=FILE.py:FUNCTION that builds the model"
    return "no step: the run saved none"


def _excerpt(excerpt: Excerpt | None) -> dict[str, object]:
    if excerpt is None:
        return {}
    note = f" ({excerpt.note})" if excerpt.note else ""
    return {"file": f"{excerpt.file}{note}", "lines": excerpt.numbered()}


def _differences(found: Sequence[Difference] | None) -> dict[str, list[str]] | str:
    if found is None:
        return "not every run has one"
    return {each.path: list(each.values) for each in found} or "the same"


Points = tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]


def _metric_series(view: RunView) -> Iterator[tuple[str, Points]]:
    """Yield (name, (steps, values)) of every metric of a run. NaN is a missing value, infinity a non-finite one."""
    rows = view.log.rows
    for name in COLUMNS:
        if name not in _HIDDEN_METRICS and np.isfinite(column(rows, name)).any():
            yield name, (column(rows, name), column(rows, "step"))[::-1]
    for name, points in view.log.figures.series():
        yield name, points
    columns = view.log.readings.columns()
    for name, values in columns.items():
        if name not in _HIDDEN_METRICS:
            yield name, (columns["step"], values)
    seen = [(float(each.step), each.loss) for each in view.evaluations]
    if seen:
        steps, losses = np.array(seen, dtype=np.float64).T
        yield "validation.loss", (steps, losses)


def _downsample(
    steps: np.ndarray[Any, np.dtype[np.float64]], values: np.ndarray[Any, np.dtype[np.float64]], points: int
) -> list[tuple[float, float]]:
    """Return about ``points`` points: the minimum, the maximum and a non-finite value of each interval of steps."""
    rows = np.full((len(steps), len(COLUMNS)), np.nan)
    column(rows, "step")[:] = steps
    column(rows, "loss")[:] = np.where(np.isfinite(values), values, np.inf)
    thin = thin_rows(rows, max(1, points // 4)) if len(rows) > points else rows
    return [(float(step), float(value)) for step, value in zip(column(thin, "step"), column(thin, "loss"))]
