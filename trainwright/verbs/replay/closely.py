"""A replayed step is looked at closely: every experiment, what the doctor wishes for, and what it finds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.finding import finding
from trainwright.recorder.hooks import muted
from trainwright.runlog.records import Examined, Found, Record
from trainwright.verbs.replay.result import Rerun
from trainwright.watching.experiments import ExperimentRunner


def look_closely(done: Rerun, examiner: ExperimentRunner, known: Iterable[Record]) -> None:
    """Every experiment of an incident and a checkup, and those that the doctor wishes for; then its findings."""
    done.records = list(known)

    def note(told: dict[str, Any]) -> None:
        for name, values in told.items():
            at = values.pop("step", done.step)
            done.records.append(Examined(time_s=time.time(), step=at, experiment=name, values=values))

    with muted():
        for why in ("incident", "checkup"):
            note(examiner.look(done.step, why))
        for _ in range(4):
            diagnosis = diagnose(Case(done.records))
            told = examiner.grant(done.step, diagnosis.requests)
            if not told:
                break
            note(told)
        for said in diagnosis.findings:
            tried = examiner.attempt(said.found.step, said.trial)
            done.findings.append(dataclasses.replace(said.found, time_s=time.time(), tried=(*said.found.tried, *tried)))
    if not done.same_bits and done.compared and not (done.settings or done.inexact):
        done.findings.append(_not_reproducible(done))


def _not_reproducible(done: Rerun) -> Found:
    differ = [each for each in done.compared if not each.equal]
    again = [r for r in done.records if isinstance(r, Examined) and r.experiment == "again" and r.step == done.step]
    itself = str(again[-1].values.get("same_twice")) if again else ""
    causes = {
        "True": "two runs in this process agree: what is different is the machine, a library, the code or its data, or "
        "state that is kept where it is not seen",
        "False": "two runs in this process differ too: the step is not deterministic, or the hardware errs",
    }
    remedy = "set deterministic: true (torch.use_deterministic_algorithms), and draw random numbers from torch only"
    where = [] if not done.notes else [("what is different by now", "; ".join(done.notes[:4]))]
    return finding(
        "hw.not_reproducible",
        "warning",
        done.step,
        symptom=f"step {done.step} run again is not the same bits",
        cause=causes.get(itself, "why is not known yet"),
        remedy=remedy if not done.notes else f"replay it as it was run first ({done.notes[0]}); then {remedy}",
        sure=0.5,
        evidence=[*((each.what, str(each.now), str(each.then)) for each in differ[:4]), *where],
    ).found
