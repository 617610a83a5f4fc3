"""Decides which steps are examined, and before which steps a state is kept."""

from __future__ import annotations

import math

from trainwright.watching.budget import REPEATED_FRACTION, ExaminationBudget

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)
"""Numbers of the candidates: steps that may be examined, counted from the start or a change of the program.

Later every 16th step is a candidate.
"""
EVERY = 16
SHORT_S = 0.1
"""After the first candidates, any step longer than this may be examined."""
NOT_COMPARED = 4
"""Number of first losses that are not compared with earlier ones."""
MIN_STEPS_BETWEEN_JUMPS = 16
"""A loss that jumps fewer steps after an examination is not examined again."""
CHEAP_S = 0.05
"""Candidates are always examined if an examination without experiments takes at most this time.

Such an examination shows the order of calls, modes, and sharing from records alone. It takes 3 to 5 ms for a model of
a million weights.
"""
FIRST = 4
"""If steps are longer than SHORT_S, only this many of the first candidates are examined."""
LEAST_WORTH = 4
"""Minimum ratio between the cost of an examination's experiments and its cost without any."""


class ExaminationSchedule:
    """Decides which steps are examined, for a user's loop and for the engine.

    The first candidates are examined if an examination without experiments is cheap. A non-finite step is examined; of
    more than four in a row, every fourth. A later candidate is examined if the budget covers the next experiment
    (``plan_next``).
    """

    def __init__(self, first_step: int, budget: ExaminationBudget) -> None:
        self._first_step, self._budget = first_step, budget
        self._overhead_s = self._wanted_s = 0.0
        self._repeat_at_s = 0.0
        self._examined_at = -MIN_STEPS_BETWEEN_JUMPS
        self._due: set[int] = set()
        self._bad_in_a_row, self._has_changed = 0, False
        self._mean = self._deviation = 0.0  # moving averages of the loss and its absolute deviation

    def is_next_due(self, step: int) -> bool:
        """Returns True if the step after ``step`` will be examined."""
        due = self.is_candidate(step) and (step == self._first_step or self._is_worth(step))
        if due:
            self._due.add(step + 1)
        return due

    def is_candidate(self, step: int) -> bool:
        """Returns True if the step after ``step`` may be examined."""
        taken = step - self._first_step
        if taken < CANDIDATES[-1]:
            return taken + 1 in CANDIDATES
        return step % EVERY == 0 or self._budget.step_s > SHORT_S

    def _is_worth(self, step: int) -> bool:
        budget, taken = self._budget, step - self._first_step
        is_cheap = self._overhead_s <= CHEAP_S and (taken < FIRST or budget.step_s <= SHORT_S)
        if taken < CANDIDATES[-1] and (budget.is_lifted or is_cheap):
            return True
        if budget.is_lifted:
            return budget.trained_s >= self._repeat_at_s
        if budget.trained_s >= self._repeat_at_s:
            return budget.left_s >= self._overhead_s
        return budget.left_s >= self._overhead_s + self._wanted_s

    def wants(
        self, step: int, loss: float, *, bad: bool, spiked: bool, urgent: bool = False, changed: bool = False
    ) -> bool:
        """Returns True if ``step``, which has ended, is examined.

        It is due, or ``bad`` (not finite), or a probe is ``urgent``. Within the budget also if its loss jumped, its
        gradient norm ``spiked`` or its program has ``changed``. After a change, candidates are counted from this step.
        """
        if changed:
            self._has_changed, self._first_step = True, step - 1
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        is_news = bad and (self._bad_in_a_row <= 4 or self._bad_in_a_row % 4 == 0)  # the step is replayed each time
        is_odd = (self._jumped(step, loss) or spiked) and step > self._examined_at + MIN_STEPS_BETWEEN_JUMPS
        wanted = is_news or urgent or step in self._due
        if not wanted and (is_odd or self._has_changed):
            wanted = self._budget.left_s >= self._overhead_s  # read last, because the clock is slow in a container
        if wanted:
            self._has_changed = False
            self._due.discard(step)
            self._examined_at = step
        return wanted

    @property
    def is_repeat_due(self) -> bool:
        """Returns True if the repeated experiments are due."""
        return self._budget.is_lifted or self._budget.trained_s >= self._repeat_at_s

    def plan_next(self, overhead_s: float, *, wanted_s: float = math.inf, repeated_s: float = 0.0) -> None:
        """Sets when the next examination is due, after one that took ``overhead_s`` besides its experiments.

        ``wanted_s`` are the predicted seconds of the next pending experiment (infinity without one), ``repeated_s``
        those of the repeated experiments.
        """
        if self.is_repeat_due:
            self._repeat_at_s = self._budget.trained_s + (overhead_s + repeated_s) / REPEATED_FRACTION
        self._overhead_s = (
            min(overhead_s, 2 * self._overhead_s) if self._overhead_s else overhead_s
        )  # a single slow examination may be an outlier
        self._wanted_s = max(wanted_s, LEAST_WORTH * self._overhead_s)

    def _jumped(self, step: int, loss: float) -> bool:
        """Returns True if the loss exceeds its moving average by more than 6 mean deviations and by more than 5 %."""
        mean, deviation = self._mean, self._deviation
        if not math.isfinite(loss):
            return False
        if step - self._first_step < NOT_COMPARED:
            self._mean, self._deviation = loss, max(deviation, abs(loss - mean) if mean else 0.0)
            return False
        self._mean, self._deviation = mean + 0.1 * (loss - mean), deviation + 0.1 * (abs(loss - mean) - deviation)
        return loss > mean + max(6 * deviation, 0.05 * abs(mean))


MAX_REPLAYED_S = 0.1
"""Seconds of training between two snapshots, which a replay may have to repeat. ``keep`` steps may take longer."""
SNAPSHOT_FRACTION = 0.004
"""Fraction of the training time for snapshots."""


class SnapshotSchedule:
    """Decides when to take snapshots: the interval between two depends on their cost.

    It is at most ``keep`` steps, or 0.1 s if that is longer, and never more than ``4 * keep`` steps, because the inputs
    of all these steps are held.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._every = keep, 4

    def is_due(self, step: int) -> bool:
        """Returns True if the state after ``step`` is kept."""
        return step % self._every == 0

    def paid(self, cost_s: float, step_s: float) -> None:
        """Adapts the interval to a snapshot that took ``cost_s``, with steps of ``step_s``."""
        step_s = max(step_s, 1e-6)
        most = max(self._keep, min(4 * self._keep, int(MAX_REPLAYED_S / step_s)))
        self._every = max(4, min(most, math.ceil(cost_s / (SNAPSHOT_FRACTION * step_s))))
