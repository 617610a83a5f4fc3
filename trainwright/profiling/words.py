"""Formats a profile as text and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.plan.amounts import human_seconds
from trainwright.profiling.audit import AuditRow
from trainwright.profiling.verdict import Advice, BoundVerdict, ProfileFacts
from trainwright.runs.json_values import strict

MAX_ERROR_PROBABILITY = 0.025
"""Probability that the bound is above the true median if both are equally fast."""
MIN_SPEED_UP = 1.03
"""Minimum speed-up of the bound that counts as a gain; a smaller one is not worth a change."""
ROUNDS, MIN_ROUNDS = 9, 6


@dataclass(frozen=True)
class SpeedUp:
    """The median of the rounds and its lower bound; ``noise`` is the median difference of blocks of the same code."""

    median: float
    at_least: float
    noise: float
    rounds: int

    @property
    def is_proven(self) -> bool:
        """True if the lower bound counts as a gain."""
        return self.at_least >= MIN_SPEED_UP


def compare_timings(one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS) -> SpeedUp:
    """Return the speed-up of ``other`` over ``one``. Their order in a round makes drift affect both equally."""
    ratios, noise = [], []
    for _ in range(rounds):
        first, second, third, fourth = one(), other(), other(), one()
        ratios.append((first + fourth) / (second + third))
        noise.append(abs(math.log(first / fourth)))
    return speed_up(ratios, noise)


def speed_up(ratios: Sequence[float], noise: Sequence[float]) -> SpeedUp:
    """Return the median of the ratios and a lower bound of the true median.

    The bound is an order statistic: for any distribution, the true median is below it with a probability of at most
    ``MAX_ERROR_PROBABILITY``.
    """
    ordered = sorted(ratios)
    return SpeedUp(
        statistics.median(ordered), ordered[_rank(len(ordered))], math.expm1(statistics.median(noise)), len(ordered)
    )


def _rank(count: int) -> int:
    """Return the greatest index i for which P(Binomial(count, 1/2) <= i) <= MAX_ERROR_PROBABILITY. Needs six rounds."""
    assert count >= MIN_ROUNDS
    below, index = 0.5**count, 0
    while below + math.comb(count, index + 1) * 0.5**count <= MAX_ERROR_PROBABILITY:
        index += 1
        below += math.comb(count, index) * 0.5**count
    return index


MAX_ROWS_PRINTED = 8
"""The number of operators and modules printed."""


@dataclass(frozen=True)
class TriedAdvice:
    """Advice, and how much faster it was; None if it was not tried, for the reason ``why_not``."""

    advice: Advice
    seen: SpeedUp | None = None
    why_not: str = ""

    def __str__(self) -> str:
        """Return one line."""
        changes = f" (it changes {self.advice.changes})" if self.advice.changes else ""
        if self.seen is None:
            measured = f"; not tried: {self.why_not}" if self.why_not else "; not measured"
            not_tried = measured if self.advice.settings else ""
            return f"{self.advice.name}: {self.advice.why}{not_tried}{changes}"
        text = f"{self.seen.median:.2f} times as fast"
        bounds = f"at least {self.seen.at_least:.2f}, {self.seen.rounds} rounds"
        noise = f"equal blocks differ by {self.seen.noise:.1%}"
        held = "" if self.seen.is_proven else ": no gain"
        return f"{self.advice.name}: measured {text}{held} ({bounds}; {noise}){changes}"


@dataclass(frozen=True)
class Profile:
    """The measurements, the verdict, and the advice that was tried."""

    facts: ProfileFacts
    verdict: BoundVerdict
    tried: tuple[TriedAdvice, ...] = ()
    audit: tuple[AuditRow, ...] = ()

    @property
    def gains(self) -> tuple[TriedAdvice, ...]:
        """Advice that was tried and is faster, the fastest first."""
        proven = [each for each in self.tried if each.seen is not None and each.seen.is_proven]
        return tuple(sorted(proven, key=lambda each: -each.seen.median if each.seen else 0.0))

    @property
    def open(self) -> tuple[TriedAdvice, ...]:
        """Advice that was not tried."""
        tried = {each.advice for each in self.tried}
        untried = [TriedAdvice(each) for each in self.verdict.advice if each not in tried]
        return (*(each for each in self.tried if each.seen is None), *untried)

    @property
    def next(self) -> str:
        """The next thing to do, in one line."""
        if self.gains:
            return str(self.gains[0])
        return str(self.open[0]) if self.open else "nothing to gain"

    def lines(self) -> Iterator[str]:
        """Yield the text output."""
        facts, verdict = self.facts, self.verdict
        if self.audit:
            yield "audit: what ran, against what the recipe requests"
            yield from (f"  {row}" for row in self.audit)
        yield verdict.headline
        yield f"next      {self.next}"
        yield f"step      {human_seconds(facts.step_s)}, over {facts.steps} steps at full speed, in {facts.precision}"
        for phase, seconds in facts.phases.items():
            if facts.fraction(phase) >= 0.005:
                yield f"  {phase:<11} {human_seconds(seconds):>9}  {facts.fraction(phase):4.0%}"
        yield from (f"evidence  {each}" for each in verdict.evidence)
        yield from (f"tried     {each}" for each in self.tried if each.seen is not None)
        yield from (f"advice    {each}" for each in self.open)
        yield "operator                                 phase      calls    host   device"
        for one in facts.operators[:MAX_ROWS_PRINTED]:
            device = human_seconds(one.device_s) if one.device_s else ""
            yield f"  {one.op[:38]:<38} {one.phase:<8} {one.calls:>7.0f} {human_seconds(one.host_s):>9} {device:>8}"
        yield "module                                   forward  backward"
        for module in facts.modules[:MAX_ROWS_PRINTED]:
            name = f"{module.path or '(outside)'} {module.kind}"[:38]
            yield f"  {name:<38} {human_seconds(module.forward_s):>9} {human_seconds(module.backward_s):>9}"
        if facts.memory:
            yield f"memory    up to {max(facts.memory):,} bytes were allocated in a step above what it began with"
        yield from (f"missing   {name}: {why}" for name, why in facts.failed.items())

    def to_json(self) -> Mapping[str, object]:
        """Return the content of ``profile.json``."""
        facts = {name: value for name, value in vars(self.facts).items() if name != "work"}
        value = strict({"facts": facts, "verdict": self.verdict, "tried": self.tried, "audit": self.audit})
        advice = [str(each) for each in (*(each for each in self.tried if each.seen), *self.open)]
        return {**value, "next": self.next, "gains": [str(each) for each in self.gains], "advice": advice}
