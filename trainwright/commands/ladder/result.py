"""The result of a ladder: the table, ``ladder.json``, and the best recipe with a comment for each decision."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainwright.commands.ladder.rungs import Kind
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.runs.json_values import strict
from trainwright.runs.printing import figure, in_columns
from trainwright.runs.records import Found
from trainwright.trials import Trial

Outcome = Literal["baseline", "adopted", "breaks", "does not pay", "not better", "too slow", "not tried"]

NUM_WINDOWS = 16
"""Windows of equally many samples over which the training loss is averaged."""
BAND_FACTOR = 2.0
"""Half width of the band / difference of two seeds. A third seed may still be outside of the band by chance."""
MIN_BAND = 0.01
"""Fraction of the loss. Two seeds may agree by chance, so differences below 1 % are accepted."""
MIN_GAIN = 0.05
"""Fraction of time or memory that a rung must save, if the two baselines do not differ by more."""
MAX_SKIPPED_FRACTION = 0.05
"""Fraction of the updates that may be skipped."""
MAX_SKIPPED_UPDATES = 3
"""Number of updates that may be skipped in any run: a loss scale needs some to settle."""
RESOURCE_CODES = ("resources.",)
"""Prefixes of findings about time and memory, which are compared as numbers."""


@dataclass(frozen=True)
class MeasuredRung:
    """Measurements by which rungs are compared.

    ``loss`` is the final validation loss, or without a validation set the last value of ``curve``: the mean training
    losses of ``NUM_WINDOWS`` windows of equally many samples. ``sample_s`` is the median time of a step in the second
    half of the run, divided by its samples.
    """

    loss: float
    curve: tuple[float, ...]
    sample_s: float
    peak_bytes: int
    steps: int
    skipped: int = 0
    ended: str = "finished"
    reason: str = ""
    findings: tuple[Found, ...] = ()

    @property
    def second_half(self) -> tuple[float, ...]:
        """The windows in which runs are compared. The first steps of two seeds differ by their initial weights."""
        return self.curve[len(self.curve) // 2 :]

    @property
    def serious(self) -> tuple[Found, ...]:
        """Findings of warning level and above that concern the loss."""
        return tuple(
            each
            for each in self.findings
            if each.severity in ("critical", "warning") and not each.code.startswith(RESOURCE_CODES)
        )


@dataclass(frozen=True)
class Band:
    """The accepted difference between two runs: absolute for the loss, relative for time and memory."""

    loss: float
    time: float
    memory: float


@dataclass(frozen=True)
class RungVerdict:
    """The outcome of a rung and its reason. ``finding`` is the finding that broke it, if any."""

    outcome: Outcome
    why: str = ""
    finding: Found | None = None

    def __str__(self) -> str:
        return f"{self.outcome}: {self.why}" if self.why else self.outcome


def measured(trial: Trial, batch: int) -> MeasuredRung:
    """Return the measurements of a trial whose steps have ``batch`` samples each."""
    curve = windows([loss for _, loss in trial.losses])
    later_s = trial.step_seconds[len(trial.step_seconds) // 2 :]
    return MeasuredRung(
        loss=trial.val_loss if trial.evaluations else curve[-1] if curve else math.nan,
        curve=curve,
        sample_s=statistics.median(later_s) / batch if later_s else math.nan,
        peak_bytes=trial.peak_bytes,
        steps=trial.steps,
        skipped=trial.skipped,
        ended=trial.ended,
        reason=trial.reason,
        findings=trial.findings,
    )


def windows(losses: Sequence[float]) -> tuple[float, ...]:
    """Return the means of ``NUM_WINDOWS`` windows, or of as many as there are losses."""
    count = min(NUM_WINDOWS, len(losses))
    bounds = [len(losses) * index // count for index in range(count + 1)] if count else []
    return tuple(statistics.fmean(losses[begin:end]) for begin, end in itertools.pairwise(bounds))


def band_of(one: MeasuredRung, two: MeasuredRung) -> Band:
    """Return the band of two runs that differ by their seed only.

    ``loss`` = max(2 d, 0.01 |mean final loss|), where d is the larger of the difference of the final losses and the
    root mean square difference of the training losses in the windows of the second half. ``time`` and ``memory`` are
    the relative differences, at least 5 %.
    """
    gaps = [a - b for a, b in zip(one.second_half, two.second_half, strict=False)]
    spread = max(abs(one.loss - two.loss), math.sqrt(statistics.fmean(gap * gap for gap in gaps)) if gaps else 0.0)
    return Band(
        loss=max(BAND_FACTOR * spread, MIN_BAND * abs(one.loss + two.loss) / 2),
        time=max(MIN_GAIN, _relative(one.sample_s, two.sample_s)),
        memory=max(MIN_GAIN, _relative(one.peak_bytes, two.peak_bytes)),
    )


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(one, two) if one > 0 and two > 0 else 0.0


def new_finding(rung: MeasuredRung, known: Collection[str] = ()) -> Found | None:
    """Return the first serious finding whose code is not in ``known``, the codes of the rungs below."""
    return next((each for each in rung.serious if each.code not in known), None)


def unhealthy(rung: MeasuredRung, known: Collection[str] = ()) -> str:
    """Return why a run is broken, without comparing its loss; "" if it is not. ``known``: codes of the rungs below."""
    found = new_finding(rung, known)
    reasons = [f"{found.code}: {found.symptom}"] if found else []
    if rung.ended != "finished":
        reasons.append(f"it {rung.ended} at step {rung.steps}: {rung.reason}")
    bad = sum(not math.isfinite(loss) for loss in rung.curve)
    if bad:
        reasons.append(f"the training loss is not finite in {bad} of {len(rung.curve)} windows")
    elif not math.isfinite(rung.loss):
        reasons.append("the final loss is not finite")
    if rung.skipped > max(MAX_SKIPPED_UPDATES, MAX_SKIPPED_FRACTION * rung.steps):
        reasons.append(f"{rung.skipped} of {rung.steps} updates were skipped")
    return "; ".join(reasons)


def worse(rung: MeasuredRung, below: MeasuredRung, anchor: float, band: Band, *, with_curve: bool) -> str:
    """Return why the loss is worse than the band allows; "" if it is not.

    ``anchor`` is the loss of the baseline, or of the last rung that lowered it by more than the band. This limit
    keeps small increases of the loss from adding up over rungs. With ``with_curve`` the mean gap of the training
    losses in the second half counts too.
    """
    for name, reference in (("the rung below", below.loss), ("the baseline, or the last better rung", anchor)):
        if rung.loss - reference > band.loss:
            return (
                f"loss {figure(rung.loss)} is {figure(rung.loss - reference)} above that of {name}: more than the band "
                f"{figure(band.loss)}"
            )
    gaps = [a - b for a, b in zip(rung.second_half, below.second_half, strict=False)]
    gap = statistics.fmean(gaps) if gaps else 0.0
    if with_curve and gap > band.loss:
        return (
            f"in its second half the training loss is {figure(gap)} above the rung below, more than the band "
            f"{figure(band.loss)}"
        )
    return ""


def gain(rung: MeasuredRung, below: MeasuredRung, band: Band) -> str:
    """Return the gain of a rung ("1.42x as fast", "31 % less memory"); "" if it does not pay.

    A rung pays if the time per sample falls by more than ``band.time``. It also pays if both memory and time x memory
    fall by more than ``band.memory``. Then it saves more memory than it costs time.
    """
    time = rung.sample_s / below.sample_s
    memory = rung.peak_bytes / below.peak_bytes if below.peak_bytes else 1.0
    if time < 1 - band.time:
        return f"{1 / time:.2f}x as fast"
    if memory < 1 - band.memory and time * memory < 1 - band.memory:
        return f"{1 - memory:.0%} less memory, {time:.2f}x the time"
    return ""


def judge(
    kind: Kind, rung: MeasuredRung, below: MeasuredRung, anchor: float, band: Band, known: Collection[str] = ()
) -> RungVerdict:
    """Return the verdict on a rung that was trained to its end, or that failed."""
    saved = gain(rung, below, band)
    no_gain = (
        f"{human_seconds(rung.sample_s)} a sample against {human_seconds(below.sample_s)}, and no smaller "
        f"(margin {max(band.time, band.memory):.0%})"
    )
    broken = unhealthy(rung, known)
    if kind == "optimizer":
        if broken:
            return RungVerdict("not better", broken)
        if below.loss - rung.loss > band.loss:
            return RungVerdict("adopted", f"loss {figure(below.loss - rung.loss)} lower, more than the band")
        if why := worse(rung, below, anchor, band, with_curve=False):
            return RungVerdict("not better", why)
        return (
            RungVerdict("adopted", f"the same loss, {saved}")
            if saved
            else RungVerdict("not better", f"same loss, {no_gain}")
        )
    broken = broken or worse(rung, below, anchor, band, with_curve=kind == "numerics")
    if broken:
        return RungVerdict("breaks", broken, new_finding(rung, known))
    return RungVerdict("adopted", saved) if saved else RungVerdict("does not pay", no_gain)


BEST = "best.yaml"
REPORT = "ladder.json"
PAGE = "ladder.html"
BROKEN = 3
HEAD = ("rung", "loss", "change", "a sample", "speed", "memory", "skipped", "verdict")


@dataclass(frozen=True)
class RungResult:
    """One row of the table. ``settings`` are all overrides of the recipe in its run.

    ``run`` is its run folder; None if it was not tried. ``measured`` is None if it was not tried or did not finish.
    ``below`` is the name of the rung that it is compared with, ``change`` its loss minus the loss of that rung, and
    ``speed`` the time per sample of that rung / its own. ``lr`` is the learning rate that a range test found for it.
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
        return self.measured.serious if self.measured else ()

    def compared(self, below: MeasuredRung, name: str) -> RungResult:
        """Return the row with its differences from the rung below, whose name is ``name``."""
        assert self.measured is not None
        change, speed = self.measured.loss - below.loss, below.sample_s / self.measured.sample_s
        return replace(self, below=name, change=change, speed=speed)

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
    """The result of ``trainwright ladder``: its ``rungs`` in order, and ``best``, the name of the last adopted one.

    ``folder`` has ``ladder.json``, ``ladder.html``, ``best.yaml`` and the run folders. The baseline has ``steps`` steps
    of ``batch`` samples. ``band`` is None if the baseline itself breaks. The command ``train`` trains ``best.yaml``,
    and ``repeat`` repeats the run of the best rung; both are "" without a ``best.yaml``. ``out_of_time`` is True if
    ``--budget`` ended the ladder.
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
        table = in_columns([HEAD, *(rung.cells() for rung in self.rungs)])
        return [*table, "", *self._band_line(), *self._end(), *self._next()]

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
