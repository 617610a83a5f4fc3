"""The header of a run: each setting with its value and its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Origin = Literal["configured", "recommended", "planned", "default"]
"""The origin of a setting: the user (configured), the preset (recommended), the plan with a reason, or the default."""
_RENAMED: dict[str, Origin] = {"asked": "configured"}
"""Maps origins in plan.json of earlier versions."""

TOPICS = frozenset({"batch", "precision", "threads", "learning rate", "schedule", "optimizer", "clip"})
"""Topics of plan notes that the header already shows, so that they are not printed twice."""


@dataclass(frozen=True)
class Setting:
    """One setting, its value as text, and its origin. ``why`` is the reason if the plan decided it."""

    name: str
    value: str
    origin: Origin
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name:<11} {self.value} ({self.origin}{f': {self.why}' if self.why else ''})"


@dataclass(frozen=True)
class RunHeader:
    """The settings that decide what a run computes. They are printed, logged, and stored in plan.json."""

    settings: tuple[Setting, ...] = ()

    def lines(self) -> list[str]:
        """Return one line for each setting."""
        return [str(each) for each in self.settings]

    def in_words(self) -> dict[str, str]:
        """Return the settings by name, for the log: ``{"clip": "none (default)"}``."""
        return {each.name: f"{each.value} ({each.origin})" for each in self.settings}


def origins_in(plan: Mapping[str, Any]) -> dict[str, Origin]:
    """Return the origin of each setting from the plan.json of an earlier part of the run; {} for an older version."""
    header = plan.get("header") or {}
    settings: Sequence[Mapping[str, Any]] = header.get("settings", ())
    return {each["name"]: _RENAMED.get(each["origin"], each["origin"]) for each in settings}
