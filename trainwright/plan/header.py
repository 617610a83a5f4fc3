"""The header of a run: its settings, each with its value and who decided it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Origin = Literal["asked", "recommended", "planned", "default"]
"""Who decided a setting: the user, the preset ``recommended``, the plan (with a reason), or nobody."""

TOPICS = frozenset({"batch", "precision", "threads", "learning rate", "schedule", "optimizer", "clip"})
"""Topics of notes of a plan that the header shows, so that they are not printed twice."""


@dataclass(frozen=True)
class Setting:
    """One setting, its value in words, and who decided it; ``why`` is the reason of the plan."""

    name: str
    value: str
    origin: Origin
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name:<11} {self.value} ({self.origin}{f': {self.why}' if self.why else ''})"


@dataclass(frozen=True)
class RunHeader:
    """The settings that decide what a run computes. It is printed, logged, and stored in plan.json."""

    settings: tuple[Setting, ...] = ()

    def lines(self) -> list[str]:
        """One line for each setting."""
        return [str(each) for each in self.settings]

    def in_words(self) -> dict[str, str]:
        """The settings by name, for the log: ``{"clip": "none (default)"}``."""
        return {each.name: f"{each.value} ({each.origin})" for each in self.settings}


def origins_in(plan: Mapping[str, Any]) -> dict[str, Origin]:
    """Who decided each setting of an earlier part of the run, from its plan.json; {} for one of an older version."""
    header = plan.get("header") or {}
    settings: Sequence[Mapping[str, Any]] = header.get("settings", ())
    return {each["name"]: each["origin"] for each in settings}
