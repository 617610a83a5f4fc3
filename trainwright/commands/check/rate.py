"""The verdict on the learning rate, from range test, first update, one batch and smoke run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.commands.check.learning import LEARNED_LOSS_FALL, BatchFit, falls_from
from trainwright.commands.check.smoke import SmokeRun
from trainwright.commands.check.verdict import Verdict
from trainwright.engine.lr_range import LrRange

MAX_FIRST_UPDATE = 10.0
"""Norm of the first update / norm of the weights, above which the update destroys the initial weights."""
MIN_TOTAL_RATE_RATIO = 5.0
"""Sum of all learning rates / rate at which the loss begins to fall, below which the run learns slowly."""
CODE_HIGH = "optim.lr_too_high"
CODE_LOW = "optim.lr_too_low"


@dataclass(frozen=True)
class RateEvidence:
    """Measurements about the peak learning rate ``lr`` of a recipe.

    Attributes:
        lr: The peak learning rate.
        num_steps: Steps of the full run.
        moved: Norm of the first update / norm of the weights.
        found: The range test; None if there was no time for it.
        fits: Trainings on one batch, at the recipe's rate and at others.
        smoke: The smoke run.
    """

    lr: float
    num_steps: float
    moved: float
    found: LrRange | None
    fits: Sequence[BatchFit]
    smoke: SmokeRun

    @property
    def learned_at_peak(self) -> bool:
        """True if the smoke run reached the peak rate and learned."""
        return self.smoke.learned is True and self.smoke.peak_lr >= 0.5 * self.lr

    @property
    def explodes_below(self) -> bool:
        """True if the range test explodes at a lower rate than that of the recipe."""
        return self.found is not None and self.found.stopped_at is not None and self.lr > self.found.stopped_at

    @property
    def learns_only_below(self) -> BatchFit | None:
        """A training that memorized one batch at a lower rate, if the recipe's rate did not."""
        if any(fit.fell >= LEARNED_LOSS_FALL for fit in self.fits if fit.lr >= self.lr):
            return None
        tried = any(fit.lr == self.lr and (fit.diverged or fit.took_all_steps) for fit in self.fits)
        below = [fit for fit in self.fits if fit.fell >= LEARNED_LOSS_FALL and fit.lr < self.lr]
        return below[0] if tried and below else None

    def too_high(self) -> list[str]:
        """Return the signs that the rate is too high, as text."""
        signs = []
        if self.explodes_below:
            assert self.found is not None
            signs.append(f"the range test explodes at {self.found.stopped_at:.2g}")
        if (lower := self.learns_only_below) is not None:
            signs.append(f"one batch is learned at {lower.lr:.2g} and not at this rate")
        if self.smoke.is_worse_than_a_guess and self.smoke.peak_lr >= 0.5 * self.lr:
            signs.append(
                f"the smoke run ends at a loss of {self.smoke.ends[1]:.4g}, that of a guess is {self.smoke.guess:.4g}"
            )
        if self.smoke.diverges:
            signs.append("the smoke run diverges")
        return signs


def learning_rate(seen: RateEvidence) -> Verdict:
    """Judge the peak rate of the recipe by all measurements.

    If the smoke run did not reach the peak rate, as in a warm-up, the range test alone decides. Small updates add up:
    if the sum of the rates of all steps is less than the rate at which the loss began to fall, the run ends before the
    loss falls.
    """
    lr, found = seen.lr, seen.found
    if seen.moved > MAX_FIRST_UPDATE:
        message = f"{lr:.3g}: the first update changes the weights by {seen.moved:,.3g} times their size"
        word = "warn" if seen.learned_at_peak else "fail"
        return Verdict(word, "learning rate", message, "try optimizer.lr at a thousandth of it", CODE_HIGH)  # type: ignore[arg-type]
    message = f"{lr:.3g}{_in_words(found)}"
    if signs := seen.too_high():
        certain = not seen.learned_at_peak and (seen.explodes_below or len(signs) > 1)
        claim = f"{lr:.3g} is too high" if certain else f"{lr:.3g} may be too high"
        if seen.learned_at_peak:
            signs.append(f"yet the first {len(seen.smoke.losses)} steps learn")
        text = f"{claim}: {', '.join(signs)}"
        return Verdict("fail" if certain else "warn", "learning rate", text, lower_rate(seen), CODE_HIGH)
    if found is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; a step takes too long for a range test here")
    start = falls_from(found)
    if found.suggestion is None or start is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; the loss falls at no rate of the range test")
    if seen.learned_at_peak or lr * seen.num_steps >= MIN_TOTAL_RATE_RATIO * start:
        if lr < start and not seen.learned_at_peak:
            message += f"; below that it learns more slowly, which {seen.num_steps:,.0f} steps make up for"
        return Verdict("ok", "learning rate", message)
    if lr * seen.num_steps < start and seen.smoke.learned is not True:
        message = f"{message}: nothing would move in {seen.num_steps:,.0f} steps"
        return Verdict("fail", "learning rate", message, higher_rate(found, lr), CODE_LOW)
    return Verdict("warn", "learning rate", f"{message}: it would learn slowly", higher_rate(found, lr), CODE_LOW)


def _in_words(found: LrRange | None) -> str:
    start = falls_from(found) if found is not None else None
    if found is None or start is None:
        return ""
    end = f"it explodes at {found.stopped_at:.2g}" if found.stopped_at else "it never explodes"
    return f"; in a range test the loss falls from {start:.2g} on, {end}"


def lower_rate(seen: RateEvidence) -> str:
    """Return the remedy for a rate that is too high."""
    if (good := _recommended(seen.found)) and good[0] < seen.lr:
        return _try(good[0], min(good[1], seen.lr / 2))
    lower = seen.learns_only_below
    return _try(lower.lr, lower.lr) if lower is not None else _try(seen.lr / 10, seen.lr / 10)


def higher_rate(found: LrRange, lr: float) -> str:
    """Return the remedy for a rate that is too low for the number of steps."""
    good = _recommended(found)
    if good is None or good[1] <= 1.5 * lr:
        return "train for more steps (until): the rate itself is as high as the range test allows"
    return _try(max(good[0], 1.5 * lr), good[1])


def _recommended(found: LrRange | None) -> tuple[float, float] | None:
    """Return the interval from the rate at which the loss begins to fall to a tenth of that at which it is lowest."""
    if found is None or found.suggestion is None or (start := falls_from(found)) is None:
        return None
    return min(start, found.suggestion), found.suggestion


def _try(low: float, high: float) -> str:
    """Return a remedy with an interval of rates, or with one rate if both ends are nearly equal."""
    between = f"between {low:.1g} and {high:.1g}" if high >= 2 * low else f"near {high:.1g}"
    return f"try optimizer.lr {between} (trainwright lr-range draws the curve)"
