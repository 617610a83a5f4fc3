"""A family of checks: the laws of one matter, and the known causes that break them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.finding import OldCheck
from trainwright.doctor.law import Law


@dataclass(frozen=True)
class Family:
    """One folder of the doctor. ``laws`` find what is broken, ``names`` why; all judge a Case and nothing else.

    In its folder lie ``laws.md`` (what every correct step obeys, one section for each law), ``facts.py`` (what is
    measured), ``measure.py`` (how), ``remedy.py`` (what a replay can try), and ``page.md`` (one section for each code).
    """

    name: str
    laws: tuple[Law, ...]
    names: tuple[OldCheck, ...]

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.name
