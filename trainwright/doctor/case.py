"""Everything that is known of a run, read from its records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar, overload

from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Record, Watched, construct


class FactsOfFamily(Protocol):
    """A dataclass of facts. ``experiment`` is that of their Examined records."""

    experiment: ClassVar[str]


F = TypeVar("F", bound=FactsOfFamily)


class Case:
    """The records of one run, oldest first. ``finished``: no more will come, so a check may say what never happened.

    Of a long run not every step is among ``watched``.
    """

    def __init__(self, records: Sequence[Record], *, finished: bool = False) -> None:
        self.records, self.finished = records, finished
        self._read: dict[tuple[int, type], object] = {}

    @cached_property
    def watched(self) -> list[Watched]:
        """The recorded steps, oldest first."""
        return [record for record in self.records if isinstance(record, Watched)]

    @cached_property
    def _outcomes(self) -> dict[str, list[Examined]]:
        by_experiment: dict[str, list[Examined]] = {}
        for record in self.records:
            if isinstance(record, Examined):
                by_experiment.setdefault(record.experiment, []).append(record)
        return by_experiment

    def outcomes(self, experiment: str) -> list[Examined]:
        """Every outcome of an experiment, oldest first."""
        return self._outcomes.get(experiment, [])

    @overload
    def newest(self, experiment: str) -> Examined | None: ...
    @overload
    def newest(self, experiment: type[F]) -> F | None: ...
    def newest(self, experiment: str | type[F]) -> Examined | F | None:
        """The newest outcome of an experiment, or the newest facts of a kind; None if there are none."""
        if isinstance(experiment, str):
            return self.outcomes(experiment)[-1] if self.outcomes(experiment) else None
        return next((self._facts_of(each, experiment) for each in reversed(self._seen(experiment))), None)

    def every(self, kind: type[F]) -> list[tuple[int, F]]:
        """All facts of a kind with the step that each is about, oldest first."""
        return [(each.step, self._facts_of(each, kind)) for each in self._seen(kind)]

    def _facts_of(self, outcome: Examined, kind: type[F]) -> F:
        """Several laws ask for the same facts: they are read once."""
        known = self._read.get((id(outcome), kind))
        if not isinstance(known, kind):
            known = self._read[id(outcome), kind] = construct(kind, outcome.values)
        return known

    def since_change(self, kind: type[F]) -> list[tuple[int, F]]:
        """All facts of a kind since the program of the loop changed last; all of them where there are none since."""
        every = self.every(kind)
        return [(step, facts) for step, facts in every if step >= self._changed_at] or every

    @cached_property
    def _changed_at(self) -> int:
        return max((each.step for each in self.watched if "changed" in each.values), default=0)

    def blind(self, kind: type[FactsOfFamily]) -> str | None:
        """Why facts of a kind could not be measured, where there are none and it was tried."""
        outcomes = self.outcomes(kind.experiment)
        return None if not outcomes or self._seen(kind) else str(outcomes[-1].values["blind"])

    def _seen(self, kind: type[FactsOfFamily]) -> list[Examined]:
        return [each for each in self.outcomes(kind.experiment) if "blind" not in each.values]

    def facts(self, experiment: str) -> Facts:
        """The values of the newest outcome; empty if the experiment was never run."""
        newest = self.newest(experiment)
        return dict(newest.values) if newest else {}

    @property
    def last_step(self) -> int:
        """The newest step with a record, 0 before the first."""
        newest = [outcomes[-1].step for outcomes in self._outcomes.values()]
        return max([record.step for record in self.watched[-1:]] + newest, default=0)
