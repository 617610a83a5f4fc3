"""Actions on a spike of the gradient norm: warn, skip the update, or roll back some steps (as PaLM did by hand).

Chowdhery et al. 2022 (PaLM, section 5.1) went back about 100 steps and skipped 200 to 500 batches. Here a rollback
returns to a stored state. It undoes only the updates from there to the spike; no further batches are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.ledger import SkippedStep
from trainwright.checkpoint.snapshot import LiveObjects, Snapshot, put_back
from trainwright.checkpoint.spikes import Spike
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Accumulated
from trainwright.errors import UsageError, require_choice

SpikeAction = Literal["warn", "skip", "rollback"]
SpikePolicy = Callable[[Spike], SpikeAction]
"""A function of the user that decides the action on one spike."""
OnSpike = SpikeAction | SpikePolicy
ACTIONS: tuple[SpikeAction, ...] = ("warn", "skip", "rollback")
STEPS_BETWEEN_STATES = 16
"""Steps between two stored states. A rollback undoes at most twice this number of updates."""


def require_policy(name: str, policy: object) -> None:
    """Raise UsageError unless ``policy`` is one of the three words or a callable."""
    if not callable(policy):
        require_choice(name, policy, ACTIONS)


def action_for(policy: OnSpike, spike: Spike) -> SpikeAction:
    """Return the action of the policy. Raises UsageError if a user's function returns another value."""
    if not callable(policy):
        return policy
    action = policy(spike)
    if action not in ACTIONS:
        raise UsageError(f"the spike policy returned {action!r}", remedy=f"return one of {', '.join(ACTIONS)}")
    return action


class SpikeDecision(NamedTuple):
    """The action on ``spike``. ``reason`` is why the update is skipped; "" if it is applied."""

    spike: Spike
    action: SpikeAction
    reason: str = ""


class SpikeHandler(Protocol):
    """Hooks that the step calls around its update."""

    def before_step(self, state: TrainState) -> None: ...
    def decide(self, state: TrainState, grad_norm: Tensor, skipped: Tensor) -> SpikeDecision | None:
        """Called right before the update, which is skipped if ``skipped`` is true. Returns None without a spike."""
        ...

    def after_step(self, state: TrainState, batch: StepBatch, done: Accumulated, grad_norm: Tensor) -> None: ...


class _NoSpikes:
    """The null object: reads no norm and stores no state."""

    def before_step(self, state: TrainState) -> None: ...
    def decide(self, state: TrainState, grad_norm: Tensor, skipped: Tensor) -> None: ...
    def after_step(self, state: TrainState, batch: StepBatch, done: Accumulated, grad_norm: Tensor) -> None: ...


NO_SPIKES: SpikeHandler = _NoSpikes()


class SpikeGuard:
    """Checks the gradient norm before each update; on a GPU this costs one host sync per step.

    A rollback restores weights, buffers, optimizer state and the average of the weights from at most 32 steps earlier.
    A process that began more recently returns to its start, and the reason says so. The step count, the learning rate
    and the data continue. The ledger names every update that was undone.
    """

    def __init__(self, policy: OnSpike) -> None:
        require_policy("the spike policy", policy)
        self._policy = policy
        self._kept: list[_KeptState] = []
        self._first_step = 0  # step at which this process began
        self._since: list[SkippedStep] = []  # the steps that a rollback would undo
        self._spike: Spike | None = None  # the spike for which this step rolls back
        self._is_skipped = False  # True if the update of this step is skipped

    def before_step(self, state: TrainState) -> None:
        if self._policy in ("warn", "skip"):
            return
        if not self._kept:
            self._first_step = state.step
        if not self._kept or state.step % STEPS_BETWEEN_STATES == 0:
            self._kept = [*self._kept[-1:], _KeptState.of(state)]
            self._since = [each for each in self._since if each.step > self._kept[0].step]

    def decide(self, state: TrainState, grad_norm: Tensor, skipped: Tensor) -> SpikeDecision | None:
        self._spike, self._is_skipped = None, bool(skipped)
        spike = None if self._is_skipped else state.spikes.detect(state.step + 1, float(grad_norm))
        if spike is None:
            return None
        action = action_for(self._policy, spike)
        if action == "rollback":
            self._spike = spike
            return SpikeDecision(spike, action, self._why_undone(spike))
        if action == "skip":
            self._is_skipped = True
            norms = f"a gradient norm of {spike.grad_norm:.4g}, where {spike.usual:.4g} is usual"
            return SpikeDecision(spike, action, f"spike: {norms}")
        return SpikeDecision(spike, action)

    def after_step(self, state: TrainState, batch: StepBatch, done: Accumulated, grad_norm: Tensor) -> None:
        if self._spike is not None:
            self._roll_back(state, self._spike)
        if not self._kept or self._spike is not None or self._is_skipped:  # nothing to record for a rollback
            return
        loss, ids = float(torch.stack(list(done.micro_losses)).sum()), tuple(batch.ids.tolist())
        self._since.append(SkippedStep(state.step, "", loss, float(grad_norm), None, ids, None))

    def _roll_back(self, state: TrainState, spike: Spike) -> None:
        kept, reason = self._kept[0], self._why_undone(spike)
        kept.put_back(state)
        state.ledger.add(replace(each, reason=reason) for each in self._since)
        self._kept, self._since = [replace(kept, step=state.step)], []

    def _why_undone(self, spike: Spike) -> str:
        step = self._kept[0].step
        reason = f"spike in step {spike.step}: back to the state after step {step}"
        # an uninterrupted run would have an earlier state
        is_nearer = len(self._kept) == 1 or step % STEPS_BETWEEN_STATES != 0
        if 0 < step == self._first_step and is_nearer:
            reason += ", where this process began: it holds no earlier state"
        return reason


@dataclass(frozen=True)
class _KeptState:
    """A copy of everything that an update changes, after ``step``."""

    step: int
    objects: LiveObjects
    snapshot: Snapshot
    average: StateDict

    @classmethod
    def of(cls, state: TrainState) -> _KeptState:
        parameters = {id(p): p for p in [*state.parameters, *(p for root in state.roots for p in root.parameters())]}
        objects = LiveObjects(state.roots, parts_of(state.optimizer), list(parameters.values()))
        average = state.ema.state_dict()
        if "shadow" in average:
            average["shadow"] = {name: each.clone() for name, each in average["shadow"].items()}
        return cls(state.step, objects, objects.snapshot(state.step + 1, with_reach=False), average)

    def put_back(self, state: TrainState) -> None:
        put_back(self.objects, self.snapshot)
        state.ema.load_state_dict(self.average)
