"""What lies in the folder of a run beside its log: what was asked, planned and installed, its model, its pictures."""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from trainwright.pages.own_file import MOST_BYTES, text_of
from trainwright.recipe.yaml_core import UnreadableError
from trainwright.recipe.yaml_core import read as read_yaml
from trainwright.report import bad_cases
from trainwright.report.bad_cases import BadCases
from trainwright.runlog.folder import RunFolder

PICTURES = {"graph.svg": "The graph of a step", "timeline.svg": "The memory of a step, as it was planned"}
"""Drawings that lie in the folder of a run: `trainwright graph RUN` and `trainwright plan RUN` put them there."""
NEWEST_SAMPLES = 20_000
"""Characters."""
DEEPEST = 64
"""Levels of modules that are shown."""


class RunDocuments:
    """The documents of a run, each empty where there is none or it cannot be read."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @cached_property
    def recipe_text(self) -> str:
        return text_of(self.folder.recipe)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Empty where there is none, as of a watched loop, or none that can be read."""
        try:
            value = read_yaml(self.recipe_text, "recipe.yaml").value
        except UnreadableError:
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def plan(self) -> dict[str, Any]:
        return _object_of(self.folder.plan)

    @property
    def settings(self) -> list[dict[str, str]]:
        """The header of the run: name, value, origin and reason of each setting; [] for one of an older version."""
        header = self.plan.get("header")
        found = header.get("settings") if isinstance(header, dict) else None
        keys = ("name", "value", "origin", "why")
        rows = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        return [{key: str(each.get(key, "")) for key in keys} for each in rows]

    @cached_property
    def provenance(self) -> dict[str, Any]:
        return _object_of(self.folder.provenance)

    @cached_property
    def model(self) -> dict[str, Any]:
        """model.json: the tree of its modules, and reference losses."""
        return _object_of(self.folder.path / "model.json")

    @cached_property
    def bad_cases(self) -> BadCases | None:
        """What `trainwright errors` found; None where it was not asked."""
        text = text_of(self.folder.path / bad_cases.NAME)
        return bad_cases.bad_cases_in(text) if text else None

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The trees of model.json; none where any part of them is not as it is written."""
        trees = self.model.get("modules")
        return trees if isinstance(trees, list) and all(map(_is_module, trees)) else []

    @property
    def can_be_drawn(self) -> bool:
        """Whether its recipe says how to build its model; objects that were handed over in Python cannot be."""
        model = self.recipe.get("model")
        return isinstance(model, dict) and not str(model.get("use", "live:")).startswith("live:")

    @property
    def planned_steps(self) -> int | None:
        """How many steps the plan has; None where it is counted in seconds, or there is none."""
        extent = self.plan.get("extent")
        steps = extent.get("steps") if isinstance(extent, dict) else None
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def references(self) -> dict[str, float]:
        """Losses that mean something, by name: that of a guess among all classes alike, and what its data knows."""
        known = self.model.get("reference_losses")
        marks = (
            {str(name): value for name, value in known.items() if _is_loss(value)} if isinstance(known, dict) else {}
        )
        guess = self.plan.get("expected_loss")
        if _is_loss(guess) and not any(math.isclose(guess, each, rel_tol=1e-3) for each in marks.values()):
            marks["uniform guess"] = guess
        return marks

    @property
    def samples(self) -> str:
        """The newest text that a language model wrote while it was trained."""
        folder = self.folder.samples
        return "" if folder.is_symlink() else text_of(folder / "samples.txt", newest=True)[-NEWEST_SAMPLES:]

    @property
    def pictures(self) -> dict[str, str]:
        """SVG by title."""
        texts = {title: text_of(self.folder.path / name) for name, title in PICTURES.items()}
        return {title: text for title, text in texts.items() if text.startswith("<svg") and len(text) < MOST_BYTES}

    @property
    def is_unwatched(self) -> bool:
        """Whether its recipe says that the doctor is not to look."""
        log = self.recipe.get("log")
        return isinstance(log, dict) and log.get("doctor") is False

    @property
    def planned_bytes(self) -> int | None:
        """The memory that the plan foresaw."""
        parts = self.plan.get("memory_bytes")
        sizes = parts.values() if isinstance(parts, dict) else ()
        known = [each for each in sizes if isinstance(each, int)]
        return sum(known) or None


def _is_loss(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_module(tree: object, depth: int = 0) -> bool:
    """Whether it has what the page shows of a module, and so have all below it."""
    kinds = {"name": str, "kind": str, "last": str, "parameters": int, "trained": int, "count": int, "children": list}
    return (
        isinstance(tree, dict)
        and depth <= DEEPEST
        and all(isinstance(tree.get(name), kind) for name, kind in kinds.items())
        and all(_is_module(each, depth + 1) for each in tree["children"])
    )


def _object_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text_of(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
