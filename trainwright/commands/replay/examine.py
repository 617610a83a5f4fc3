"""Examines a replayed step with all experiments, and diagnoses it."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.commands.replay.result import Rerun
from trainwright.doctor.finding import make_finding
from trainwright.runs.records import Examined, Found, Record
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.findings import FindingsLog


def examine_replay(done: Rerun, runner: ExperimentRunner, known: Iterable[Record]) -> None:
    """Run every experiment of an incident and of an examination, and those that the doctor requests; then diagnose."""
    log = FindingsLog(runner, (), done.examined.append, known=known)
    log.look(done.step, "incident", "checkup")
    done.records, done.findings, done.unexamined = log.records, log.findings(), runner.not_run(is_later=True)
    if not done.same_bits and done.compared and not (done.settings or done.inexact):
        done.findings.append(_not_reproducible(done))


def _not_reproducible(done: Rerun) -> Found:
    differ = [each for each in done.compared if not each.equal]
    again = [r for r in done.records if isinstance(r, Examined) and r.experiment == "again" and r.step == done.step]
    itself = str(again[-1].values.get("same_twice")) if again else ""
    causes = {
        "True": "two runs in this process agree: the machine, a library, the code, its data or unrecorded state is "
        "different",
        "False": "two runs in this process differ too: the step is not deterministic, or the hardware has faults",
    }
    remedy = "set deterministic: true (torch.use_deterministic_algorithms), and draw random numbers from torch only"
    where = [] if not done.notes else [("differences to the recorded run", "; ".join(done.notes[:4]))]
    return make_finding(
        "resources.not_reproducible",
        "warning",
        done.step,
        symptom=f"the replay of step {done.step} has different bits",
        cause=causes.get(itself, "the cause is not known yet"),
        remedy=remedy
        if not done.notes
        else f"first replay it in the original environment ({done.notes[0]}); then {remedy}",
        sure=0.5,
        evidence=[*((each.what, str(each.now), str(each.then)) for each in differ[:4]), *where],
    ).found
