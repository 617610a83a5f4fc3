"""A replayed step is looked at closely: every experiment, what the doctor asks for, and what it finds."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.commands.replay.result import Rerun
from trainwright.doctor.finding import make_finding
from trainwright.runs.records import Examined, Found, Record
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.findings import FindingsLog


def look_closely(done: Rerun, runner: ExperimentRunner, known: Iterable[Record]) -> None:
    """Every experiment of an incident and a checkup, and those that the doctor asks for; then its findings."""
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
        "True": "two runs in this process agree: what is different is the machine, a library, the code or its data, or "
        "state that is kept where it is not seen",
        "False": "two runs in this process differ too: the step is not deterministic, or the hardware errs",
    }
    remedy = "set deterministic: true (torch.use_deterministic_algorithms), and draw random numbers from torch only"
    where = [] if not done.notes else [("what is different by now", "; ".join(done.notes[:4]))]
    return make_finding(
        "resources.not_reproducible",
        "warning",
        done.step,
        symptom=f"step {done.step} run again is not the same bits",
        cause=causes.get(itself, "why is not known yet"),
        remedy=remedy if not done.notes else f"replay it as it was run first ({done.notes[0]}); then {remedy}",
        sure=0.5,
        evidence=[*((each.what, str(each.now), str(each.then)) for each in differ[:4]), *where],
    ).found
