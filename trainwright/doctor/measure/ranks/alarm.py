"""Diagnoses facts of a stalled loop, which cannot call the doctor itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.runs import records
from trainwright.runs.json_values import strict
from trainwright.runs.records import Found, Record


def record_of(facts: RanksFacts, step: int) -> records.Examined:
    """Returns the facts as a record of the log."""
    values = strict(vars(facts))
    return records.Examined(time_s=time.time(), step=step, experiment=RanksFacts.experiment, values=values)


def findings_of(facts: RanksFacts) -> list[Found]:
    """Returns the findings of these facts alone."""
    return [each.found for each in diagnose(RunContext([record_of(facts, facts.newest)])).findings]


def raise_alarm(facts: RanksFacts, write: Callable[[Record], None], print_line: Callable[[str], None]) -> None:
    """Writes the facts and the findings, and prints the findings."""
    write(record_of(facts, facts.newest))
    for found in findings_of(facts):
        write(replace(found, time_s=time.time()))
        print_line(f"{found.code}: {found.symptom}")
