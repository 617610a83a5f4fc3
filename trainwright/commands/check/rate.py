"""The verdict on the learning rate, from all that was trained: range test, first update, one batch, smoke run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.commands.check.learning import LEARNED, BatchFit, falls_from
from trainwright.commands.check.smoke import SmokeRun
from trainwright.commands.check.verdict import Verdict
from trainwright.engine.lr_range import LrRange

MAX_FIRST_UPDATE = 10.0
"""Norm of the first update / norm of the weights, above which the update destroys the initial weights."""
SLOW = 5.0
"""The sum of all learning rates / the rate at which the loss begins to fall, below which the run learns slowly."""
CODE_HIGH, CODE_LOW = "optim.lr_too_high", "optim.lr_too_low"


@dataclass(frozen=True)
class RateEvidence:
    """What the parts of a check measured about the peak learning rate ``lr`` of a recipe.

    ``moved`` is the norm of the first update over the norm of the weights. ``found`` is the range test, None where
    there was no time for it. ``fits`` are the trainings on one batch, at the recipe's rate and at others.
    """

    lr: float
    num_steps: float
    moved: float
    found: LrRange | None
    fits: Sequence[BatchFit]
    smoke: SmokeRun

    @property
    def learned_at_peak(self) -> bool:
        """Whether the smoke run reached the peak rate and learned."""
        return self.smoke.learned is True and self.smoke.peak_lr >= 0.5 * self.lr

    @property
    def explodes_below(self) -> bool:
        """Whether the range test explodes at a lower rate than that of the recipe."""
        return self.found is not None and self.found.stopped_at is not None and self.lr > self.found.stopped_at

    @property
    def learns_only_below(self) -> BatchFit | None:
        """A training on one batch that learned it at a lower rate, where the recipe's rate did not learn it."""
        if any(fit.fell >= LEARNED for fit in self.fits if fit.lr >= self.lr):
            return None
        tried = any(fit.lr == self.lr and (fit.diverged or fit.took_all_steps) for fit in self.fits)
        below = [fit for fit in self.fits if fit.fell >= LEARNED and fit.lr < self.lr]
        return below[0] if tried and below else None

    def too_high(self) -> list[str]:
        """The signs that the rate is too high, in words."""
        signs = []
        if self.explodes_below:
            assert self.found is not None
            signs.append(f"the range test explodes at {self.found.stopped_at:.2g}")
        if (lower := self.learns_only_below) is not None:
            signs.append(f"one batch is learned at {lower.lr:.2g} and not at this rate")
        if self.smoke.is_worse_than_a_guess and self.smoke.peak_lr >= 0.5 * self.lr:
            signs.append(
                f"the smoke run ends at a loss of {self.smoke.ends[1]:.4g}, a guess has {self.smoke.guess:.4g}"
            )
        if self.smoke.diverges:
            signs.append("the smoke run diverges")
        return signs


def learning_rate(seen: RateEvidence) -> Verdict:
    """The peak rate of the recipe against all that was measured.

    The range test alone decides where the smoke run did not reach the peak rate, as in a warm-up. Small updates add
    up: if the sum of the rates of all steps is less than the rate at which the loss began to fall, the run ends before
    the loss falls.
    """
    lr, found = seen.lr, seen.found
    if seen.moved > MAX_FIRST_UPDATE:
        message = f"{lr:.3g}: the first update changes the weights by {seen.moved:,.3g} times their size"
        word = "warn" if seen.learned_at_peak else "fail"
        return Verdict(word, "learning rate", message, "try optimizer.lr at a thousandth of it", CODE_HIGH)  # type: ignore[arg-type]
    message = f"{lr:.3g}{_in_words(found)}"
    if signs := seen.too_high():
        certain = not seen.learned_at_peak and (seen.explodes_below or len(signs) > 1)
        told = f"{lr:.3g} is too high" if certain else f"{lr:.3g} may be too high"
        if seen.learned_at_peak:
            signs.append(f"yet the first {len(seen.smoke.losses)} steps learn")
        text = f"{told}: {', '.join(signs)}"
        return Verdict("fail" if certain else "warn", "learning rate", text, lower_rate(seen), CODE_HIGH)
    if found is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; a step takes too long for a range test here")
    start = falls_from(found)
    if found.suggestion is None or start is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; the loss falls at no rate of the range test")
    if seen.learned_at_peak or lr * seen.num_steps >= SLOW * start:
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
    """What to set where the rate is too high."""
    if (good := _recommended(seen.found)) and good[0] < seen.lr:
        return _try(good[0], min(good[1], seen.lr / 2))
    lower = seen.learns_only_below
    return _try(lower.lr, lower.lr) if lower is not None else _try(seen.lr / 10, seen.lr / 10)


def higher_rate(found: LrRange, lr: float) -> str:
    """What to set where the rate is too low for the number of steps."""
    good = _recommended(found)
    if good is None or good[1] <= 1.5 * lr:
        return "train for more steps (until): the rate itself is as high as the range test allows"
    return _try(max(good[0], 1.5 * lr), good[1])


def _recommended(found: LrRange | None) -> tuple[float, float] | None:
    """From the rate at which the loss begins to fall to a tenth of that at which it is lowest."""
    if found is None or found.suggestion is None or (start := falls_from(found)) is None:
        return None
    return min(start, found.suggestion), found.suggestion


def _try(low: float, high: float) -> str:
    """A remedy that names an interval of rates, or one rate where both ends are nearly the same."""
    between = f"between {low:.1g} and {high:.1g}" if high >= 2 * low else f"near {high:.1g}"
    return f"try optimizer.lr {between} (trainwright lr-range draws the curve)"
