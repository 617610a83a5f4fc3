"""The documents in a run folder beside its log: recipe, plan, provenance, model, pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from markupsafe import Markup

from trainwright.plan.explain import human_seconds
from trainwright.report import bad_cases
from trainwright.report.bad_cases import BadCases
from trainwright.report.chart import Series, line_chart_svg
from trainwright.report.marks import NAME as MARKS_FILE
from trainwright.report.marks import Marks, RunMarks, read_marks
from trainwright.runs import supervision
from trainwright.runs.files import UnreadableFile, read_end_of_text, read_text
from trainwright.runs.folder import RunFolder
from trainwright.runs.secrets import masked
from trainwright.runs.shapes import ModelFile, Number, PlanFile, ProfileFile, ProvenanceFile, read_as, read_object
from trainwright.runs.supervision import Supervision

T = TypeVar("T")
PICTURES = {"graph.svg": "The graph of a step", "timeline.svg": "The memory of a step, as it was planned"}
"""Drawings in a run folder, written by `trainwright graph RUN` and `trainwright plan RUN`."""
NEWEST_SAMPLES = 20_000
"""The length of the newest samples that are shown, in characters."""


@lru_cache(maxsize=2000)
def _recipe_in(text: str) -> Any:
    """Parse a recipe; a list of runs with keys as columns is read each second."""
    from trainwright.recipe.yaml_core import read

    return read(text, "recipe.yaml").value


class RunDocuments:
    """The documents of a run, each empty if it is missing or cannot be read."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._unreadable: dict[str, str] = {}

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
        for _ in (
            self.recipe,
            self.plan,
            self.provenance,
            self.model,
            self.bad_cases,
            self.supervision,
            self.profile,
            self.pictures,
            self.all_marks,
        ):
            pass
        return self._unreadable

    @cached_property
    def recipe_text(self) -> str:
        """The recipe as text without secrets; unchanged if it has none, and "" if it cannot be read."""
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
        """The content of model.json: the tree of its modules, and reference losses."""
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
    def profile(self) -> ProfilePanel | None:
        """The result of `trainwright profile`; None if it has not run."""
        return self._read(self.folder.path / PROFILE_FILE, ProfilePanel.read, None)

    @cached_property
    def all_marks(self) -> Marks:
        """The tags, notes, panels and columns that the user chose for the runs of its folder."""
        folder = self.folder.path.resolve().parent
        return self._read(folder / MARKS_FILE, lambda path: read_marks(path.parent), Marks())

    @property
    def marks(self) -> RunMarks:
        """The user's tags of this run, and the note."""
        return self.all_marks.of(self.folder.path.resolve())

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The module trees of model.json."""
        trees: list[dict[str, Any]] = self.model.get("modules", [])
        return trees

    @property
    def can_be_drawn(self) -> bool:
        """True if its recipe can build its model; objects that were passed in Python cannot be rebuilt."""
        model = self.recipe.get("model")
        return isinstance(model, dict) and not str(model.get("use", "live:")).startswith("live:")

    @property
    def planned_steps(self) -> int | None:
        """The number of steps in the plan; None if it is counted in seconds, or there is no plan."""
        steps = (self.plan.get("extent") or {}).get("steps")
        return steps if steps and steps > 0 else None

    @property
    def references(self) -> dict[str, float]:
        """Reference losses by name: that of a uniform guess among all classes, and those of the dataset."""
        known = self.model.get("reference_losses", {})
        marks = {name: value for name, value in known.items() if _is_loss(value)}
        guess = self.plan.get("expected_loss")
        if _is_loss(guess) and not any(math.isclose(guess, each, rel_tol=1e-3) for each in marks.values()):
            marks["uniform guess"] = guess
        return marks

    @property
    def samples(self) -> str:
        """The newest text that a language model generated during training."""
        folder = self.folder.samples
        if folder.is_symlink():
            return ""
        return self._read(folder / "samples.txt", lambda path: read_end_of_text(path, 4 * NEWEST_SAMPLES), "")[
            -NEWEST_SAMPLES:
        ]

    @cached_property
    def pictures(self) -> dict[str, str]:
        """SVG by title."""
        texts = {title: self._read(self.folder.path / name, read_text, "") for name, title in PICTURES.items()}
        return {title: text for title, text in texts.items() if text.startswith("<svg")}

    @property
    def is_unwatched(self) -> bool:
        """True if its recipe disables the doctor."""
        log = self.recipe.get("log")
        return isinstance(log, dict) and log.get("doctor") is False

    @property
    def planned_bytes(self) -> int | None:
        """The memory in bytes that the plan predicted."""
        return sum((self.plan.get("memory_bytes") or {}).values()) or None


def _is_loss(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


PROFILE_FILE = "profile.json"
MAX_ROWS_SHOWN = 15
"""The number of operators and modules shown."""


@dataclass(frozen=True)
class ProfilePanel:
    """The results of a profile as texts; ``phases``, ``operators`` and ``modules`` are rows of tables."""

    headline: str
    next: str
    step: str
    phases: tuple[tuple[str, str, str], ...]
    evidence: tuple[str, ...]
    tried: tuple[str, ...]
    operators: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    memory: Markup
    trace: str

    @classmethod
    def read(cls, path: Path) -> ProfilePanel:
        """Read a profile. Raises UnreadableFile if the file does not have the format of a profile."""
        value = read_as(path, ProfileFile)
        facts = value.facts
        held = [each / 2**20 for each in facts.memory]
        curve = Series("allocated", [float(index) for index in range(len(held))], held)
        chart = line_chart_svg([curve], title="memory in the traced steps", x_label="over time", y_label="MiB")
        return cls(
            value.verdict.headline,
            value.next,
            f"{human_seconds(facts.step_s)}, over {facts.steps} steps at full speed, in {facts.precision}",
            tuple(
                (name, human_seconds(seconds), f"{seconds / facts.step_s:.0%}")
                for name, seconds in facts.phases.items()
                if facts.step_s > 0 and seconds >= 0.005 * facts.step_s
            ),
            tuple(value.verdict.evidence),
            tuple(value.advice),
            tuple(
                (each.op, each.phase, _count(each.calls), _time(each.host_s), _time(each.device_s))
                for each in facts.operators[:MAX_ROWS_SHOWN]
            ),
            tuple(
                (each.path, each.kind, _time(each.forward_s), _time(each.backward_s))
                for each in facts.modules[:MAX_ROWS_SHOWN]
            ),
            Markup(chart if len(held) > 1 else ""),  # drawn by Trainwright, which escapes its texts
            facts.trace or "",
        )


def _count(number: Number) -> str:
    return number if isinstance(number, str) else f"{number:,.0f}"


def _time(seconds: Number) -> str:
    return seconds if isinstance(seconds, str) else human_seconds(seconds)
