"""The supervision audit of a run (``supervision.json``): which tokens or pixels contribute to the loss."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from trainwright.runs.files import UnreadableFile, read_json

NAME = "supervision.json"
BEGIN_MARK, END_MARK = "⟦", "⟧"
"""Brackets around text that contributes to the loss."""
WIDTH = 118
MAX_FINDINGS_PRINTED = 12
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LossCount:
    """Number of tokens of a role or of an answer, and how many of them contribute to the loss."""

    name: str
    tokens: int
    supervised: int

    @property
    def fraction(self) -> float:
        return self.supervised / self.tokens if self.tokens else 0.0

    @property
    def fraction_text(self) -> str:
        return percent(self.fraction)


@dataclass(frozen=True)
class SupervisionFinding:
    """A problem of a data set. ``samples`` is the number of samples that have it, ``place`` the first of them."""

    name: str
    severity: Severity
    message: str
    remedy: str
    samples: int
    place: str = ""


@dataclass(frozen=True)
class MarkedText:
    """A part of a decoded sample."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample, divided into parts that contribute to the loss and parts that do not."""

    place: str
    parts: tuple[MarkedText, ...]

    def line(self) -> str:
        """Return the text in one line, with brackets around parts that contribute to the loss."""
        text = (f"{BEGIN_MARK}{each.text}{END_MARK}" if each.supervised else each.text for each in self.parts)
        return "".join(text).replace("\r", "").replace("\n", "\\n")


@dataclass(frozen=True)
class Supervision:
    """The audit of one data set.

    Attributes:
        data: ``train`` or ``val``.
        unit: The counted units: ``tokens``, ``pixels`` or ``targets``.
        masked_by: Description of the rule that decides which units contribute to the loss.
        samples: Number of examined samples.
        size: Number of samples of the data set; None if unknown.
        left_out: Number of records that are not used for training.
        total: Number of units in the examined samples, without padding.
        supervised: Number of these units that contribute to the loss.
        longest: Number of units in the longest sample.
        turns: Counts by number of the answer in its conversation.
        findings: Problems, the most severe first.
    """

    data: str
    unit: str
    masked_by: str
    samples: int
    size: int | None
    left_out: int
    total: int
    supervised: int
    padding: int = 0
    longest: int = 0
    roles: tuple[LossCount, ...] = ()
    turns: tuple[LossCount, ...] = ()
    findings: tuple[SupervisionFinding, ...] = ()
    decoded: tuple[DecodedSample, ...] = ()

    @property
    def fraction(self) -> float:
        """Fraction of the units that contribute to the loss."""
        return self.supervised / self.total if self.total else 0.0

    @property
    def fraction_text(self) -> str:
        return percent(self.fraction)

    @property
    def refusal(self) -> SupervisionFinding | None:
        """The first error, because of which a run is refused; None without an error."""
        return next((each for each in self.findings if each.severity == "error"), None)

    @property
    def warnings(self) -> tuple[SupervisionFinding, ...]:
        return tuple(each for each in self.findings if each.severity != "note")

    def summary(self) -> str:
        examined = f"{self.samples:,}" if self.size in (None, self.samples) else f"{self.samples:,} of {self.size:,}"
        text = f"{examined} samples, {self.total:,} {self.unit}, {self.fraction_text} carry loss"
        text += f" ({self.masked_by})" if self.masked_by else ""
        text += f", the longest has {self.longest:,}" if self.longest else ""
        return text + (f"; {self.left_out:,} records left out" if self.left_out else "")

    def lines(self) -> list[str]:
        """Return the report as text, with decoded samples of a training set."""
        found = _wrap("supervision: " if self.data == "train" else f"supervision of {self.data}: ", self.summary())
        if counts := self.counts_text():
            found += _wrap("  ", counts)
        for each in self.findings[:MAX_FINDINGS_PRINTED]:
            found += _wrap(f"  {each.severity}: ", each.message)
            found += _wrap("    remedy: ", each.remedy)
        for sample in self.decoded if self.data == "train" else ():
            found += _wrap(f"  {sample.place}: ", sample.line())
        return found

    def counts_text(self) -> str:
        """Return the supervised fractions by role and by answer as text; "" if they are unknown."""
        groups = self.roles, self.turns if len(self.turns) > 1 else ()
        return "; ".join(", ".join(map(_count_text, each)) for each in groups if each)


def percent(fraction: float) -> str:
    """Return a fraction as a percentage. "0.0 %" and "100.0 %" are exact."""
    text = f"{100 * fraction:.1f}"
    if text == "0.0" and fraction > 0:
        return "less than 0.1 %"
    return f"{text} %" if text != "100.0" or fraction == 1 else "99.9 %"


def read_supervision(path: Path) -> tuple[Supervision, ...]:
    """Return the audits in a ``supervision.json``. Raises UnreadableFile."""
    try:
        return TypeAdapter(tuple[Supervision, ...]).validate_python(read_json(path))
    except ValidationError as error:
        raise UnreadableFile(path, f"{error.error_count()} values have an unexpected type") from None


def _count_text(count: LossCount) -> str:
    return f"{count.name}: {count.fraction_text} of {count.tokens:,}"


def _wrap(head: str, text: str) -> list[str]:
    indent = " " * min(len(head), 12)
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False) or [head]


def most_severe_first(findings: Sequence[SupervisionFinding]) -> tuple[SupervisionFinding, ...]:
    """Return findings sorted by severity. The sort is stable."""
    order = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda each: order.index(each.severity)))
