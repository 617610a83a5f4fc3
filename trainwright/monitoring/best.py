"""Tracks the best validation: the checkpoint on disk, and better results that are not saved yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from trainwright.checkpoint.store import Best, read_best, repair_best
from trainwright.engine.evaluate import EvaluationResult
from trainwright.errors import suggest


class BestSoFar:
    """The best checkpoint of ``best.json`` in ``folder``, and a better result that is not on disk yet.

    ``metric`` is "loss" or a metric of the validation; None disables it. Only evaluations of ``batches`` batches are
    compared, 0 for the full set. ``run`` is the identity of the run.
    """

    def __init__(
        self,
        folder: Path,
        metric: str | None,
        *,
        is_largest: bool,
        batches: int = 0,
        warn: Callable[[str], None],
        run: str = "",
    ) -> None:
        self._folder = folder
        self._metric = metric
        self._batches = batches
        self._warn = warn
        self._run = run
        self._sign = -1.0 if is_largest else 1.0
        self._pointed_to = repair_best(folder, run)
        self._hoped_for: Best | None = None

    def evaluated(self, step: int, seen: EvaluationResult) -> Best | None:
        """Return the result after ``step`` if it is the best so far, so that a checkpoint should be saved."""
        if self._metric is None or seen.batches != self._batches:
            return None
        values = seen.figures
        if self._metric not in values:
            remedy = suggest(self._metric, values)
            self._warn(f"checkpoint.best: the validation has no metric {self._metric!r}: {remedy}")
            return None
        found = Best(step, self._metric, float(values[self._metric]), seen.batches)
        known = self._hoped_for or self._pointed_to
        if math.isfinite(found.value) and (known is None or self._beats(found, known)):
            self._hoped_for = found
            return found
        return None

    def _beats(self, found: Best, known: Best) -> bool:
        if known.metric != found.metric or known.batches not in (found.batches, None):
            return True
        return self._sign * found.value < self._sign * known.value

    def at(self, step: int) -> Best | None:
        """Return the best result from ``step``, unless it is on disk already or could not be saved."""
        return self._hoped_for if self._hoped_for and self._hoped_for.step == step else None

    def update(self, step: int) -> None:
        """Read which checkpoint on disk is the best. Must be called when the save of ``step`` has ended, successful or
        not.
        """
        self._pointed_to = read_best(self._folder, self._run)
        if self._hoped_for and self._hoped_for.step <= step:
            self._hoped_for = None
