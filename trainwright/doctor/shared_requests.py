"""Decides when a check requests a costly experiment again."""

from __future__ import annotations

from trainwright.doctor.context import Measurement, RunContext
from trainwright.runs.records import Examined

RUN_LENGTH_RATIO = 3
"""An experiment is due again when the run is this many times as long."""


def is_due(run: RunContext, kind: type[Measurement]) -> bool:
    """Returns True for the first time, and again when the run is three times as long."""
    tried = [e.step for e in run.records if isinstance(e, Examined) and e.experiment == kind.experiment]
    return bool(run.steps) and (not tried or run.last_step >= RUN_LENGTH_RATIO * tried[-1])
