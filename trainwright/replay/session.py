"""A recorded step on the bench: run again as it was or with one thing changed, as often as one likes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.recorder.program import Ids, RecordedStep, alive, constants_of
from trainwright.recorder.ring import Ring
from trainwright.replay.replayer import AS_IT_WAS, Intervention, NotReplayable, Replayer, ReplayResult, Upto, batch_size
from trainwright.state.snapshot import Snapshot


class ReplaySession:
    """The step ``step`` of a ring. Whatever is done with it, the live objects are afterwards what they were.

    Raises NotReplayable when the step or the way to it is gone, or was never written down as a whole.
    """

    def __init__(self, player: Replayer, ring: Ring, step: int) -> None:
        way = ring.way_to(step)
        if way is None:
            blind = next((s.blind for s in ring.segments if s.step == step and s.blind), None)
            raise NotReplayable(blind or f"the recorder does not hold step {step} any more")
        self.player, self._ring = player, ring
        self.step, self.segment = step, way[1][-1]
        self._base, self._lead = way[0], way[1][:-1]
        for segment in way[1]:
            segment.program = alive(segment.program)

    @property
    def roots(self) -> list[nn.Module]:
        return self.player.subject.roots

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.player.subject.optimizers

    @property
    def recorded(self) -> list[RecordedStep]:
        """All steps up to this one that the recorder holds."""
        return self._ring.recorded(self.step)

    @property
    def ids(self) -> list[Ids]:
        """Of each micro-batch."""
        return self.segment.ids

    @property
    def size(self) -> int | None:
        """Samples in a micro-batch, by the first dimension of the first input."""
        return batch_size(self.segment)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by its dotted path; with several roots the path begins with the root's number."""
        named = {}
        for number, root in enumerate(self.roots):
            start = "" if len(self.roots) == 1 else f"{number}"
            for name, module in root.named_modules():
                named[".".join(part for part in (start, name) if part)] = module
        return named

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the models were given, in order."""
        return [c.tensor for call in self.segment.calls for c in constants_of((call.args, call.kwargs))]

    @property
    def earlier(self) -> list[Snapshot]:
        """The states that are kept from before this step, oldest first."""
        return [snapshot for snapshot in self._ring.snapshots if snapshot.step < self.step]

    def base(self) -> Snapshot:
        """The state right before the step."""
        if self._lead:
            with self.player.stage(self._base):
                for segment in self._lead:
                    self.player.play(segment)
                for parameter in self.player.subject.parameters:
                    parameter.grad = None
                self._base, self._lead = self.player.subject.snapshot(self.step), []
        return self._base

    def run(self, edit: Intervention = AS_IT_WAS, *, upto: Upto = "backward") -> ReplayResult:
        """The step once more, up to its outputs and losses, its gradients, or its update."""
        with self.player.stage(self.base()):
            return self.player.play(self.segment, edit, upto=upto)

    def train(
        self, steps: int, edit: Intervention = AS_IT_WAS, *, repeat: bool = False, rounds: int = 1
    ) -> list[float]:
        """Losses of up to ``steps`` recorded steps in a row, run again from one state; the last is this one.

        ``repeat``: this step again and again instead, each on the weights that the one before left. ``rounds``: all of
        them so many times.
        """
        if repeat:
            snapshot, way = self.base(), [self.segment] * steps
        else:
            snapshot, way = self._longest(steps)
        losses = []
        with self.player.stage(snapshot):
            for segment in way * rounds:
                quiet = replace(segment, values={k: v for k, v in segment.values.items() if k != "vetoed"})
                played = self.player.play(quiet, edit)
                losses.append(played.loss)
                if played.error is not None:
                    break
        return losses

    def _longest(self, steps: int) -> tuple[Snapshot, list[RecordedStep]]:
        """The most recorded steps up to this one, at most ``steps``, that begin at a snapshot."""
        for snapshot in self._ring.snapshots:  # the oldest first: the longest way
            if 1 < self.step - snapshot.step + 1 <= steps and (way := self._ring.way_from(snapshot, self.step)):
                for segment in way:
                    segment.program = alive(segment.program)
                return snapshot, way
        return self.base(), [self.segment]

    def live(self) -> Any:
        """The objects of the step in its state, for experiments that need more than ``run``: a context manager."""
        return self.player.stage(self.base())
