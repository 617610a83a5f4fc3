"""The view of one run from its folder, whether it is finished, dead, running, or copied from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.report.examination import line_of_unexamined
from trainwright.report.pages.documents import RunDocuments
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.pages.rows import column
from trainwright.report.verdict import VerdictFacts, cost, evaluations_in, judge
from trainwright.runs.folder import RunFolder
from trainwright.runs.printing import readable
from trainwright.runs.reader import RUNNING, state_of
from trainwright.runs.records import (
    Ended,
    Evaluated,
    Found,
    Logged,
    NotSaved,
    OutOfMemory,
    Quarantined,
    Record,
    Replayed,
    RunVerdict,
    Saved,
    Skipped,
    Started,
    Unexamined,
)

RECENT_STEPS = 50
"""The number of newest steps that determine the current speed."""


@dataclass(frozen=True)
class Pin:
    """A mark on the curves at ``step``. ``finding`` is the number of the finding that it opens, None for others."""

    step: int
    kind: str
    label: str
    finding: int | None = None


class RunView(RunDocuments):
    """One run. ``log`` is what has been read so far; all properties refer to that state."""

    def __init__(self, path: Path, log: IncrementalLog) -> None:
        super().__init__(RunFolder(path))
        self.log = log

    @classmethod
    def read(cls, path: Path | str) -> RunView:
        """Read a complete run. Raises UsageError if there is none."""
        folder = RunFolder.open(path)
        log = IncrementalLog(folder.log)
        log.advance()
        return cls(folder.path, log)

    @property
    def name(self) -> str:
        return readable(self.folder.path.resolve().name)

    @property
    def state(self) -> str:
        """finished, stopped, data_exhausted, failed, running, killed, or "no end record" if it is unknown."""
        return state_of(self.folder.path, [self.log.newest_process] if self.log.newest_process else [])

    @property
    def ended(self) -> Ended | None:
        """The record of its end; None while it runs, and if its newest process wrote none."""
        newest = self.log.newest_process
        return newest if isinstance(newest, Ended) else None

    @property
    def verdict(self) -> RunVerdict:
        """The verdict in the log; if a run has not written one, the verdict so far."""
        ended = self.ended
        if ended is not None and ended.verdict is not None:
            return ended.verdict
        return judge(
            VerdictFacts(
                state=self.state,
                reason=ended.reason if ended else "",
                step=self.step,
                losses=self.log.losses,
                evaluations=self.evaluations,
                findings=self.findings,
                skipped=len(self.log.notes(Skipped)),
                examined=self.log.is_examined,
            )
        )

    @property
    def step(self) -> int:
        steps = column(self.log.rows, "step")
        newest = int(steps[-1]) if len(steps) else 0
        return max(newest, self.ended.step if self.ended else 0)

    @property
    def loss(self) -> float | None:
        """The newest training loss; infinite if it is not finite."""
        losses = column(self.log.rows, "loss")
        known = losses[~np.isnan(losses)]
        return float(known[-1]) if len(known) else None

    @property
    def lr(self) -> float | None:
        """The newest learning rate."""
        rates = column(self.log.rows, "lr")
        known = rates[np.isfinite(rates)]
        return float(known[-1]) if len(known) else None

    @property
    def evaluations(self) -> list[Evaluated]:
        return evaluations_in(self.log.notes(Evaluated, Logged))

    @property
    def val_loss(self) -> float | None:
        seen = self.evaluations
        return seen[-1].loss if seen else None

    @property
    def best(self) -> float | None:
        """The lowest validation loss."""
        return min((each.loss for each in self.evaluations if math.isfinite(each.loss)), default=None)

    @property
    def is_past_best(self) -> bool:
        """True if an earlier validation had a smaller loss than the newest one."""
        return self.best is not None and self.best != self.val_loss

    @property
    def seconds(self) -> float:
        """The running time of its processes in total."""
        return sum(max(0.0, end_s - begin_s) for begin_s, end_s in self.log.sessions)

    @property
    def step_s(self) -> float | None:
        """Median seconds per step over the newest steps."""
        times = column(self.log.rows, "step_s")[-RECENT_STEPS:]
        known = times[np.isfinite(times)]
        return float(np.median(known)) if len(known) else None

    @property
    def left_s(self) -> float | None:
        """The remaining seconds by its plan and its pace; None if unknown, or if it does not run."""
        if self.state != RUNNING:
            return None
        if self.planned_steps and self.step_s is not None:
            return max(0, self.planned_steps - self.step) * self.step_s
        planned_s = (self.plan.get("extent") or {}).get("seconds")
        return max(0.0, planned_s - self.seconds) if isinstance(planned_s, int | float) else None

    @property
    def findings(self) -> list[Found]:
        """The findings in their latest wording, the first cause first."""
        return self.log.findings

    @property
    def unexamined(self) -> str | None:
        """A line on experiments that had no time; None if all had time, or the run has no such record."""
        notes = [each for each in self.log.notes(Unexamined) if isinstance(each, Unexamined)]
        return line_of_unexamined(notes[-1], self.folder.path) if notes else None

    @property
    def pins(self) -> list[Pin]:
        """Findings, resumes and out-of-memory attempts, by step."""
        pins = [Pin(_since(each), each.severity, each.code, number) for number, each in enumerate(self.findings)]
        starts = [each for each in self.log.notes(Started)[1:] if isinstance(each, Started)]
        pins += [Pin(each.step, "resume", f"resumed at step {each.step}") for each in starts]
        out_of_memory = {each.step for each in self.log.notes(OutOfMemory) if isinstance(each, OutOfMemory)}
        pins += [Pin(step, "memory", f"out of memory in step {step}") for step in sorted(out_of_memory)[-50:]]
        return sorted(pins, key=lambda pin: pin.step)

    @property
    def records(self) -> Mapping[str, Sequence[Record]]:
        """The newest records for the tables of a page, by table."""
        kinds = {
            "checkpoints": (Saved, NotSaved),
            "skipped": (Skipped,),
            "quarantine": (Quarantined,),
            "out_of_memory": (OutOfMemory,),
            "replayed": (Replayed,),
            "processes": (Started, Ended),
        }
        return {
            name: sorted(self.log.notes(*each), key=lambda record: record.time_s)[-100:] for name, each in kinds.items()
        }

    def value_of(self, name: str) -> str:
        """Return the newest value of a metric, or that of a key of the recipe or plan, as text; "" if there is none."""
        for metric, (_, values) in self.log.figures.series():
            known = values[~np.isnan(values)]
            if metric == name and len(known):
                return number(float(known[-1]))
        keys = (pair for part in (self.recipe, self.plan) for pair in flat(part))
        return next((value for key, value in keys if key == name), "")

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the head of the page: names and values."""
        planned = self.planned_steps
        yield "step", f"{self.step:,}" + (f" of {planned:,}" if planned else "")
        yield "duration", human_seconds(self.seconds)
        if self.left_s is not None:
            yield "left", f"about {human_seconds(self.left_s)}"
        yield "loss", number(self.loss)
        if self.val_loss is not None:
            yield "validation", number(self.val_loss) + (f", best {number(self.best)}" if self.is_past_best else "")
        if self.step_s:
            yield "a step takes", human_seconds(self.step_s)
        if self.ended and (costs := cost(self.ended)):
            yield "cost", ", ".join(costs)
        if self.ended and self.ended.skipped:
            yield "skipped updates", f"{self.ended.skipped:,}"
        if self.plan.get("parameters") is not None:
            yield "parameters", f"{self.plan['parameters']:,}"


def number(value: float | None) -> str:
    """Return a loss as text."""
    return "-" if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"


def flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested JSON as dotted paths and values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and not any(isinstance(each, Mapping | list) for each in value):
        yield path, " ".join(map(str, value))
    else:
        yield path, "-" if value is None else str(value)


def memory_parts(view: RunView) -> list[tuple[str, str]]:
    """Return the predicted memory by kind."""
    parts = view.plan.get("memory_bytes") or {}
    return [(name, human_bytes(size)) for name, size in parts.items() if size]


def _since(found: Found) -> int:
    return found.step if found.since_step is None else found.since_step
