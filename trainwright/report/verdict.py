"""The verdict on a run: its outcome in one word and one sentence, from measurements only.

The process that ends a run computes the verdict and writes it to the log. Terminal, page, list of runs and ``--json``
show that verdict. For a run without an end record, the reader computes it with the same function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from trainwright.doctor.trend import slope_in_errors
from trainwright.runs.findings import findings_in
from trainwright.runs.folder import RunFolder
from trainwright.runs.printing import figure
from trainwright.runs.reader import KILLED, RUNNING, UNKNOWN, read_course, read_end, state_of
from trainwright.runs.records import (
    Ended,
    Evaluated,
    Examined,
    Found,
    Logged,
    Record,
    RunVerdict,
    Skipped,
    Started,
    Step,
    Watched,
)

WORDS = (
    "critical finding",
    "diverged",
    "failed",
    "killed",
    "not saved",
    "learned nothing",
    "worse than before",
    "overfits",
    "warning",
    "ended early",
    "running",
    "no end record",
    "not measured",
    "not examined",
    "no finding",
)
"""The words of a verdict, the most severe first. The first one that applies is used."""

MIN_STEPS_LEARNING = 60
MIN_LOSSES = 16
"""A run with fewer steps, or fewer recorded losses, is too short to conclude that it learned nothing.

With fewer losses, no divergence is concluded from a rise, either.
"""
MIN_LOSSES_AT_END = 4
"""The minimum number of last losses whose mean is the final loss."""
SIGNIFICANT_ERRORS = 3.0
"""Standard errors above which a difference counts as significant."""
MAX_HIDDEN_DROP_FRACTION = 0.1
"""Fraction of the loss. "Learned nothing" requires that any drop hidden in the noise is smaller than this."""
MIN_DIVERGENCE_NOISES = 3.0
"""Minimum rise of a diverged loss above the first loss, in standard deviations of its noise."""
MIN_EXPLOSION, UNIFORM_GUESS_NATS = 3.0, 20.0
"""A finished run whose loss still falls from a peak diverged if the peak exceeds both: this multiple of the first loss,
and the cross-entropy of a uniform guess among more classes than any model has (exp(20) is 5e8)."""
MAX_VALIDATION_DROP = 0.02
"""Fraction of the validation loss. A larger drop means that something was learned."""
MIN_EVALUATIONS = 5
"""Minimum number of evaluations on the same samples from which overfitting, or that nothing was learned, follows."""
MIN_OVERFITTING_NOISES = 5.0
"""Minimum rise of the validation loss after its best, in standard deviations of the noise of one evaluation."""
MIN_RISE_OF_RANGE, MIN_RISE_OF_TRAINING_DROP = 0.05, 0.1
"""Minimum of the same rise as a fraction of the range of the validation loss, and as a fraction of the drop of the
training loss in the same time.
"""
MIN_RISE_SINCE_START = 0.01
"""Minimum rise of a pretrained model's validation loss above that before training, as a fraction of the latter."""
FALLING_SLOPE_ERRORS = -2.0
"""Slope of the losses in the second half of a run, in standard errors, below which they still fall."""
LEARNED_NOTHING_CODE = "loss.no_better_than_constant"
MAX_LOSS = 1e100
"""Larger losses count as not finite, because their sums may overflow."""
MAX_REASON_CHARS = 160

Losses = Sequence[tuple[int, float]]
"""Training losses by step, in order."""


@dataclass(frozen=True, kw_only=True)
class VerdictFacts:
    """The inputs of a verdict.

    Args:
        state: The state of the run (``state_of`` in ``runs/reader.py``).
        step: Completed steps, of ``planned_steps``.
        losses: Training losses by step. In a long run they may be means over spans of steps.
        is_one_objective: The training loss is one function of the weights and of a fixed data set, so that the first
            losses and the last ones can be compared. False for adversarial training, policies and streams.
        chance: The loss of a uniform guess among all classes; None if the targets are no classes.
        data_warnings: Names of the warnings of the supervision audit.
        examined: False if the doctor did not examine the run.
        saved: False if the last state could not be saved.
        troubles: Further problems, which are appended to the sentence.
    """

    state: str
    reason: str = ""
    step: int = 0
    planned_steps: int | None = None
    losses: Losses = ()
    is_one_objective: bool = False
    chance: float | None = None
    evaluations: Sequence[Evaluated] = ()
    findings: Sequence[Found] = ()
    data_warnings: Sequence[str] = ()
    skipped: int = 0
    examined: bool = True
    saved: bool = True
    troubles: Sequence[str] = ()
    references: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state not in (RUNNING, KILLED, UNKNOWN)


