"""Listens whether the weights are the same at the begin of a step as at the end of the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainwright.doctor.update.facts import WritesFacts
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.live_sums import sums_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, Loader
from trainwright.runlog.json_values import Event, Facts, strict

SAMPLED, MOST_ELEMENTS = 4, 4096
"""Weights that are compared: the smallest, for they are copied whole at every step."""
FIRST_STEPS = 16
"""Are all compared; later ones only where an evaluation or an epoch lies between them, and then the smallest weight:
what puts averages or older weights in the place of the weights writes to all of them."""
FEW = 64
"""Elements that are read as numbers: a GPU would be waited for."""
URGENT = 3
"""So many writes are looked at at once: one that comes with every step is meant."""


class WritesProbe(Probe):
    """Compares the smallest weights of the optimizers. ``urgent``: somebody else has written to them."""

    name = WritesFacts.experiment
    rests = frozenset({"on_forward"})

    def __init__(self, watched: WatchedObjects) -> None:
        owned = {id(p): p for o in watched.subject.optimizers for p in owned_by(o) if p.requires_grad}
        small = sorted((p for p in owned.values() if 1 < p.numel() <= MOST_ELEMENTS), key=Tensor.numel)
        device = small[0].device if small else None
        self._weights = [p for p in small if p.device == device and type(p) is nn.Parameter][:SAMPLED]
        self._optimizers, self._all = watched.subject.optimizers, watched.subject.parameters
        self._found: Tensor | None = None  # of all weights, where somebody else has written to them
        self._first = self._weights[0].detach().flatten().clone() if self._weights else None
        self._state: list[tuple[int, int]] = []
        self._after: list[float] | Tensor | None = None
        self._step = self._compared = 0
        self._is_due, self._is_evaluated = True, False
        self._written: list[int] = []
        self._evaluated: list[int] = []
        self._restarts: list[int] = []
        self._said: WritesFacts | None = None

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._is_due = True

    def on_woken(self, events: Sequence[Event]) -> None:
        if any(kind == "forward" and how[2] for kind, how in events):
            self._after = None

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._after is None:
            return
        if not torch.is_grad_enabled():
            self._is_due = self._is_evaluated = True
            return
        before, self._after = self._after, None
        if self._is_due:
            self._is_due = self._step < FIRST_STEPS
            self._compare(before)

    def _compare(self, before: list[float] | Tensor) -> None:
        self._compared += 1
        now = self._now()
        if before == now if isinstance(before, list) else isinstance(now, Tensor) and torch.equal(before, now):
            return
        self._written = [*self._written[-31:], self._step + 1]
        if self._is_evaluated:
            self._evaluated = [*self._evaluated[-31:], self._step + 1]
        if self._begins_again(before):
            self._restarts = [*self._restarts[-31:], self._step + 1]
        if len(self._written) <= URGENT:
            self.urgent, self._found = True, sums_of(self._all)

    def on_closed(self, step: RecordedStep) -> None:
        self._step = step.step
        if self._found is not None and step.updates and step.updates[0].weights is None:
            step.updates[0].weights = self._found  # a replay tells which they were
        self._found = None
        if self._weights:
            self._after, self._state = self._now(), self._of_state()
            self._is_evaluated = False

    def _begins_again(self, before: list[float] | Tensor) -> bool:
        """Whether the state of the optimizers is another, too; without a state, whether a weight is the first again."""
        if self._state or self._first is None:
            return self._of_state() != self._state
        left = torch.as_tensor(before).flatten()[: len(self._first)].to(self._first)
        return torch.equal(self._weights[0].flatten(), self._first) and not torch.equal(left, self._first)

    def _of_state(self) -> list[tuple[int, int]]:
        """Identity and version of what the optimizers keep for the smallest weight: they change with every write."""
        first = self._weights[0]
        return [
            (id(v), 0 if v.is_inference() else v._version)  # these have no version
            for optimizer in self._optimizers
            for v in optimizer.state.get(first, {}).values()
            if isinstance(v, Tensor)
        ]

    def _now(self) -> list[float] | Tensor:
        if self._step > FIRST_STEPS:  # a fifth of the time, and of few numbers a tenth
            first = self._weights[0]
            return first.tolist() if first.numel() <= FEW and first.is_cpu else first.detach().clone()
        return torch.cat([p.detach().view(-1) for p in self._weights])

    def values(self) -> Facts | None:
        self.urgent = False
        facts = WritesFacts(self._compared, tuple(self._written), tuple(self._restarts), tuple(self._evaluated))
        if facts == self._said or not self._compared:
            return None
        self._said = facts
        values: Facts = strict(vars(facts))
        return values
