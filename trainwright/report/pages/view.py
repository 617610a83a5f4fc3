"""The view of one run from its folder, whether it is finished, dead, running, or copied from elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from trainwright.plan.amounts import human_seconds
from trainwright.report import bad_cases
from trainwright.report.bad_cases import BadCases
from trainwright.report.examination import line_of_unexamined
from trainwright.report.marks import NAME as MARKS_FILE
from trainwright.report.marks import Marks, RunMarks, read_marks
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.pages.rows import column
from trainwright.report.verdict import VerdictFacts, cost, evaluations_in, judge
from trainwright.runs import supervision
from trainwright.runs.files import UnreadableFile, read_end_of_text, read_text
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
from trainwright.runs.secrets import masked
from trainwright.runs.shapes import ModelFile, PlanFile, ProfileFile, ProvenanceFile, read_as, read_object
from trainwright.runs.supervision import Supervision

T = TypeVar("T")
PICTURES = {"graph.svg": "The graph of a step", "timeline.svg": "The memory of a step, as it was planned"}
"""Drawings in a run folder, written by `trainwright graph RUN` and `trainwright plan RUN`."""
NEWEST_SAMPLES = 20_000
"""The length of the newest samples that are shown, in characters."""


@lru_cache(maxsize=2000)
def _recipe_in(text: str) -> Any:
    """Parse a recipe. Cached, because a list of runs with recipe keys as columns is refreshed each second."""
    from trainwright.recipe.yaml_core import read

    return read(text, "recipe.yaml").value


def _is_loss(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


RECENT_STEPS = 50
"""The number of newest steps that determine the current speed."""


@dataclass(frozen=True)
class Pin:
    """A mark on the curves at ``step``. ``finding`` is the number of the finding that it opens, None for others."""

    step: int
    kind: str
    label: str
    finding: int | None = None


class RunView:
    """One run. ``log`` is what has been read so far; all properties refer to that state.

    Each document in its folder is empty or None if it is missing or cannot be read.
    """

    def __init__(self, path: Path, log: IncrementalLog) -> None:
        self.folder = RunFolder(path)
        self.log = log
        self._unreadable: dict[str, str] = {}

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
        return min((each.loss for each in self.evaluations if math.isfinite(each.loss)), default=None)

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
        """The remaining seconds according to plan and current speed; None if unknown, or if the run is not running."""
        if self.state != RUNNING:
            return None
        if self.planned_steps and self.step_s is not None:
            return max(0, self.planned_steps - self.step) * self.step_s
        planned_s = (self.plan.get("extent") or {}).get("seconds")
        return max(0.0, planned_s - self.seconds) if isinstance(planned_s, int | float) else None

    @property
    def findings(self) -> list[Found]:
        return self.log.findings

    @property
    def unexamined(self) -> str | None:
        """A line on experiments that there was no time for; None if there are none, or the log does not say."""
        notes = [each for each in self.log.notes(Unexamined) if isinstance(each, Unexamined)]
        return line_of_unexamined(notes[-1], self.folder.path) if notes else None

    @property
    def pins(self) -> list[Pin]:
        pins = [Pin(_since(each), each.severity, each.code, number) for number, each in enumerate(self.findings)]
        starts = [each for each in self.log.notes(Started)[1:] if isinstance(each, Started)]
        pins += [Pin(each.step, "resume", f"resumed at step {each.step}") for each in starts]
        out_of_memory = {each.step for each in self.log.notes(OutOfMemory) if isinstance(each, OutOfMemory)}
        pins += [Pin(step, "memory", f"out of memory in step {step}") for step in sorted(out_of_memory)[-50:]]
        return sorted(pins, key=lambda pin: pin.step)

    @property
    def records(self) -> Mapping[str, Sequence[Record]]:
        """The newest 100 records of each table of the page, by table."""
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
        planned = self.planned_steps
        yield "step", f"{self.step:,}" + (f" of {planned:,}" if planned else "")
        yield "duration", human_seconds(self.seconds)
        if self.left_s is not None:
            yield "left", f"about {human_seconds(self.left_s)}"
        yield "loss", number(self.loss)
        if self.val_loss is not None:
            is_past_best = self.best is not None and self.best != self.val_loss
            yield "validation", number(self.val_loss) + (f", best {number(self.best)}" if is_past_best else "")
        if self.step_s:
            yield "a step takes", human_seconds(self.step_s)
        if self.ended and (costs := cost(self.ended)):
            yield "cost", ", ".join(costs)
        if self.ended and self.ended.skipped:
            yield "skipped updates", f"{self.ended.skipped:,}"
        if self.plan.get("parameters") is not None:
            yield "parameters", f"{self.plan['parameters']:,}"

    def _read(self, path: Path, read: Callable[[Path], T], default: T) -> T:
        if not os.path.lexists(path):
            return default
        try:
            return read(path)
        except UnreadableFile as error:
            self._unreadable[path.name] = error.reason
            return default

    @property
    def unreadable(self) -> dict[str, str]:
        """The reason why each unreadable document is not shown, by the name of its file."""
        names = "recipe plan provenance model bad_cases supervision profile pictures all_marks"
        for document in names.split():
            getattr(self, document)  # is read at the first access
        return self._unreadable

    @cached_property
    def recipe_text(self) -> str:
        """The recipe as text without secrets: the user's text if it has none; "" if it cannot be read."""
        if not self.recipe:
            return ""
        if self.recipe == self._parsed:
            return self._written
        from trainwright.recipe.yaml_core import write

        return write(self.recipe)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe without secrets. Empty if it cannot be read or is missing, as for a watched loop."""
        return masked(self._parsed)

    @cached_property
    def _written(self) -> str:
        return self._read(self.folder.recipe, read_text, "")

    @cached_property
    def _parsed(self) -> dict[str, Any]:
        if not self._written:  # a watched loop has no recipe, and reading one imports a lot
            return {}
        from trainwright.recipe.yaml_core import UnreadableError

        try:
            value = _recipe_in(self._written)
        except UnreadableError as error:
            self._unreadable["recipe.yaml"] = str(error)
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def plan(self) -> dict[str, Any]:
        return self._read(self.folder.plan, lambda path: masked(read_object(path, PlanFile)), {})

    @property
    def settings(self) -> list[dict[str, str]]:
        """The header of the run: name, value, origin and reason of each setting; [] for an older version."""
        header = self.plan.get("header")
        found = header.get("settings") if isinstance(header, dict) else None
        keys = ("name", "value", "origin", "why")
        rows = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        return [{key: str(each.get(key, "")) for key in keys} for each in rows]

    @cached_property
    def provenance(self) -> dict[str, Any]:
        return self._read(self.folder.provenance, lambda path: masked(read_object(path, ProvenanceFile)), {})

    @cached_property
    def model(self) -> dict[str, Any]:
        return self._read(self.folder.path / "model.json", lambda path: read_object(path, ModelFile), {})

    @cached_property
    def bad_cases(self) -> BadCases | None:
        """The result of `trainwright errors`; None if it has not run."""
        return self._read(self.folder.path / bad_cases.NAME, bad_cases.read_bad_cases, None)

    @cached_property
    def supervision(self) -> tuple[Supervision, ...]:
        """The audits of the data in supervision.json; () for a run without labels that could be masked."""
        return self._read(self.folder.path / supervision.NAME, supervision.read_supervision, ())

    @cached_property
    def profile(self) -> ProfileFile | None:
        return self._read(self.folder.path / "profile.json", lambda path: read_as(path, ProfileFile), None)

    @cached_property
    def all_marks(self) -> Marks:
        """The tags, notes, panels and columns that the user chose for the runs of its folder."""
        folder = self.folder.path.resolve().parent
        return self._read(folder / MARKS_FILE, lambda path: read_marks(path.parent), Marks())

    @property
    def marks(self) -> RunMarks:
        return self.all_marks.of(self.folder.path.resolve())

    @property
    def modules(self) -> list[dict[str, Any]]:
        trees: list[dict[str, Any]] = self.model.get("modules", [])
        return trees

    @property
    def can_be_drawn(self) -> bool:
        """True if its recipe can build its model; objects that were passed in Python cannot be rebuilt."""
        model = self.recipe.get("model")
        return isinstance(model, dict) and not str(model.get("use", "live:")).startswith("live:")

    @property
    def planned_steps(self) -> int | None:
        """The number of steps in the plan; None if the run is limited in seconds, or there is no plan."""
        steps = (self.plan.get("extent") or {}).get("steps")
        return steps if steps and steps > 0 else None

    @property
    def references(self) -> dict[str, float]:
        """Reference losses by name: of a uniform guess among all classes, and the known losses of the dataset."""
        known = self.model.get("reference_losses", {})
        marks = {name: value for name, value in known.items() if _is_loss(value)}
        guess = self.plan.get("expected_loss")
        if _is_loss(guess) and not any(math.isclose(guess, each, rel_tol=1e-3) for each in marks.values()):
            marks["uniform guess"] = guess
        return marks

    @property
    def samples(self) -> str:
        folder = self.folder.samples
        if folder.is_symlink():
            return ""
        return self._read(folder / "samples.txt", lambda path: read_end_of_text(path, 4 * NEWEST_SAMPLES), "")[
            -NEWEST_SAMPLES:
        ]

    @cached_property
    def pictures(self) -> dict[str, str]:
        texts = {title: self._read(self.folder.path / name, read_text, "") for name, title in PICTURES.items()}
        return {title: text for title, text in texts.items() if text.startswith("<svg")}

    @property
    def is_unwatched(self) -> bool:
        log = self.recipe.get("log")
        return isinstance(log, dict) and log.get("doctor") is False

    @property
    def planned_bytes(self) -> int | None:
        return sum((self.plan.get("memory_bytes") or {}).values()) or None


def number(value: float | None) -> str:
    """Return a number as text; "-" for None."""
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


def _since(found: Found) -> int:
    return found.step if found.since_step is None else found.since_step