class _Claim(NamedTuple):
    """One statement about a run; without text, it only sets the word. ``states_losses``: the text has the losses."""

    word: str
    text: str = ""
    states_losses: bool = False
    best_step: int | None = None


def judge(facts: VerdictFacts) -> RunVerdict:
    """Return the verdict on a run."""
    claims = sorted(_claims(facts), key=lambda claim: WORDS.index(claim.word))
    parts = [claim.text for claim in claims if claim.text]
    if not any(claim.states_losses for claim in claims):
        parts += [_loss_summary(facts)]
    how = _ending(facts)
    if facts.is_over and not any(claim.text for claim in claims):
        clean = " without a warning" if facts.findings else " without a finding"
        how += clean if facts.examined else ", not examined by the doctor"
    elif facts.is_over:
        how += ", but"
    if facts.skipped:
        parts.append(f"{facts.skipped:,} of {facts.step:,} updates were skipped (log.jsonl names each)")
    sentence = f"{how}{' ' if how.endswith('but') else ': '}{'; '.join([*parts, *facts.troubles])}"
    best_step = next((claim.best_step for claim in claims if claim.best_step is not None), None)
    return RunVerdict(word=claims[0].word if claims else "no finding", sentence=sentence, best_step=best_step)


def _claims(facts: VerdictFacts) -> Iterator[_Claim]:
    critical = [found.code for found in facts.findings if found.severity == "critical"]
    warnings = [found.code for found in facts.findings if found.severity == "warning"]
    if critical:
        yield _Claim("critical finding", f"{len(critical)} critical: {', '.join(critical)}")
    if warnings:
        yield _Claim("warning", f"{len(warnings)} warning{'s' * (len(warnings) > 1)}: {', '.join(warnings)}")
    if facts.data_warnings:
        names = ", ".join(dict.fromkeys(facts.data_warnings))
        yield _Claim("warning", f"the audit of the data warns of {names} (supervision.json)")
    bad = facts.evaluations[-1].bad_samples if facts.evaluations else ()
    if bad:
        names = ", ".join(map(str, bad))
        yield _Claim("warning", f"NaN or infinity in the validation samples {names}: no validation loss")
    if (diverged := _diverged(facts)) is not None:
        yield _Claim("diverged", f"it diverged: {diverged}", states_losses=True)
    elif facts.is_over and (nothing := _learned_nothing(facts)) is not None:
        yield _Claim("learned nothing", f"it learned nothing: {nothing}", states_losses=True)
    elif (worse := _worse_than_before(facts)) is not None:
        yield _Claim("worse than before", worse, states_losses=True, best_step=_best_step(facts))
    elif (overfits := _overfits(facts)) is not None:
        yield overfits
    if (sets := _sets_worse_than_before(facts)) is not None:
        yield _Claim("worse than before", sets)
    if not facts.saved:
        yield _Claim("not saved", "the last state could not be saved")
    if facts.state in ("failed", KILLED, RUNNING, UNKNOWN):
        yield _Claim(facts.state)
    elif facts.state != "finished":
        yield _Claim("ended early")
    if not facts.step or not (_finite(facts.losses) or facts.evaluations):
        yield _Claim("not measured")
    if not facts.examined:
        yield _Claim("not examined")


def _ending(facts: VerdictFacts) -> str:
    at = f"at step {facts.step:,}" + (f" of {facts.planned_steps:,}" if facts.planned_steps else "")
    reason = " ".join(facts.reason.split())
    reason = f"{reason[:MAX_REASON_CHARS]}..." if len(reason) > MAX_REASON_CHARS else reason
    if facts.state == "finished":
        return "finished"
    if facts.state == "stopped":
        return f"stopped by {reason} {at}" if reason else f"stopped {at}"
    if facts.state == "data_exhausted":
        return f"out of data {at}"
    if facts.state == RUNNING:
        return f"running, {at.removeprefix('at ')}"
    return f"{facts.state} {at}" + (f" ({reason})" if reason else "")


