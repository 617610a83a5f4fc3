"""The view of a run that families read which are not converted yet: a RunContext under older names."""

from __future__ import annotations

from typing import TypeVar, overload

from trainwright.doctor.context import Measurement as FactsOfFamily
from trainwright.doctor.context import RunContext
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Watched

F = TypeVar("F", bound=FactsOfFamily)


class Case(RunContext):
    """Until every family is converted."""

    @property
    def watched(self) -> list[Watched]:
        return self.steps

    def outcomes(self, experiment: str) -> list[Examined]:
        """Every outcome of an experiment, oldest first."""
        return self._outcomes.get(experiment, [])

    @overload
    def newest(self, experiment: str) -> Examined | None: ...
    @overload
    def newest(self, experiment: type[F]) -> F | None: ...
    def newest(self, experiment: str | type[F]) -> Examined | F | None:
        if isinstance(experiment, str):
            return self.outcomes(experiment)[-1] if self.outcomes(experiment) else None
        return self.latest(experiment)

    def blind(self, kind: type[FactsOfFamily]) -> str | None:
        return self.not_measured(kind) if self.was_tried(kind) else None

    def facts(self, experiment: str) -> Facts:
        newest = self.newest(experiment)
        return dict(newest.values) if newest else {}
