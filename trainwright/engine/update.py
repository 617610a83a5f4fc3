"""The optimizer's update, retried if memory ran out before it had written anything."""

from __future__ import annotations

import inspect
import operator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.guard import update_unless
from trainwright.engine.oom_report import is_out_of_memory, oom_snapshot
from trainwright.engine.recover import Recovery, make_room
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, OutOfMemoryError

_VERSION = operator.attrgetter("_version")
VERSION_COUNTED_PACKAGES = ("torch", "trainwright")
"""Packages whose optimizers, if they have ``_init_group``, write where autograd counts it; others may use ``.data``."""


class Update:
    """Calls the optimizer. If that runs out of memory, frees memory and calls it once more.

    Moments are created before the first update, when nothing is written yet. Raises OutOfMemoryError; its ``whole`` is
    True if the state is that of the last good step.
    """

    def __init__(self, recovery: Recovery, witness: StepWitness = SILENT) -> None:
        self._recovery, self._witness = recovery, witness
        self._num_made = 0  # parameters whose moments exist
        self._written: _WriteTracker | None = None

    def __call__(self, skipped: Tensor, state: TrainState, batch: StepBatch) -> tuple[OomReport, ...]:
        """Run the update. Return a report of the failed attempt, if there was one."""
        optimizer = state.optimizer
        reports: tuple[OomReport, ...] = ()
        while True:
            before = self._before(optimizer)
            try:
                self._update(skipped, optimizer)
                return reports
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                device: torch.device = optimizer.param_groups[0]["params"][0].device
                seen = replace(oom_snapshot(error, state, batch, device), phase="update", module="")
            if state.is_divided or not before.is_undone():
                raise _torn_error(state, seen.error)
            self._witness.memory_ran_out()
            if reports:
                self._recovery.put_back(state)
            micro = None if reports else max(micro.size for micro in batch.micro)
            reports += (make_room(seen, batch, micro, state, device),)
            if len(reports) > 1:
                raise _does_not_fit(state, reports)
            for group in optimizer.param_groups:
                if "foreach" in group and not group.get("fused"):  # its temporaries are as large as the weights
                    group["foreach"] = False

    def _before(self, optimizer: Optimizer) -> _WriteTracker:
        """Record the versions now. The tensors are listed once: searching for them takes 2 % of a small step."""
        if self._written is None or not self._written.is_of(optimizer):
            self._written = _WriteTracker(optimizer)
        self._written.begin()
        return self._written

    def _update(self, skipped: Tensor, optimizer: Optimizer) -> None:
        if self._num_made < sum([len(group["params"]) for group in optimizer.param_groups]):
            num_due = sum([p.grad is not None for group in optimizer.param_groups for p in group["params"]])
            if num_due > self._num_made and not (skipped.device.type == "cpu" and bool(skipped)):
                make_moments(optimizer)
                self._num_made = num_due
        update_unless(skipped, optimizer)


@torch.no_grad()
def make_moments(optimizer: Optimizer) -> None:
    """Create the state that torch's optimizers create in their first update, group after group between writes to
    weights.

    Otherwise a group whose moments do not fit would leave the groups before it updated.
    """
    for part in parts_of(optimizer):
        make = getattr(part, "_init_group", None)
        if make is None:
            continue
        lists = len(inspect.signature(make).parameters) - 1  # it fills them with parameters, gradients, moments
        for group in part.param_groups:
            make(group, *([] for _ in range(lists)))


class _WriteTracker:
    """Tracks writes of an optimizer to weights and state: version counters of tensors, values of numbers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._parts = optimizer, parts_of(optimizer)
        self._is_counted = all(_writes_counted(part) for part in self._parts)
        self._states = [part.state for part in self._parts]
        self._sizes = self._sizes_now()
        self._ids, self._num_entries = [*map(id, self._states)], self._num_entries_now()
        self._tensors: list[Tensor] = []
        self._numbers: list[tuple[StateDict, str]] = []
        if self._is_counted:
            self._tensors += [p for group in optimizer.param_groups for p in group["params"]]
            for own in [own for state in self._states for own in state.values()]:
                self._tensors += [value for value in own.values() if isinstance(value, Tensor)]
                self._numbers += [(own, name) for name, value in own.items() if not isinstance(value, Tensor)]

    def _sizes_now(self) -> list[list[int]]:
        return [[len(own) for own in state.values()] for state in self._states if self._is_counted]

    def _num_entries_now(self) -> list[int]:
        return [sum(map(len, state.values())) for state in self._states if self._is_counted]

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer has the states that are listed here: loading others replaces them."""
        ids = [id(part.state) for part in parts_of(optimizer)]
        return ids == self._ids and self._num_entries_now() == self._num_entries

    def begin(self) -> None:
        """Set the reference for later writes."""
        self._before = self._now()

    def _now(self) -> tuple[int, list[object]]:
        """Return the sum of all version counters, which never decreases, and the values of the numbers."""
        return sum(map(_VERSION, self._tensors)), [own.get(name) for own, name in self._numbers]

    def is_undone(self) -> bool:
        """Drop entries that were added to the state, which may be incomplete.

        Return False if more was, or may be, written.
        """
        if not self._is_counted:
            return False
        for part, sizes in zip(self._parts, self._sizes, strict=True):
            for parameter in list(part.state)[len(sizes) :]:  # added entries come last
                del part.state[parameter]
            for own, size in zip(part.state.values(), sizes, strict=True):
                for name in list(own)[size:]:
                    del own[name]
        now = _WriteTracker(self._optimizer)
        is_same = [*map(id, now._tensors)] == [*map(id, self._tensors)] and now._sizes == self._sizes
        return is_same and self._now() == self._before


def _writes_counted(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] in VERSION_COUNTED_PACKAGES and hasattr(
        optimizer, "_init_group"
    )


def _does_not_fit(state: TrainState, reports: tuple[OomReport, ...]) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"out of memory in the update of step {state.step + 1}{_first_note(state)}: {reports[-1].error}. "
        "It has written nothing: the state is that of the last good step",
        reports=reports,
        remedy="an optimizer with less state (sgd, adafactor) or with it on the host of a GPU (optimizer.offload: "
        "true), or a device with more memory",
    )


def _torn_error(state: TrainState, error: str) -> OutOfMemoryError:
    """Return the error for a state in which some weights may be updated and others not."""
    return OutOfMemoryError(
        f"out of memory in the update of step {state.step + 1}{_first_note(state)}: {error}. "
        "Weights and moments may be updated in part, so this state is not saved",
        whole=False,
        remedy="go on from the last checkpoint with an optimizer that needs less (optimizer.args.foreach: false has no "
        "temporaries as large as the weights; sgd and adafactor keep less state), or on a device with more memory",
    )


def raise_if_torn(state: TrainState, error: Exception) -> None:
    """Raise OutOfMemoryError if memory ran out after the optimizer's update: in the average or in buffers."""
    if is_out_of_memory(error):
        raise _torn_error(state, str(error).splitlines()[0][:200]) from None


def _first_note(state: TrainState) -> str:
    return "" if state.optimizer.state and state.step else " (the first one makes the optimizer's state)"