def _loss_summary(facts: VerdictFacts) -> str:
    losses = _finite(facts.losses)
    parts: list[str] = []
    if losses:
        begin = losses[0][1]
        late = [loss for step, loss in losses if 8 * step > 7 * losses[-1][0]]  # the last eighth of the steps
        end = statistics.fmean(
            late if len(late) >= MIN_LOSSES_AT_END else [loss for _, loss in losses[-MIN_LOSSES_AT_END:]]
        )
        parts.append(f"training loss {figure(begin)} -> {figure(end)}" if len(losses) > 1 else f"loss {figure(begin)}")
    if facts.evaluations:
        last = facts.evaluations[-1]
        best = min(_comparable(facts.evaluations), key=_loss_or_infinity, default=last)
        is_past = len(facts.evaluations) > 1 and best.loss < last.loss and best.step != last.step
        first = facts.evaluations[0]
        seen = f"validation loss {figure(last.loss)}"
        if first.step == 0 < last.step and first.batches == last.batches:
            seen += f" (before training {figure(first.loss)})"
        parts.append(seen + (f" (lowest {figure(best.loss)} at step {best.step:,})" if is_past else ""))
    return (", ".join(parts) or "no loss was measured") + _below_reference(facts)


def _below_reference(facts: VerdictFacts) -> str:
    """Return text such as `, 1.06 below what a bigram table reaches (2.46)`; "" if the loss is below no reference."""
    losses = [loss for _, loss in _finite(facts.losses)]
    loss = facts.evaluations[-1].loss if facts.evaluations else losses[-1] if losses else math.inf
    below = [(value, name) for name, value in facts.references.items() if loss < value]
    if not below:
        return ""
    value, name = min(below)
    return f", {value - loss:.2f} below what a {name} table reaches ({value:.2f})"


def _finite(losses: Losses) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in losses if _is_finite(loss)]


def _is_finite(loss: float) -> bool:
    return abs(loss) < MAX_LOSS  # False for NaN


