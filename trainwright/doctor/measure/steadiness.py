"""Random states in which a step begins again, and inputs that are written to in place."""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.doctor.facts.steadiness import SteadinessFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Constant, RecordedStep, constants_of
from trainwright.runlog.json_values import Facts, strict

REPEATS = 4
"""Repeats after which the facts do not wait for the next examination."""
EARLY, EVERY = 64, 8
"""Until this step every step is looked at, then every so many, and as many after one in which something came again."""
MOST = 4096
"""Random states and parts of tensors that are remembered."""
SAMPLE, FEW = 256, 8
"""Elements of a part that are remembered, and of which a correlation says something."""
FOLLOWS = 0.5
"""The correlation of old and new values."""
LARGE = 1 << 22
"""Elements of a larger part are not read."""

Part = tuple[int, int, tuple[int, ...]]
"""Of a larger tensor: its identity, and where in it and how large the part is."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The state of the generator of the CPU in which a step began, and that of the device where there is one."""

    step: int
    state: Tensor
    on_device: Tensor | None

    def has_drawn(self) -> bool:
        """Whether numbers were drawn since."""
        if not torch.equal(self.state, torch.default_generator.get_state()):
            return True
        return self.on_device is not None and not torch.equal(self.on_device, torch.cuda.get_rng_state())

    def digest(self) -> int:
        state = zlib.crc32(self.state.numpy().data)
        return state if self.on_device is None else state << 32 | zlib.crc32(self.on_device.numpy().data)


class Steadiness(Probe):
    """Until EARLY about 10 us a step. ``urgent``: random states repeat, or data have changed."""

    name = SteadinessFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._steps, self._close_until = 0, EARLY
        self._draws = False
        self._states: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._num_repeats = 0
        self._written = self._written_views = self._since_written = 0
        self._parts: dict[Part, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._came_again = self._changed = self._since_changed = 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if not step.calls:
            return
        now = _Begin(step.step, *step.calls[0].rng)
        if step.step > self._close_until and step.step % EVERY:
            return
        if now.has_drawn():  # else the next step may begin in the same state
            self._note_state(now)
        given = [each for call in step.calls for each in constants_of((call.args, call.kwargs))]
        self._note_writes(given)
        for each in given[:4]:
            if each.tensor._base is not None and each.is_unchanged and each.tensor.device.type == "cpu":
                self._note_part(each.tensor, each.tensor._base)

    def _note_state(self, begin: _Begin) -> None:
        """Of a step that has drawn numbers."""
        self._draws = True
        state = begin.digest()
        first = self._states.setdefault(state, begin.step)
        if first != begin.step:
            self._num_repeats += 1
            self._repeats = self._repeats or [(begin.step, first)]
            self.urgent = self.urgent or self._num_repeats == REPEATS
            self._close_until = max(self._close_until, begin.step + EVERY)
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
            if known[1] != digest and _follows(known[2], _sample(tensor)):
                self._changed += 1
                self._close_until = max(self._close_until, self._steps + EVERY)
                self._since_changed = self._since_changed or self._steps
                self.urgent = self.urgent or self._changed == REPEATS
        elif len(self._parts) < MOST:
            self._parts[key] = (weakref.ref(whole), digest, _sample(tensor))

    def values(self) -> Facts:
        self.urgent = False
        since, first = self._repeats[0] if self._repeats else (0, 0)
        facts = SteadinessFacts(
            steps=self._steps,
            draws=self._draws,
            repeats=self._num_repeats,
            since_repeat=since,
            repeated_step=first,
            written=self._written,
            written_views=self._written_views,
            since_written=self._since_written,
            came_again=self._came_again,
            changed=self._changed,
            since_changed=self._since_changed,
        )
        return dict(strict(vars(facts)))


def _sample(tensor: Tensor) -> Tensor:
    """Elements from all over a tensor."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to(torch.float64, copy=True)


def _follows(before: Tensor, now: Tensor) -> bool:
    """Whether new values are made of the old ones, or are all the same. A storage that is filled anew has others."""
    if before.numel() < FEW or before.std() == 0 or now.std() == 0:
        return True
    return bool(torch.corrcoef(torch.stack([before, now]))[0, 1].abs() > FOLLOWS)
