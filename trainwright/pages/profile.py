"""``profile.json`` of a run folder, as its page shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from trainwright.pages.own_file import text_of
from trainwright.plan.explain import human_seconds
from trainwright.report.chart import Series, line_chart_svg

NAME = "profile.json"
MOST = 15
"""Operators and modules that are shown."""


@dataclass(frozen=True)
class ProfilePanel:
    """What a profile found, as texts; ``phases``, ``operators`` and ``modules`` are rows of tables."""

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
    def read(cls, folder: Path) -> ProfilePanel | None:
        """None where the folder has none, or one that another version wrote otherwise."""
        try:
            return cls._of(json.loads(text_of(folder / NAME) or "null"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None

    @classmethod
    def _of(cls, value: Mapping[str, Mapping[str, object]] | None) -> ProfilePanel | None:
        if value is None:
            return None
        facts, verdict = value["facts"], value["verdict"]
        step_s = _float(facts["step_s"])
        phases = {str(name): _float(seconds) for name, seconds in _mapping(facts["phases"]).items()}
        held = [_float(each) / 2**20 for each in _list(facts["memory"])]
        curve = Series("allocated", [float(index) for index in range(len(held))], held)
        chart = line_chart_svg([curve], title="memory in the traced steps", x_label="over time", y_label="MiB")
        return cls(
            str(verdict["headline"]),
            str(value["next"]),
            f"{human_seconds(step_s)}, over {facts['steps']} steps at full speed, in {facts['precision']}",
            tuple(
                (name, human_seconds(seconds), f"{seconds / step_s:.0%}")
                for name, seconds in phases.items()
                if seconds >= 0.005 * step_s
            ),
            tuple(map(str, _list(verdict["evidence"]))),
            tuple(map(str, _list(value["advice"]))),
            tuple(
                _row(each, ("op", "phase", "calls", "host_s", "device_s")) for each in _list(facts["operators"])[:MOST]
            ),
            tuple(_row(each, ("path", "kind", "forward_s", "backward_s")) for each in _list(facts["modules"])[:MOST]),
            Markup(chart if len(held) > 1 else ""),  # our own drawing: it escapes what it writes
            str(facts["trace"] or ""),
        )


def _row(value: object, names: tuple[str, ...]) -> tuple[str, ...]:
    row = _mapping(value)
    shown = {name: human_seconds(_float(row[name])) if name.endswith("_s") else row[name] for name in names}
    return tuple(f"{each:,.0f}" if isinstance(each, float) else str(each) for each in shown.values())


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return float(value)