def _end_window(count: int) -> int:
    return max(1, min(count, max(MIN_LOSSES_AT_END, count // 8)))


class _Change(NamedTuple):
    """The loss at the beginning and at the end, the standard error of their difference, and the noise of one loss."""

    begin: float
    end: float
    error: float
    noise: float

    @property
    def drop_in_errors(self) -> float:
        drop = self.begin - self.end
        return drop / self.error if self.error else math.copysign(math.inf, drop) if drop else 0.0


def _changes(values: Sequence[float]) -> list[_Change]:
    """Compare the end with the first 1, 2, 4, ... losses, up to a quarter: the initial drop may be short or long."""
    window = _end_window(len(values))
    noise = noise_of(values)
    end = statistics.fmean(values[-window:])
    counts = [1]
    while 2 * counts[-1] <= len(values) // 4:
        counts.append(2 * counts[-1])
    return [
        _Change(statistics.fmean(values[:count]), end, noise * math.sqrt(1 / count + 1 / window), noise)
        for count in counts
    ]


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of single values around their trend, from the differences of neighbours.

    The median makes it robust against a steep beginning and a few outliers.
    """
    steps = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(steps) / (0.6745 * math.sqrt(2)) if steps else 0.0


def _still_falls(losses: Losses) -> bool:
    newest = losses[-1][0]
    return slope_in_errors([(step, loss) for step, loss in losses if 2 * step > newest]) < FALLING_SLOPE_ERRORS


def _diverged(facts: VerdictFacts) -> str | None:
    """Return why the run diverged: the loss is not finite at the end, or it rose permanently; else None."""
    newest = [loss for _, loss in facts.losses[-5:]]
    if newest and 2 * sum(not _is_finite(loss) for loss in newest) > len(newest):
        return "the training loss is not finite"
    seen = facts.evaluations[-1] if facts.evaluations else None
    if seen and not seen.bad_samples and not _is_finite(seen.loss):
        return "the validation loss is not finite"
    if facts.step >= MIN_LOSSES and 2 * facts.skipped > facts.step:
        return "most updates were skipped"
    losses = _finite(facts.losses)
    if not facts.is_one_objective or len(losses) < MIN_LOSSES:
        return None
    may_recover = _still_falls(losses)
    values = [loss for _, loss in losses]
    last = values[-max(MIN_LOSSES, len(values) // 4) :]
    end = statistics.fmean(last)
    noise = noise_of(last)
    begin = values[0]
    rose = len(last) < len(values) and min(last) > begin and end - begin > MIN_DIVERGENCE_NOISES * noise
    # A contrastive loss may rise at first and end above its first value: its queue fills with harder negatives.
    exploded = max(values) > max(MIN_EXPLOSION * begin, UNIFORM_GUESS_NATS)
    if rose and (not may_recover or (facts.state == "finished" and exploded)):
        return f"the training loss rose from {figure(begin)} to {figure(end)}"
    if may_recover:
        return None
    window = len(last)
    starts = range(0, len(values) - window + 1, max(1, window // 8))
    lowest, at = min((statistics.fmean(values[start : start + window]), start) for start in starts)
    steepest = max(_changes(values), key=lambda change: change.drop_in_errors)
    drop = steepest.begin - lowest
    rise = end - lowest
    if drop > 2 * SIGNIFICANT_ERRORS * steepest.error and rise > max(
        drop / 2, SIGNIFICANT_ERRORS * noise / math.sqrt(window)
    ):
        step = losses[at + window - 1][0]
        return f"the training loss fell to {figure(lowest)} by step {step:,} and rose to {figure(end)}"
    return None


def _start_and_end(facts: VerdictFacts) -> tuple[Evaluated, Evaluated] | None:
    """Return the evaluation before the first step of a pretrained model and the last one, if they can be compared."""
    seen = _comparable(facts.evaluations)
    is_comparable = facts.is_over and facts.is_one_objective and len(seen) >= 2 and seen[0].step == 0
    return (seen[0], seen[-1]) if is_comparable else None


def _is_worse(after: float, before: float) -> bool:
    return after - before > MIN_RISE_SINCE_START * abs(before)


def _worse_than_before(facts: VerdictFacts) -> str | None:
    """Return a sentence if the validation loss is higher than before training."""
    seen = _start_and_end(facts)
    if seen is None or not _is_worse(seen[1].loss, seen[0].loss):
        return None
    before, after = figure(seen[0].loss), figure(seen[1].loss)
    return f"the model is worse than before training: its validation loss is {after} and was {before}"


def _sets_worse_than_before(facts: VerdictFacts) -> str | None:
    """Return a sentence with the further validation sets whose loss is higher than before training."""
    if (seen := _start_and_end(facts)) is None:
        return None
    before, after = seen[0].metrics, seen[1].metrics
    names = [name for name in before if name.endswith(".loss") and name in after and before[name] != seen[0].loss]
    listed = ", ".join(
        f"{name.removesuffix('.loss')} ({figure(before[name])} -> {figure(after[name])})"
        for name in names
        if _is_worse(after[name], before[name])
    )
    return f"the validation loss is higher than before training on {listed}" if listed else None


def _best_step(facts: VerdictFacts) -> int | None:
    """Return the step with the lowest validation loss, if that loss is lower than before training."""
    first, *trained = _comparable(facts.evaluations)
    best = min(trained, key=_loss_or_infinity)
    return best.step if best.loss < first.loss else None


def _learned_nothing(facts: VerdictFacts) -> str | None:
    if any(_is_learned_nothing(found) for found in facts.findings if found.severity != "info"):
        return "the loss is no better than that of a constant prediction, or of shuffled targets"
    losses = _finite(facts.losses)
    if facts.step < MIN_STEPS_LEARNING or len(losses) < MIN_LOSSES or _still_falls(losses):
        return None
    changes = _changes([loss for _, loss in losses])
    surest = changes[-1]
    if (guess := _is_a_guess(facts, surest)) is not None:
        return guess
    if not facts.is_one_objective or max(change.drop_in_errors for change in changes) > SIGNIFICANT_ERRORS:
        return None
    begin, end = figure(surest.begin), figure(surest.end)
    seen = [each.loss for each in _comparable(facts.evaluations)]
    if len(seen) >= 2 and seen[0] - min(seen[-1], seen[-2]) > MAX_VALIDATION_DROP * abs(seen[0]):
        return None
    if len(seen) >= MIN_EVALUATIONS:
        return (
            f"the training loss is {end} and was {begin}, which is within its noise, and the validation loss is "
            f"{figure(seen[-1])} and was {figure(seen[0])}"
        )
    if surest.begin - surest.end + SIGNIFICANT_ERRORS * surest.error > MAX_HIDDEN_DROP_FRACTION * abs(surest.begin):
        return None
    return f"the training loss is {end} and was {begin}, which is within its noise"


def _is_learned_nothing(found: Found) -> bool:
    """Return True if the finding, or one of its consequences, is that the loss is no better than a constant."""
    return LEARNED_NOTHING_CODE in {found.code, *(each.partition(":")[0] for each in found.consequences)}


def _is_a_guess(facts: VerdictFacts, change: _Change) -> str | None:
    """Return a sentence if neither training nor validation is better than a uniform guess among the classes."""
    if facts.chance is None or SIGNIFICANT_ERRORS * change.error > MAX_HIDDEN_DROP_FRACTION * facts.chance:
        return None
    seen = [each.loss for each in facts.evaluations]
    if change.end < facts.chance - SIGNIFICANT_ERRORS * change.error or any(
        loss < 0.99 * facts.chance for loss in seen
    ):
        return None
    return f"the loss is {figure(change.end)}, and that of a guess among all classes is {figure(facts.chance)}"


def _comparable(evaluations: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the evaluations on the same samples as the first one: the last may be on the full set."""
    return [each for each in evaluations if each.batches == evaluations[0].batches]


def _loss_or_infinity(seen: Evaluated) -> float:
    return seen.loss if _is_finite(seen.loss) else math.inf


def _noise_of_evaluations(losses: Sequence[float]) -> float:
    """Return the standard deviation of single evaluations, from second differences, which a trend hardly changes.

    Takes the larger of two estimates: for few evaluations the median alone is often far too small.
    """
    bends = [abs(before - 2 * middle + after) for before, middle, after in zip(losses, losses[1:], losses[2:])]
    if not bends:
        return 0.0
    root_mean_square = math.sqrt(statistics.fmean(bend * bend for bend in bends))
    return max(statistics.median(bends) / 0.6745, root_mean_square) / math.sqrt(6)


def _overfits(facts: VerdictFacts) -> _Claim | None:
    """Return a claim if validation loss rose after its best while training loss fell, both by more than their noise."""
    seen = [each for each in _comparable(facts.evaluations) if _is_finite(each.loss)]
    if len(seen) < MIN_EVALUATIONS:
        return None
    losses = [each.loss for each in seen]
    at = losses.index(min(losses))
    best = seen[at]
    rise = min(losses[-2:]) - losses[at]  # 0 unless two evaluations followed the best one
    if rise <= MIN_OVERFITTING_NOISES * _noise_of_evaluations(losses):
        return None
    if rise < MIN_RISE_OF_RANGE * (max(losses) - losses[at]):
        return None
    training = _finite(facts.losses)
    then = [loss for step, loss in training if step <= best.step]
    now = [loss for step, loss in training if step > best.step]
    if not then or not now:
        return None
    window = min(len(then), len(now), _end_window(len(training)))
    before, after = statistics.fmean(then[-window:]), statistics.fmean(now[-window:])
    error = noise_of([loss for _, loss in training]) * math.sqrt(2 / window)
    if before - after <= SIGNIFICANT_ERRORS * error or rise < MIN_RISE_OF_TRAINING_DROP * (before - after):
        return None
    text = (
        f"it overfits: the validation loss was lowest at step {best.step:,} ({figure(best.loss)}) and is "
        f"{figure(losses[-1])}, while the training loss fell from {figure(before)} to {figure(after)}"
    )
    return _Claim("overfits", text, states_losses=True, best_step=best.step)


def verdict_of(folder: RunFolder) -> RunVerdict:
    """Return the verdict in the log of a run. If its newest process wrote none, compute it from the log so far."""
    if not folder.log.is_file():
        return judge(VerdictFacts(state=state_of(folder.path, ())))
    newest = [each for each in read_end(folder.log) if isinstance(each, Started | Ended)][-1:]
    if newest and isinstance(newest[0], Ended) and newest[0].verdict is not None:
        return newest[0].verdict
    records = read_course(folder.log)
    ends = [each for each in records if isinstance(each, Ended)]
    state = state_of(folder.path, records)
    return judge(
        VerdictFacts(
            state=state,
            reason=ends[-1].reason if ends and ends[-1].ending == state else "",
            step=max((each.step for each in records if isinstance(each, Step | Watched | Ended)), default=0),
            losses=losses_in(records),
            evaluations=evaluations_in(records),
            findings=findings_in(records),
            skipped=sum(isinstance(each, Skipped) for each in records),
            examined=any(isinstance(each, Watched | Found) for each in records),
        )
    )


def losses_in(records: Iterable[Record]) -> list[tuple[int, float]]:
    """Return the training losses by step.

    Watched steps in which no loss was seen are left out. If a watched loop divides the losses of micro-batches for
    accumulation, their sum is returned instead of their mean.
    """
    every = tuple(records)
    is_divided = next((parts > 1 for each in reversed(every) if (parts := divided_by(each))), False)
    by_step = {
        each.step: _sum_of_parts(each) if is_divided and isinstance(each, Watched) else each.loss
        for each in every
        if isinstance(each, Step | Watched) and not _is_without_loss(each)
    }
    return [(step, by_step[step]) for step in sorted(by_step)]


def _is_without_loss(step: Step | Watched) -> bool:
    return isinstance(step, Watched) and math.isnan(step.loss) and not step.values.get("losses", True)


def divided_by(record: Record) -> int:
    """Return the number by which a watched loop divides its losses: that of its micro-batches, or 1; 0 if unknown."""
    if not isinstance(record, Examined) or record.experiment != "accumulation" or not record.values.get("is_plain"):
        return 0
    weights = record.values.get("weights") or (math.nan,)
    return len(weights) if None not in weights and math.isclose(sum(weights), 1.0, rel_tol=0.01) else 1


def _sum_of_parts(step: Watched) -> float:
    """Return the sum of the losses of a step if its loss is their mean; its loss otherwise."""
    parts = step.values.get("losses") or (step.loss,)
    is_mean = math.isclose(statistics.fmean(parts), step.loss, rel_tol=1e-6)
    return sum(parts) if is_mean else step.loss


_EVALUATION_NAMES = ("val", "test", "eval", "held")


def evaluations_in(records: Iterable[Record]) -> list[Evaluated]:
    """Return evaluations of the engine, then those that a watched loop reported by ``watch.log``."""
    every = tuple(records)
    logged = (_as_evaluation(each) for each in every if isinstance(each, Logged))
    seen = [each for each in every if isinstance(each, Evaluated)]
    return [*seen, *(each for each in logged if each is not None)]


def _as_evaluation(logged: Logged) -> Evaluated | None:
    """Return logged figures as an evaluation if one of them is a validation loss by its name; else None."""
    named = [
        name
        for name in logged.figures
        if "loss" in name.lower() and any(part in name.lower() for part in _EVALUATION_NAMES)
    ]
    if not named:
        return None
    loss = logged.figures[named[0]]
    metrics = {name: value for name, value in logged.figures.items() if name != named[0]}
    return Evaluated(time_s=logged.time_s, step=logged.step, loss=loss, weight=0.0, metrics=metrics, seconds=0.0)


def cost(ended: Ended) -> list[str]:
    """Return energy, CO2 and price as text, if they are known."""
    energy = [] if ended.energy_kwh is None else [f"{ended.energy_kwh:.3g} kWh"]
    energy += [] if ended.co2_g is None else [f"{ended.co2_g:.3g} g CO2"]
    return energy + ([] if ended.usd is None else [f"{ended.usd:.2f} USD"])
