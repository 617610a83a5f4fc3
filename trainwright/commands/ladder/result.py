"""The result of a ladder: the table, ``ladder.json``, and the best recipe with a comment for each decision."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.commands.ladder.judge import BAND_FACTOR, MIN_BAND, Band, MeasuredRung, RungVerdict
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.runs.figures import figure
from trainwright.runs.json_values import strict
from trainwright.runs.printing import in_columns
from trainwright.runs.records import Found

BEST = "best.yaml"
REPORT = "ladder.json"
PAGE = "ladder.html"
BROKEN = 3
HEAD = ("rung", "loss", "change", "a sample", "speed", "memory", "skipped", "verdict")


@dataclass(frozen=True)
class RungResult:
    """One row of the table.

    Args:
        name: The name of the rung.
        verdict: Its outcome.
        settings: All settings of its run in addition to those of the recipe.
        run: Its run folder; None if it was not tried.
        measured: Its measurements; None if it was not tried or did not finish.
        below: The name of the rung that it is compared with.
        change: Its loss minus that of the rung below.
        speed: Time per sample of the rung below / time per sample of this one.
        lr: The learning rate that a range test found for it.
    """

    name: str
    verdict: RungVerdict
    settings: Mapping[str, str]
    run: Path | None = None
    measured: MeasuredRung | None = None
    below: str = ""
    change: float | None = None
    speed: float | None = None
    lr: float | None = None

    @property
    def findings(self) -> tuple[Found, ...]:
        """Findings of warning level and above."""
        return self.measured.serious if self.measured else ()

    def cells(self) -> tuple[str, ...]:
        """Return the row as text. The reason for a broken rung is printed separately."""
        verdict = str(self.verdict) if self.verdict.outcome != "breaks" else "breaks"
        if self.measured is None:
            return (self.name, *("-" for _ in HEAD[2:]), verdict)
        return (
            self.name,
            figure(self.measured.loss),
            "" if self.change is None else f"{self.change:+.4f}" if math.isfinite(self.change) else "-",
            human_seconds(self.measured.sample_s) if math.isfinite(self.measured.sample_s) else "-",
            "" if self.speed is None else f"{self.speed:.2f}x" if math.isfinite(self.speed) else "-",
            human_bytes(self.measured.peak_bytes),
            str(self.measured.skipped),
            verdict,
        )

    def to_json(self) -> dict[str, object]:
        """Return the row for ``ladder.json``."""
        measured = self.measured
        return {
            "rung": self.name,
            "outcome": self.verdict.outcome,
            "why": self.verdict.why,
            "below": self.below,
            "run": None if self.run is None else str(self.run),
            "settings": dict(self.settings),
            "lr": self.lr,
            "loss": measured and measured.loss,
            "change": self.change,
            "speed": self.speed,
            "sample_s": measured and measured.sample_s,
            "peak_bytes": measured and measured.peak_bytes,
            "steps": measured and measured.steps,
            "skipped": measured and measured.skipped,
            "curve": measured and [*measured.curve],
            "findings": [{"code": each.code, "severity": each.severity, "cause": each.cause} for each in self.findings],
        }


@dataclass(frozen=True)
class Ladder:
    """The result of ``trainwright ladder``.

    Args:
        folder: The folder with ``ladder.json``, ``ladder.html``, ``best.yaml`` and the run folders.
        recipe: The original recipe.
        steps: Steps of the baseline.
        batch: Samples in each step of the baseline.
        rungs: The rows in order.
        band: The band of two seeds; None if the baseline itself breaks.
        best: The name of the last rung that was adopted.
        train: The command that trains ``best.yaml``; "" if there is none.
        repeat: The command that repeats the run of its rung.
        out_of_time: True if ``--budget`` ended it.
    """

    folder: Path
    recipe: str
    steps: int
    batch: int
    rungs: tuple[RungResult, ...]
    band: Band | None
    best: str = ""
    train: str = ""
    repeat: str = ""
    out_of_time: bool = False

    @property
    def broke_at(self) -> RungResult | None:
        """The rung that broke and ended the ladder."""
        return next((rung for rung in self.rungs if rung.verdict.outcome == "breaks"), None)

    @property
    def best_recipe(self) -> Path | None:
        """The recipe that the ladder wrote; None if the baseline breaks."""
        return self.folder / BEST if self.best else None

    @property
    def exit_code(self) -> int:
        """3 if a rung breaks, although the best recipe below it is written; else 0."""
        return BROKEN if self.broke_at else 0

    def lines(self) -> list[str]:
        """Return the table, the reason for its end, and the next commands."""
        return [*self.table(), "", *self._band_line(), *self._end(), *self._next()]

    def table(self) -> list[str]:
        """Return the rows as text in columns."""
        return in_columns([HEAD, *(rung.cells() for rung in self.rungs)])

    def _band_line(self) -> Iterator[str]:
        if self.band:
            yield (
                f"band     {figure(self.band.loss)} in the loss: {BAND_FACTOR:g} differences of two seeds of the "
                f"baseline, at least {MIN_BAND:.0%}; {self.steps * self.batch:,} samples in each rung"
            )

    def _end(self) -> Iterator[str]:
        broken = self.broke_at
        if broken:
            yield f"stopped  at {broken.name}: {broken.verdict.why}"
            if found := broken.verdict.finding:
                yield f"         cause: {found.cause}"
                yield f"         do: {found.remedy}"
            if broken.run:
                yield f"         trainwright diagnose {shlex.quote(str(broken.run))} --deep"
            if self.best:
                yield f"         to go on without it: the same command with --skip {broken.name}"
        if self.out_of_time:
            yield "stopped  the budget is used up; the same command with a larger --budget resumes it"

    def _next(self) -> Iterator[str]:
        if self.best_recipe:
            yield f"best     {self.best_recipe}: that of the rung {self.best}"
            yield f"page     {self.folder / PAGE}"
            yield f"next     {self.train}"
            yield f"         {self.repeat}   # repeats the rung"

    def to_json(self) -> dict[str, object]:
        """Return the content of ``ladder.json``, which ``--json`` prints."""
        value = {
            "recipe": self.recipe,
            "folder": str(self.folder),
            "steps": self.steps,
            "batch": self.batch,
            "band": self.band and vars(self.band),
            "rungs": [rung.to_json() for rung in self.rungs],
            "best": self.best,
            "best_recipe": None if self.best_recipe is None else str(self.best_recipe),
            "train": self.train,
            "repeat": self.repeat,
            "broke_at": self.broke_at and self.broke_at.name,
            "out_of_time": self.out_of_time,
            "exit": self.exit_code,
        }
        return {name: strict(each) for name, each in value.items()}


_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][\w-]*):")


def commented(text: str, notes: Mapping[str, str]) -> str:
    """Return YAML in block style with a comment at the line of each path in ``notes``. Other lines are unchanged."""
    lines, above = [], list[tuple[int, str]]()
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            indent = len(found["indent"])
            above = [*((depth, key) for depth, key in above if depth < indent), (indent, found["key"])]
            note = notes.get(".".join(key for _, key in above))
            line = f"{line}  # {note}" if note else line
        lines.append(line)
    return "\n".join(lines) + "\n"


def notes_of(rungs: Sequence[RungResult], decided: Mapping[str, str]) -> dict[str, str]:
    """Return a comment for each path that a rung has decided. ``decided`` maps paths to names of rungs."""
    by_name = {rung.name: rung for rung in rungs}
    notes = {}
    for path, name in decided.items():
        rung = by_name.get(name)
        found = f", found by a range test: {rung.lr:.3g}" if rung and rung.lr and path == "optimizer.lr" else ""
        why = rung.verdict.why if rung and rung.verdict.why else "the baseline"
        notes[path] = f"ladder, {name}: {why}{found}".replace("\n", " ")
    return notes
