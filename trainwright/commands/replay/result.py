"""The result of the ``replay`` command: compared numbers, findings, and their output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.commands.replay.change import Changed
from trainwright.doctor.finding import make_finding
from trainwright.report.findings import lines_of
from trainwright.runs.json_values import JsonValue, strict
from trainwright.runs.records import Examined, Found, Record, Replayed
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.findings import FindingsLog

Say = Callable[[str], None]
"""Receives a line for the user."""


@dataclass(frozen=True)
class Compared:
    """One number of the step: its recorded and its replayed value."""

    what: str
    then: object
    now: object

    @property
    def equal(self) -> bool:
        return repr(self.then) == repr(self.now)  # a NaN is the same as a NaN


@dataclass
class Rerun:
    """The result of a replay of ``step`` from ``source``, a run folder or bundle.

    ``error`` is the exception of the step, if it raised one. ``blind`` is the reason if the step cannot be replayed.
    ``notes`` are remarks on the comparison, such as another version of torch. ``inexact`` is True if an input of the
    step is unknown, so that different bits are not a finding. The ``findings`` are made from ``records``; one is added
    if the bits differ without a known reason. ``examined`` are the records of this replay only, ``unexamined`` the
    experiments that did not run. ``changed`` is the outcome of a change that was tried instead of an examination.
    """

    step: int
    source: Path
    compared: list[Compared] = field(default_factory=list)
    error: str | None = None
    blind: str | None = None
    notes: list[str] = field(default_factory=list)
    settings: tuple[str, ...] = ()
    inexact: bool = False
    records: list[Record] = field(default_factory=list)
    findings: list[Found] = field(default_factory=list)
    examined: list[Record] = field(default_factory=list)
    unexamined: list[str] = field(default_factory=list)
    changed: Changed | None = None

    @property
    def same_bits(self) -> bool:
        return not self.blind and bool(self.compared) and all(each.equal for each in self.compared)

    @property
    def exit_code(self) -> int:
        return 0 if self.same_bits else 1

    @property
    def outcome(self) -> str:
        if self.blind:
            return f"cannot be replayed: {self.blind}"
        differ = [each for each in self.compared if not each.equal]
        changed = f" with {', '.join(self.settings)}" if self.settings else ""
        if self.same_bits:
            return f"the same bits{changed}: {', '.join(each.what for each in self.compared)}"
        differences = "; ".join(f"{each.what} was {each.then}, is {each.now}" for each in differ[:4])
        return f"not the same bits{changed}: {differences or 'nothing was recorded to compare with'}"

    @property
    def replayed(self) -> Replayed:
        """Return the record for the log."""
        outcome = self.outcome + (f"; it raised {self.error}" if self.error else "")
        return Replayed(
            time_s=time.time(), step=self.step, bundle=str(self.source), same_bits=self.same_bits, outcome=outcome
        )

    def lines(self) -> list[str]:
        raised = [f"it raised {self.error}"] if self.error else []
        notes = [f"note: {each}" for each in self.notes]
        findings = lines_of(self.findings) if self.changed is None else []
        if self.changed is not None:
            notes.append(f"tried {self.changed.change}: {self.changed.outcome}")
        return [f"step {self.step} of {self.source}: {self.outcome}", *raised, *notes, *findings]

    def to_json(self) -> dict[str, JsonValue]:
        return strict(
            {
                "step": self.step,
                "source": str(self.source),
                "same_bits": self.same_bits,
                "outcome": self.outcome,
                "error": self.error,
                "compared": self.compared,
                "notes": self.notes,
                "changed": self.changed,
                "findings": self.findings,
                "examined": [each for each in self.records if isinstance(each, Examined)],
            }
        )


def examine_replay(done: Rerun, runner: ExperimentRunner, known: Iterable[Record]) -> None:
    """Run every experiment of an incident and of an examination, and those that the doctor requests; then diagnose."""
    log = FindingsLog(runner, (), done.examined.append, known=known)
    log.examine(done.step, "incident", "checkup")
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
