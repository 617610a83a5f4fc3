"""All that is known of a run, read from its records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from trainwright.runlog.records import Examined, Record, Watched


class Case:
    """The records of one run, oldest first. ``finished``: nothing more will come, so that what never was can be said.

    Of a long run not every step is among ``watched``.
    """

    def __init__(self, records: Sequence[Record], *, finished: bool = False) -> None:
        self.records, self.finished = records, finished

    @cached_property
    def watched(self) -> list[Watched]:
        return [record for record in self.records if isinstance(record, Watched)]

    @cached_property
    def _examined(self) -> dict[str, list[Examined]]:
        found: dict[str, list[Examined]] = {}
        for record in self.records:
            if isinstance(record, Examined):
                found.setdefault(record.experiment, []).append(record)
        return found

    def exams(self, experiment: str) -> list[Examined]:
        """Every outcome of an experiment, oldest first."""
        return self._examined.get(experiment, [])

    def exam(self, experiment: str) -> Examined | None:
        """The newest outcome of an experiment, None where it was not made."""
        return self.exams(experiment)[-1] if self.exams(experiment) else None

    def about(self, experiment: str) -> dict[str, Any]:
        """The values of the newest outcome; none where it was not made."""
        newest = self.exam(experiment)
        return dict(newest.values) if newest else {}

    @property
    def last_step(self) -> int:
        """The newest step that is known of, 0 before the first."""
        newest = [outcomes[-1].step for outcomes in self._examined.values()]
        return max([record.step for record in self.watched[-1:]] + newest, default=0)
