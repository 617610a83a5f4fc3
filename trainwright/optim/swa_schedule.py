"""The learning rate of stochastic weight averaging: another schedule until the first average, then torch's SWALR."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.optim.stepped_schedule import MAX_STORED_CHANGES, ScheduleFn, SteppedSchedule
from trainwright.plan.make import SwaPlan


class SwaSchedule(SteppedSchedule):
    """``base`` up to and including the step of the first average; then SWALR, stepped after each average.

    SWALR starts at the last learning rates of ``base``. ``lr`` is that of the first parameter group; the others keep
    their ratio to it.
    """

    def __init__(
        self,
        base: ScheduleFn | SteppedSchedule,
        optimizer: Optimizer,
        plan: SwaPlan,
        lr: float,
        anneal_by: Literal["cos", "linear"],
    ) -> None:
        super().__init__(optimizer, [], plan.every)
        self.base = base
        self._plan = plan
        self._lr = lr
        self._anneal_by = anneal_by

    @property
    def name(self) -> str:
        return f"{getattr(self.base, 'name', 'its schedule')}, then SWALR"

    @property
    def needs_evaluation(self) -> bool:
        return isinstance(self.base, SteppedSchedule) and self.base.needs_evaluation

    def __call__(self, step: int, fraction: float) -> float | None:
        if step >= self._plan.start:
            self._begin()
            return super().__call__(step - self._plan.start + self._every, fraction)
        if self._schedulers:  # an earlier step is replayed
            self._write(self._changes[0][1])
        return self.base(step, fraction)

    def evaluated(self, step: int, value: float) -> None:
        if step < self._plan.start and isinstance(self.base, SteppedSchedule):
            self.base.evaluated(step, value)

    def state_dict(self) -> StateDict:
        return super().state_dict() | ({} if self._schedulers else {"rates": self._rates()})

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        if saved["schedulers"]:
            self._begin()
        super().load_state_dict(saved)

    def _begin(self) -> None:
        """Create the schedulers, which start at the current rates of the optimizer."""
        if self._schedulers:
            return
        self._changes = deque([(0, self._rates())], maxlen=MAX_STORED_CHANGES)
        first = self._optimizer.param_groups[0]
        for part in parts_of(self._optimizer):
            bases = [float(group.get("initial_lr", group["lr"])) for group in part.param_groups]
            lrs = [self._lr * (base / float(first.get("initial_lr", first["lr"]))) for base in bases]
            self._schedulers.append(SWALR(part, lrs, self._plan.anneal, self._anneal_by))  # type: ignore[arg-type]
