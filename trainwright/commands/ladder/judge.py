"""Compares the rungs of a ladder: the band of two seeds, what breaks, what pays. Pure functions without torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.commands.ladder.rungs import Kind
from trainwright.plan.explain import human_seconds
from trainwright.runs.figures import figure
from trainwright.runs.records import Found
from trainwright.trials import Trial

Outcome = Literal["baseline", "adopted", "breaks", "does not pay", "not better", "too slow", "not tried"]

NUM_WINDOWS = 16
"""Windows of equally many samples over which the training loss is averaged."""
BAND_FACTOR = 2.0
"""Half width of the band in differences of two seeds: 95 % of the differences of runs that differ by chance."""
MIN_BAND = 0.01
"""Fraction of the loss. Two seeds may agree by chance, so differences below 1 % are accepted."""
MIN_GAIN = 0.05
"""Fraction of time or memory that a rung must save, if the two baselines do not differ by more."""
MAX_SKIPPED_FRACTION = 0.05
"""Fraction of the updates that may be skipped."""
MIN_SKIPPED = 3
"""Number of updates that may be skipped in any run: a loss scale needs some to settle."""
RESOURCE_CODES = ("resources.",)
"""Prefixes of findings about time and memory, which are compared as numbers."""


@dataclass(frozen=True)
class MeasuredRung:
    """Measurements by which rungs are compared.

    Attributes:
        loss: The final validation loss, or without a validation set the mean of the last sixteenth of the training
            losses.
        curve: Mean training losses of ``NUM_WINDOWS`` windows of equally many samples.
        sample_s: Median time of a step in the second half of the run, divided by its samples.
        peak_bytes: Peak memory.
        steps: Optimizer steps.
        skipped: Updates that were skipped.
        ended: How the run ended.
        reason: Why, if it did not finish.
        findings: The findings of the doctor.
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
    """The difference between two seeds: of the loss, and as fractions of time and memory."""

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


def measured(trial: Trial, steps: int, batch: int) -> MeasuredRung:
    """Return the measurements of a trial of ``steps`` steps with ``batch`` samples each."""
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
    """Return the first serious finding whose code is not in ``known``, the codes that the runs below also have."""
    return next((each for each in rung.serious if each.code not in known), None)


def unhealthy(rung: MeasuredRung, known: Collection[str] = ()) -> str:
    """Return why a run is broken regardless of its loss; "" if it is not. ``known``: codes that the runs below also
    have.
    """
    found = new_finding(rung, known)
    reasons = [f"{found.code}: {found.symptom}"] if found else []
    if rung.ended != "finished":
        reasons.append(f"it {rung.ended} at step {rung.steps}: {rung.reason}")
    bad = sum(not math.isfinite(loss) for loss in rung.curve)
    if bad:
        reasons.append(f"the training loss is not finite in {bad} of {len(rung.curve)} windows")
    elif not math.isfinite(rung.loss):
        reasons.append("the final loss is not finite")
    if rung.skipped > max(MIN_SKIPPED, MAX_SKIPPED_FRACTION * rung.steps):
        reasons.append(f"{rung.skipped} of {rung.steps} updates were skipped")
    return "; ".join(reasons)


def worse(rung: MeasuredRung, below: MeasuredRung, anchor: float, band: Band, *, with_curve: bool) -> str:
    """Return why the loss is worse than the band allows; "" if it is not.

    ``anchor`` is the loss of the baseline, or of the last rung that was better than the band. Comparing with it keeps
    small losses of several rungs from adding up. With ``with_curve`` the mean gap of the training losses in the second
    half counts too.
    """
    for name, reference in (("the rung below", below.loss), ("the baseline", anchor)):
        if rung.loss - reference > band.loss:
            return (
                f"loss {figure(rung.loss)} is {figure(rung.loss - reference)} above {name}, more than the band "
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

    A rung pays if a sample takes less time, by more than the margin. It also pays if it needs less memory, by more than
    the margin, and the product of time and memory falls as much, so that it costs less time than it saves memory.
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
    no_gain = f"{_times(rung, below)}, and no smaller (margin {max(band.time, band.memory):.0%})"
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


def _times(rung: MeasuredRung, below: MeasuredRung) -> str:
    return f"{human_seconds(rung.sample_s)} a sample against {human_seconds(below.sample_s)}"
