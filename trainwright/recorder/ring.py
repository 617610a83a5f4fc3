"""The flight recorder: the last steps as programs, and states from which to replay them, within a byte budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainwright.checkpoint.snapshot import LiveObjects, Snapshot
from trainwright.distributed.memory import free_bytes
from trainwright.recorder.program import RecordedStep

KEEP, LEAST_BYTES = 32, 256 * 2**20
"""Default number of steps, and minimum memory budget in bytes for steps and snapshots."""


def enough_bytes(roots: Sequence[nn.Module]) -> int:
    """Returns the bytes of three states with two moments per weight (Adam), and at least LEAST_BYTES.

    At most a quarter of the free memory of the first weight's device, because snapshots are on the device of the state.
    """
    parameters = [parameter for root in roots for parameter in root.parameters()]
    device = parameters[0].device if parameters else torch.device("cpu")
    weights = sum(parameter.nbytes for parameter in parameters)
    return min(max(LEAST_BYTES, 3 * 3 * weights), free_bytes(device) // 4)


SPARE = 16
"""Additional steps that may be held, because searching for removable steps costs more than holding them."""


class Ring:
    """The last ``keep`` steps, the snapshot from which a replay of them starts, and the steps since this snapshot.

    Holds at most ``budget_bytes``. The oldest steps are dropped first. A snapshot that alone is larger is not kept.
    """

    def __init__(self, *, keep: int, budget_bytes: float) -> None:
        self.keep, self.budget_bytes = keep, budget_bytes
        self.refused_bytes = 0  # size of a snapshot that was too large
        self._held: deque[RecordedStep] = deque()
        self.snapshots: deque[Snapshot] = deque()
        self._step_bytes = self._snapshot_bytes = 0
        self.record: Callable[[Snapshot, list[RecordedStep]], None] | None = None
        """Records the programs of deferred steps, from a state before the first of them."""
        self._most = keep + SPARE  # number of steps that triggers a search for removable ones

    @property
    def steps(self) -> Sequence[RecordedStep]:
        """The held steps, oldest first."""
        return self._held

    def add(self, step: RecordedStep) -> None:
        self._held.append(step)
        self._step_bytes += step.num_bytes
        if len(self._held) >= self._most or self.num_bytes > self.budget_bytes:
            self._shrink()

    def add_snapshot(self, snapshot: Snapshot) -> None:
        num_bytes = snapshot.num_bytes
        if num_bytes > self.budget_bytes:
            self.refused_bytes = num_bytes
            return
        self.snapshots.append(snapshot)
        self._snapshot_bytes = num_bytes
        self._shrink()

    def keep_state(self, objects: LiveObjects, step: int) -> None:
        """Keeps the state before ``step``. Nothing is copied if it is larger than the budget."""
        num_bytes = objects.num_bytes
        if num_bytes > self.budget_bytes:
            self.refused_bytes = num_bytes
        else:
            self.add_snapshot(objects.snapshot(step))

    def clear(self) -> bool:
        """Drops all steps and states, and halves the budget. Returns True if there were any."""
        was_full = bool(self._held or self.snapshots)
        self._held.clear()
        self.snapshots.clear()
        self._step_bytes = self._snapshot_bytes = 0
        self.budget_bytes /= 2
        return was_full

    @property
    def num_bytes(self) -> int:
        return self._step_bytes + self._snapshot_bytes * len(self.snapshots)

    def _shrink(self) -> None:
        while len(self.snapshots) > 1 and (self._is_spare() or self.num_bytes > self.budget_bytes):
            self.snapshots.popleft()
        first = self.snapshots[0].step if self.snapshots else math.inf
        held, room = self._held, self.budget_bytes - self._snapshot_bytes * len(self.snapshots)
        while held and (self._step_bytes > room or (len(held) > self.keep and held[0].step < first)):
            self._step_bytes -= held.popleft().num_bytes
        self._most = max(self.keep, len(held)) + SPARE

    def _is_spare(self) -> bool:
        """Returns True if the oldest snapshot can be dropped: the last ``keep`` steps are replayed from the second."""
        first = self._held[-self.keep].step if len(self._held) >= self.keep else -math.inf
        return self.snapshots[1].step <= first

    def before(self, step: int) -> Snapshot | None:
        """Returns the newest snapshot at least one full step before ``step``; None without one."""
        older = [snapshot for snapshot in self.snapshots if snapshot.step < step]
        return older[-1] if older else None

    def recorded(self, step: int) -> list[RecordedStep]:
        """Returns the held steps up to ``step``, oldest first."""
        return [each for each in self.steps if each.step <= step]

    def steps_from(self, snapshot: Snapshot, step: int) -> list[RecordedStep] | None:
        """Returns all steps from ``snapshot`` up to ``step``; None if one is missing or cannot be replayed."""
        steps = [each for each in self.steps if snapshot.step <= each.step <= step]
        if len(steps) < step - snapshot.step + 1 or any(each.not_replayable for each in steps):
            return None
        if self.record is not None and any(each.is_light for each in steps):
            self.record(snapshot, steps)
        return None if any(each.not_replayable for each in steps) else steps

    def steps_to(self, step: int) -> tuple[Snapshot, list[RecordedStep]] | None:
        """Returns a snapshot and all steps from it up to ``step``; None if one is missing or cannot be replayed."""
        for snapshot in reversed(self.snapshots):
            if snapshot.step <= step:
                steps = self.steps_from(snapshot, step)
                by_hand = any("edited" in each.values for each in (steps or [])[:-1])  # edits cannot be repeated
                return None if steps is None or by_hand else (snapshot, steps)
        return None
