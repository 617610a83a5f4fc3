"""When a step is looked at closely and when a state is kept: as often as a share of the time allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

CHECKUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)
"""Steps since the watch began that are looked at closely; later ones are looked at as the share of time allows."""
FIRST = 4
"""The first of these steps are looked at though they cost more: most faults show in them."""
FIRST_SHARE = 0.1
"""Of the planned time: what the looks at these may take together, each of them a half of what is left, ..."""
FIRST_S, FIRST_S_OF_SECONDS = 4.0, 1.0
"""... but at least so many processor seconds, fewer where a run is as long as it was told in seconds, ..."""
FIRST_STEPS = 100
"""... and at most so many times what a step takes, or ``EARLY_S``."""
WORTH = 0.25
"""Of what the last look took: with less than this a look is not begun."""
EARLY_S = 6.0
"""Processor seconds that the looks at these steps may take together."""
EARLY_SHARE = 0.02
"""Of the planned time of a run, where one is known: what the same looks may take."""
ODD_SHARE = 0.01
"""Of the time since the watch began: what looks at jumps of the loss and at spikes may take beyond that."""
SHARE = 0.004
"""Of the time of all later steps: what the looks may take, and again what snapshots may take."""
LAST_SHARE, LAST_SHARE_OF_SECONDS = 0.25, 0.05
"""Of the time of training, and of that of a run that is counted in seconds: what the look at its end may take; at least
as much as the first looks together."""
NOT_JUDGED = 4
"""First losses that are not compared with those before them."""
LOOK_STEPS, LAST_LOOK_STEPS = 28, 68
"""How many steps one of the first looks takes as long as (44 to 56 the very first, 9 to 40 those after it), and the one
at the end (40 to 83): measured on the recipes in the box."""

AT_ONCE = 16
"""Calm steps that are judged together: one alone costs several times as much, since the code of it is cold then."""


class LookSchedule:
    """Decides which steps are looked at, and how long.

    ``planned_s``: how long the run will take; infinite where nobody knows. ``in_seconds``: it is counted in seconds, so
    that what looks take is lost to training.
    """

    def __init__(self, first_step: int, planned_s: float = math.inf, *, in_seconds: bool = False) -> None:
        self._first_step = first_step
        self._early_s = min(EARLY_S, EARLY_SHARE * planned_s)
        self._first_s = FIRST_SHARE * planned_s
        self._least_s = FIRST_S_OF_SECONDS if in_seconds else FIRST_S
        self._last_share = LAST_SHARE_OF_SECONDS if in_seconds else LAST_SHARE
        self._spent_s, self._last_s, self._next_s = 0.0, 0.0, 0.0
        self._looked_at = -16
        self._begin_s: float | None = None
        self._begin_step = first_step
        self._now_s = self._changed_s = self._step_s = 0.0
        self._due: set[int] = set()
        self._bad_in_a_row, self._has_changed = 0, False
        self._mean = self._deviation = 0.0  # of the loss, moving

    @property
    def spent_s(self) -> float:
        """What all looks so far took."""
        return self._spent_s

    def last_look_s(self, trained_s: float) -> float:
        """Processor seconds that the look at the end of a run may take that has trained for so long."""
        return max(self._least_s, self._last_share * trained_s)

    def is_next_due(self, step: int, now_s: float) -> bool:
        """Whether the step after ``step`` will be looked at. ``now_s`` is of the same clock as that of ``paid``."""
        taken = step - self._first_step
        if self._begin_s is None:
            self._begin_s = self._changed_s = now_s
        self._now_s = now_s
        if step > self._begin_step:
            self._step_s = max(0.0, now_s - self._begin_s - self._spent_s) / (step - self._begin_step)
        if taken < CHECKUPS[-1]:
            due = taken + 1 in CHECKUPS and self._is_worth(taken)
        else:
            due = step % AT_ONCE == 0 and now_s > self._next_s
        if due:
            self._due.add(step + 1)
        return due

    def next_at(self, step: int) -> int:
        """The next step after ``step`` that it must be asked at whether another is due, where ``step + 1`` is not."""
        return step + 1 if step - self._first_step <= CHECKUPS[-1] else (step // AT_ONCE + 1) * AT_ONCE

    def allowed_s(self, step: int, step_s: float) -> float:
        """Processor seconds that the look at ``step`` may take, where a step takes ``step_s``.

        Each of the first looks takes half of what is left for them; one that is not due, but wanted, what it needs.
        """
        taken = step - 1 - self._first_step
        if taken + 1 not in CHECKUPS:
            return math.inf
        early_s = self._early_s - self._spent_s
        if taken >= FIRST:
            return max(early_s, self._last_s)
        most_s = max(EARLY_S, FIRST_STEPS * step_s)
        return max(early_s, max(self._least_s, min(self._first_s, most_s)) - self._spent_s) / 2

    def _is_worth(self, taken: int) -> bool:
        if taken == 0 or self._spent_s + self._last_s <= self._early_s:
            return True
        return taken < FIRST and self.allowed_s(self._first_step + taken + 1, self._step_s) > WORTH * self._last_s

    def may_wait(self, step: int, step_s: float) -> bool:
        """Whether a step without reason to be looked at may be judged together with the next ones."""
        return step_s <= SHORT_S and step - self._first_step > CHECKUPS[-1] and step not in self._due

    def wants(
        self, step: int, loss: float, *, bad: bool, spiked: bool, urgent: bool = False, changed: bool = False
    ) -> bool:
        """Whether ``step``, which is over, is looked at.

        It is due, or ``bad``, or a probe is ``urgent``; or its loss jumped or its gradient norm ``spiked``, of which
        not every one is looked at; or its program has ``changed``, and then later, where there is no time for it now:
        steps are counted anew from there.
        """
        if changed:
            self._begin_again(step)
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        is_news = bad and (self._bad_in_a_row <= 4 or self._bad_in_a_row % 4 == 0)  # each look replays the step
        is_odd = (self._jumped(step, loss) or spiked) and step > self._looked_at + 16 and self._is_odd_affordable()
        is_other = self._has_changed and self._is_odd_affordable()
        wanted = is_news or step in self._due or is_odd or is_other or urgent
        if wanted:
            self._has_changed = False
            self._due.discard(step)
            self._looked_at = step
        return wanted

    def pass_over(self, first: int, losses: Sequence[float]) -> bool:
        """Takes steps from ``first`` on at once that are neither bad nor spiked nor changed, nor wanted.

        False, where one of them may be wanted: then nothing is taken.
        """
        is_due = self._has_changed or not self._due.isdisjoint(range(first, first + len(losses)))
        if is_due or first - self._first_step < NOT_JUDGED:
            return False
        mean, deviation = self._mean, self._deviation
        for loss in losses:
            if _is_far_above(mean, deviation, loss):
                return False
            mean, deviation = _moved(mean, deviation, loss)
        self._mean, self._deviation, self._bad_in_a_row = mean, deviation, 0
        return True

    def _begin_again(self, step: int) -> None:
        """Another program is another loop: its first steps are looked at in what looks at odd steps may take."""
        self._has_changed, self._first_step = True, step - 1
        self._early_s = max(self._early_s, self._spent_s + ODD_SHARE * (self._now_s - self._changed_s))
        self._changed_s = self._now_s

    def paid(self, cost_s: float, now_s: float) -> None:
        """A look took ``cost_s`` of the processor."""
        self._spent_s += cost_s
        self._last_s = cost_s
        self._next_s = now_s + cost_s / SHARE

    def _is_odd_affordable(self) -> bool:
        return self._spent_s + self._last_s <= self._early_s + ODD_SHARE * (self._now_s - (self._begin_s or 0.0))

    def _jumped(self, step: int, loss: float) -> bool:
        """Whether the loss is far above its moving average: by more than 6 times its mean deviation."""
        mean, deviation = self._mean, self._deviation
        if not math.isfinite(loss):
            return False
        if step - self._first_step < NOT_JUDGED:
            self._mean, self._deviation = loss, max(deviation, abs(loss - mean) if mean else 0.0)
            return False
        self._mean, self._deviation = _moved(mean, deviation, loss)
        return _is_far_above(mean, deviation, loss)


def _moved(mean: float, deviation: float, loss: float) -> tuple[float, float]:
    """Moving average and deviation after the next loss."""
    return mean + 0.1 * (loss - mean), deviation + 0.1 * (abs(loss - mean) - deviation)


def _is_far_above(mean: float, deviation: float, loss: float) -> bool:
    return loss > mean + max(6 * deviation, 0.05 * abs(mean))


def looks_s(step_s: float, num_steps: float, planned_s: float, *, in_seconds: bool = False) -> float:
    """About how many seconds the looks of a run take, and what is kept for them, where a step takes ``step_s``."""
    schedule = LookSchedule(0, planned_s, in_seconds=in_seconds)
    for step in range(int(min(num_steps, CHECKUPS[-1]))):
        now_s = schedule.spent_s + step * step_s
        if schedule.is_next_due(step, now_s):
            schedule.paid(min(LOOK_STEPS * step_s, schedule.allowed_s(step + 1, step_s)), now_s)
    last_s = last_look_s(step_s, planned_s, in_seconds=in_seconds)
    return schedule.spent_s + last_s + 2 * SHARE * planned_s


def last_look_s(step_s: float, trained_s: float, *, in_seconds: bool = False) -> float:
    """About how many seconds the look at the end takes."""
    return min(LAST_LOOK_STEPS * step_s, LookSchedule(0, in_seconds=in_seconds).last_look_s(trained_s))


SHORT_S = 0.1
"""Longer steps are judged one by one: what a judgement takes is nothing to them, and 16 of them are a long time."""
AGAIN_S = 0.1
"""Seconds that the steps between two snapshots may take, where that is more than ``keep`` steps: to run them again."""


class SnapshotSchedule:
    """Every so many steps, by what a snapshot costs: at least every ``keep`` steps, or every 0.1 s where that is more.

    At least every ``4 * keep`` steps, for the inputs of all of them are held. After 64 steps, only with the last of 16
    that are closed together.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._every = keep, 4

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is kept."""
        return step % self._every == 0

    def next_at(self, step: int) -> int:
        """The next step after ``step`` whose state is kept."""
        return (step // self._every + 1) * self._every

    def paid(self, step: int, cost_s: float, step_s: float) -> None:
        """A snapshot took ``cost_s``, where a step takes ``step_s``."""
        step_s = max(step_s, 1e-6)
        most = max(self._keep, min(4 * self._keep, int(AGAIN_S / step_s)))
        every = max(4, min(most, math.ceil(cost_s / (SHARE * step_s))))
        if step + every > 64:  # from then on it is asked once in 16 steps
            every = AT_ONCE * math.ceil(max(every, 2 * AT_ONCE) / AT_ONCE)
        self._every = every
