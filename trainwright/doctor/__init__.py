"""The doctor: from measurements of a run to findings, for live runs, finished runs and user loops alike.

``checks`` evaluate measurements of ``measure``, which are dataclasses of ``facts``. ``remedies`` are tried in a replay.
Checks need no torch. This module exports what the file of a check imports.
"""

from trainwright.doctor.check import NotApplicable, Result, Results, check
from trainwright.doctor.context import Every, RunContext, by_experiment
from trainwright.doctor.finding import ExperimentRequest, Finding, Measured, RemedyTrial, in_words
from trainwright.errors import listed
from trainwright.runs.records import Where

__all__ = [
    "Every",
    "ExperimentRequest",
    "Finding",
    "Measured",
    "NotApplicable",
    "RemedyTrial",
    "Result",
    "Results",
    "RunContext",
    "Where",
    "by_experiment",
    "check",
    "in_words",
    "listed",
]
