"""A recorded step that can be replayed repeatedly, unchanged or with one change."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules
from trainwright.checkpoint.snapshot import Snapshot
from trainwright.recorder.program import Ids, RecordedStep, alive, constants_of
from trainwright.recorder.ring import Ring
from trainwright.replay.replayer import UNCHANGED, Intervention, NotReplayable, Replayer, ReplayResult, Upto, batch_size


class ReplaySession:
    """Replays of the step ``step`` of a ring. After each replay the live objects are restored.

    Raises NotReplayable if the step, or a state before it, is no longer held, or if the step was not recorded
    completely.
    """

    def __init__(self, replayer: Replayer, ring: Ring, step: int) -> None:
        found = ring.steps_to(step)
        if found is None:
            blind = next((s.not_replayable for s in ring.steps if s.step == step and s.not_replayable), None)
            raise NotReplayable(blind or f"the recorder does not hold step {step} any more")
        self.replayer, self._ring = replayer, ring
        self._base, steps = found
        self.step, self.recorded_step, self._before = step, steps[-1], steps[:-1]
        for recorded in steps:
            recorded.program = alive(recorded.program)

    @property
    def roots(self) -> list[nn.Module]:
        """The models."""
        return self.replayer.subject.roots

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return self.replayer.subject.optimizers

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(zip(self.replayer.names, self.replayer.subject.parameters))

    @property
    def recorded_steps(self) -> list[RecordedStep]:
        """All steps up to this one that the ring holds, oldest first."""
        return self._ring.recorded(self.step)

    @property
    def ids(self) -> list[Ids]:
        """The sample ids of each micro-batch."""
        return self.recorded_step.ids

    @property
    def size(self) -> int | None:
        """The number of samples in a micro-batch: the first dimension of the first input."""
        return batch_size(self.recorded_step)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by its path, without wrappers."""
        return dict(named_modules(self.roots))

    @property
    def inputs(self) -> list[Tensor]:
        """The input tensors of the models, in order."""
        return [c.tensor for call in self.recorded_step.calls for c in constants_of((call.args, call.kwargs))]

    def base(self) -> Snapshot:
        """Returns the state right before the step."""
        if self._before:
            with self.replayer.stage(self._base):
                for recorded in self._before:
                    self.replayer.run(recorded)
                for parameter in self.replayer.subject.parameters:
                    parameter.grad = None
                self._base, self._before = self.replayer.subject.snapshot(self.step), []
        return self._base

    def live(self) -> AbstractContextManager[None]:
        """Context in which the live objects have the state before the step. For what ``run`` cannot do."""
        return self.replayer.stage(self.base())

    def run(self, intervention: Intervention = UNCHANGED, *, upto: Upto = "backward") -> ReplayResult:
        """Replays the step up to its outputs and losses, its gradients, or its update."""
        with self.live():
            return self.replayer.run(self.recorded_step, intervention, upto=upto)

    def train(self, steps: int, intervention: Intervention = UNCHANGED, *, repeat: bool = False) -> list[float]:
        """Replays up to ``steps`` consecutive recorded steps, this one last, from one state. Returns the losses.

        ``repeat``: replays this step ``steps`` times instead, each on the weights of the previous replay. Updates
        that were vetoed in the loop are applied here.
        """
        if repeat:
            snapshot, chosen = self.base(), [self.recorded_step] * steps
        else:
            snapshot, chosen = self._longest(steps)
        losses = []
        with self.replayer.stage(snapshot):
            for recorded in chosen:
                result = self.replayer.run(without_veto(recorded), intervention)
                losses.append(result.loss)
                if result.error is not None:
                    break
        return losses

    def _longest(self, steps: int) -> tuple[Snapshot, list[RecordedStep]]:
        """Returns the longest sequence of at most ``steps`` recorded steps up to this one that begins at a snapshot."""
        for snapshot in self._ring.snapshots:  # the oldest snapshot has the most steps
            if 1 < self.step - snapshot.step + 1 <= steps and (found := self._ring.steps_from(snapshot, self.step)):
                for recorded in found:
                    recorded.program = alive(recorded.program)
                return snapshot, found
        return self.base(), [self.recorded_step]


def without_veto(recorded: RecordedStep) -> RecordedStep:
    """Returns the step as if its update had not been vetoed."""
    return replace(recorded, values={k: v for k, v in recorded.values.items() if k != "vetoed"})
