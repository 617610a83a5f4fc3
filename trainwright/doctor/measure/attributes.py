"""Finds attributes that nothing reads, such as misspelt names, and random states that repeat."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache

import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.calls import AttributesFacts, IdleAttribute, SteadinessFacts
from trainwright.recorder.callers import caller
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep

REQUIRES_GRAD = "requires_grad"
MIN_NAME_SIMILARITY = 0.88
"""Minimum difflib similarity of a misspelt name: ``require_grad`` and ``requires_grad`` have 0.96."""


class Attributes(Probe):
    """Examines the names of attributes at each examination."""

    name = AttributesFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject

    def facts(self) -> AttributesFacts:
        return AttributesFacts(tuple(self._idle()))

    def _idle(self) -> Iterator[IdleAttribute]:
        named = dict(named_parameters(self._subject.roots))
        idle = {path: name for path, p in named.items() for name in vars(p) if p.requires_grad and _resembles(name)}
        if idle:
            first = next(iter(idle))
            yield IdleAttribute(first, idle[first], REQUIRES_GRAD, len(idle))
        for path, module in named_modules(self._subject.roots):
            for name in vars(module):
                is_set = (name == REQUIRES_GRAD or _resembles(name)) and vars(module)[name] is False
                if is_set and not _is_read(type(module), name):
                    inside = sum(p.requires_grad for p in module.parameters())
                    if inside:
                        yield IdleAttribute(path, name, f"{REQUIRES_GRAD}_()", inside)
        for optimizer in self._subject.optimizers:
            given = vars(optimizer) if type(optimizer).__module__.startswith("torch.optim") else {}
            for name in ("lr", "learning_rate"):
                is_rate = isinstance(given.get(name), int | float)
                if is_rate and any(group.get("lr") != given[name] for group in optimizer.param_groups):
                    yield IdleAttribute(type(optimizer).__name__, name, 'param_groups[...]["lr"]', 1)


@lru_cache(maxsize=4096)  # the same few names at each module and each examination
def _resembles(name: str) -> bool:
    return name != REQUIRES_GRAD and bool(get_close_matches(name, [REQUIRES_GRAD], cutoff=MIN_NAME_SIMILARITY))


def _is_read(kind: type, name: str) -> bool:
    """Returns True if the code of a class, or of one of its bases, contains the name."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [each for base in bases for each in vars(base).values()]
    return any(name in each.__code__.co_names for each in functions if hasattr(each, "__code__"))


MAX_PENDING_REPEATS = 4  # Number of repeats after which the facts are reported before the next examination
EVERY_STEP_UNTIL = 64
"""All steps until this one are examined. Later, every INTERVAL_STEPS-th, and the INTERVAL_STEPS after a repetition."""
INTERVAL_STEPS = 8
MAX_STATES = 4096


class Steadiness(Probe):
    """Observes random states, about 10 us a step until EVERY_STEP_UNTIL. ``urgent``: states repeat."""

    name = SteadinessFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._found = SteadinessFacts()
        self._close_until = EVERY_STEP_UNTIL
        self._before: int | None = None  # state at the start of the previous examined step
        self._drew = False  # whether that step drew numbers
        self._states: dict[int, int] = {}  # the first step that began in each state

    def on_seeded(self) -> None:
        self._found.seeded_at = caller()

    def on_closed(self, step: RecordedStep) -> None:
        if not step.calls or (step.step > self._close_until and step.step % INTERVAL_STEPS):
            return
        begin, on_device = step.calls[0].rng
        state = _digest(begin, on_device)
        now = _digest(torch.default_generator.get_state(), None if on_device is None else torch.cuda.get_rng_state())
        draws = state != now
        is_continued = state == self._before and not self._drew  # nothing has been drawn since the step before
        if not is_continued and (draws or self._before is not None):
            self._record(state, step.step)
        self._before, self._drew = state, draws

    def _record(self, state: int, step: int) -> None:
        """Records the state of a step that has drawn numbers."""
        found, first = self._found, self._states.setdefault(state, step)
        found.draws = True
        if first != step:
            found.repeats += 1
            if found.repeats == 1:
                found.since_repeat, found.repeated_step = step, first
            self.urgent = self.urgent or found.repeats == MAX_PENDING_REPEATS
            self._close_until = max(self._close_until, step + INTERVAL_STEPS)
        elif len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]

    def facts(self) -> SteadinessFacts:
        self.urgent = False
        return self._found


def _digest(state: Tensor, on_device: Tensor | None) -> int:
    digest = zlib.crc32(state.numpy().data)
    return digest if on_device is None else digest << 32 | zlib.crc32(on_device.numpy().data)
