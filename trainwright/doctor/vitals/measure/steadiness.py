"""Listens for what repeats and should not, and for what changes and should not: random state, inputs."""

from __future__ import annotations

import weakref
import zlib

import torch
from torch import Tensor

from trainwright.doctor.vitals.facts import SteadyFacts
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import Constant, RecordedStep, constants_of
from trainwright.runlog.json_values import Facts, strict

EARLY, EVERY = 64, 8
"""Until this step every step is looked at, then every so many, and as many after one in which something came again."""
MOST = 4096
"""Random states and parts of tensors that are remembered."""
LARGE = 1 << 22
"""Elements of a larger part are not read."""

Part = tuple[int, int, tuple[int, ...]]
"""Of a larger tensor: its identity, and where in it and how large the part is."""


class Steadiness(Probe):
    """Until EARLY about 10 us a step. ``urgent``: a random state or a part of the data came again, as it should not."""

    name = SteadyFacts.experiment
    closes_late = True

    def __init__(self) -> None:
        self._steps, self._close_until = 0, EARLY
        self._draws = False
        self._states: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._num_repeats = 0
        self._written = self._written_views = self._since_written = 0
        self._parts: dict[Part, tuple[weakref.ref[Tensor], int]] = {}
        self._came_again = self._changed = self._since_changed = 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if (step.step > self._close_until and step.step % EVERY) or not step.calls:
            return
        self._note_state(step)
        given = [each for call in step.calls for each in constants_of((call.args, call.kwargs))]
        self._note_writes(given)
        for each in given[:4]:
            if each.tensor._base is not None and each.is_unchanged and each.tensor.device.type == "cpu":
                self._note_part(each.tensor, each.tensor._base)

    def _note_state(self, step: RecordedStep) -> None:
        """Of the generator of the CPU, and of that of the device where there is one, if the step has drawn numbers."""
        before, on_device = step.calls[0].rng
        drew = not torch.equal(before, torch.default_generator.get_state())
        if not drew and (on_device is None or torch.equal(on_device, torch.cuda.get_rng_state())):
            return  # the next step may begin in the same state
        self._draws = True
        state = zlib.crc32(before.numpy().data)
        if on_device is not None:
            state = state << 32 | zlib.crc32(on_device.numpy().data)
        first = self._states.setdefault(state, step.step)
        if first != step.step:
            self._num_repeats += 1
            self._close_until = max(self._close_until, step.step + EVERY)
            self._repeats = self._repeats or [(step.step, first)]
            self.urgent = self.urgent or self._num_repeats == 4
        elif len(self._states) > MOST:
            del self._states[next(iter(self._states))]

    def _note_writes(self, given: list[Constant]) -> None:
        changed = [each for each in given if not each.is_unchanged]
        if changed:
            self._written += 1
            self._written_views += any(each.tensor._base is not None for each in changed)
            self._since_written = self._since_written or self._steps

    def _note_part(self, tensor: Tensor, whole: Tensor) -> None:
        if tensor.numel() > LARGE or tensor.numel() == whole.numel():
            return
        key = (id(whole), int(tensor.storage_offset()), tuple(tensor.shape))
        known = self._parts.get(key)
        digest = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        if known is not None and known[0]() is whole:
            self._came_again += 1
            if known[1] != digest:
                self._changed += 1
                self._close_until = max(self._close_until, self._steps + EVERY)
                self._since_changed = self._since_changed or self._steps
                self.urgent = self.urgent or self._changed == 4
        elif len(self._parts) < MOST:
            self._parts[key] = (weakref.ref(whole), digest)

    def values(self) -> Facts:
        self.urgent = False
        since, first = self._repeats[0] if self._repeats else (0, 0)
        facts = SteadyFacts(
            steps=self._steps,
            draws=self._draws,
            repeats=self._num_repeats,
            since_repeat=since,
            repeats_step=first,
            written=self._written,
            written_views=self._written_views,
            since_written=self._since_written,
            came_again=self._came_again,
            changed=self._changed,
            since_changed=self._since_changed,
        )
        return dict(strict(vars(facts)))
