"""The part of a run's page that shows ``profile.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from trainwright.plan.explain import human_seconds
from trainwright.report.chart import Series, line_chart_svg
from trainwright.runs.shapes import Number, ProfileFile, read_as

NAME = "profile.json"
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
