"""Observes repeated random states at the start of steps, and inputs that are changed in place."""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.doctor.facts.steadiness import SteadinessFacts
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.callers import caller
from trainwright.recorder.datasets import leaves_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Constant, RecordedStep, constants_of
from trainwright.recorder.user_types import Loader

MAX_PENDING_REPEATS = 4  # Number of repeats after which the facts are reported before the next examination
EVERY_STEP_UNTIL = 64
"""All steps until this one are examined. Later, every INTERVAL_STEPS-th step is, and as many after a repetition."""
INTERVAL_STEPS = 8
MAX_STATES = 4096
MAX_SAMPLES = 256
ELEMENTS_PER_SAMPLE = 64
MIN_ELEMENTS_FOR_FIT = 4
MAX_FIT_ERROR = 1e-5  # Maximum relative error of ``now = a * before + b`` that is rounding
MIN_CHANGE = 0.02  # Minimum change of ``a`` from 1, and of ``b`` from 0 in standard deviations

Key = tuple[int, ...]
"""A sample of a dataset (identity, position), or a slice of a larger tensor (identity, position, size)."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The states of the CPU and device generators at the start of a step."""

    step: int
    state: Tensor
    on_device: Tensor | None

    def has_drawn(self) -> bool:
        """Returns True if numbers were drawn since."""
        if not torch.equal(self.state, torch.default_generator.get_state()):
            return True
        return self.on_device is not None and not torch.equal(self.on_device, torch.cuda.get_rng_state())

    def differs(self, other: _Begin | None) -> bool:
        """Returns True if the CPU generator is in another state than at the start of the other step."""
        return other is not None and not torch.equal(self.state, other.state)

    def digest(self) -> int:
        state = zlib.crc32(self.state.numpy().data)
        return state if self.on_device is None else state << 32 | zlib.crc32(self.on_device.numpy().data)


class Steadiness(Probe):
    """Observes random states and data, about 10 us a step until EVERY_STEP_UNTIL.

    ``urgent``: random states repeat, or data have changed.
    """

    name = SteadinessFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._steps, self._close_until = 0, EVERY_STEP_UNTIL
        self._draws = False
        self._before: _Begin | None = None  # of the previous examined step
        self._states: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._num_repeats = 0
        self._written = self._written_views = self._since_written = 0
        self._known: dict[Key, Tensor] = {}
        self._lines: weakref.WeakKeyDictionary[object, tuple[int, str | None]] = weakref.WeakKeyDictionary()
        self._maps: list[tuple[float, float]] = []
        self._came_again = self._since_changed = 0
        self._source: str | None = None

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._lines[iterator] = id(getattr(loader, "dataset", None)), caller()

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if iterator not in self._lines or not isinstance(ids, list) or not torch.is_grad_enabled():
            return
        dataset, line = self._lines[iterator]
        is_full = len(self._known) >= MAX_SAMPLES
        places = [(at, (dataset, sample)) for at, sample in enumerate(ids[:4]) if type(sample) is int]
        if is_full:  # only samples that are known can be compared
            places = [each for each in places if each[1] in self._known] if self._is_due(self._steps + 1) else []
        if not places:
            return
        x = next((each for each in leaves_of(batch) if each.is_floating_point() and each.dim() > 1), None)
        if x is None or x.is_cuda or len(x) != len(ids):
            return
        for at, key in places:
            self._compare(key, x[at], line)

    def _is_due(self, step: int) -> bool:
        return step <= self._close_until or step % INTERVAL_STEPS == 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if not self._is_due(step.step) or not step.calls:
            return
        now = _Begin(step.step, *step.calls[0].rng)
        if now.has_drawn() or now.differs(self._before):  # else nothing is drawn, and the state stays the same
            self._record_state(now)
        self._before = now
        given = [each for call in step.calls for each in constants_of((call.args, call.kwargs))]
        self._record_writes(given)
        for tensor, whole in ((each.tensor, each.tensor._base) for each in given[:4] if each.is_unchanged):
            if whole is not None and tensor.device.type == "cpu" and tensor.numel() < whole.numel():
                self._compare((id(whole), int(tensor.storage_offset()), tensor.numel()), tensor, None)

    def _record_state(self, begin: _Begin) -> None:
        """Records the state of a step that has drawn numbers."""
        self._draws = True
        state = begin.digest()
        first = self._states.setdefault(state, begin.step)
        if first != begin.step:
            self._num_repeats += 1
            self._repeats = self._repeats or [(begin.step, first)]
            self.urgent = self.urgent or self._num_repeats == MAX_PENDING_REPEATS
            self._close_until = max(self._close_until, begin.step + INTERVAL_STEPS)
        elif len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]

    def _record_writes(self, given: list[Constant]) -> None:
        changed = [each for each in given if not each.is_unchanged]
        if changed:
            self._written += 1
            self._written_views += any(each.tensor._base is not None for each in changed)
            self._since_written = self._since_written or self._steps

    def _compare(self, key: Key, tensor: Tensor, line: str | None) -> None:
        """Examines whether all repeated data became the same function ``a * x + b`` of their earlier values."""
        now = sampled(tensor, ELEMENTS_PER_SAMPLE).double()
        before = self._known.get(key)
        if before is None or before.shape != now.shape:
            if len(self._known) < MAX_SAMPLES:
                self._known[key] = now
            return
        self._came_again += 1
        if (fit := _fit(before, now)) is not None and len(self._maps) < MAX_SAMPLES:
            self._maps.append(fit)
            self._since_changed, self._source = self._since_changed or self._steps + 1, self._source or line
            self.urgent = self.urgent or len(self._maps) == MAX_PENDING_REPEATS

    def facts(self) -> SteadinessFacts:
        self.urgent = False
        since, first = self._repeats[0] if self._repeats else (0, 0)
        factors = torch.tensor(
            [a for a, _ in self._maps[:MIN_ELEMENTS_FOR_FIT]] or [1.0], dtype=torch.float64, device="cpu"
        )
        return SteadinessFacts(
            steps=self._steps,
            draws=self._draws,
            repeats=self._num_repeats,
            since_repeat=since,
            repeated_step=first,
            written=self._written,
            written_views=self._written_views,
            since_written=self._since_written,
            came_again=self._came_again,
            changed=len(self._maps),
            factor=float(factors.median()),
            is_one_factor=bool((factors / factors.median() - 1).abs().max() < MIN_CHANGE),
            since_changed=self._since_changed,
            source=self._source,
        )


def _fit(before: Tensor, now: Tensor) -> tuple[float, float] | None:
    """Returns ``a`` and ``b`` if ``now`` is ``a * before + b`` up to rounding and differs from ``before``; else
    None.
    """
    x, y = before - before.mean(), now - now.mean()
    spread = float(x.norm())
    if before.numel() < MIN_ELEMENTS_FOR_FIT or not spread > 0 or torch.equal(before, now):
        return None
    a = float(x @ y) / spread**2
    b = float(now.mean() - a * before.mean())
    is_fit = abs(a) > MAX_FIT_ERROR and float((y - a * x).norm()) <= MAX_FIT_ERROR * float(y.norm())
    is_off = abs(a - 1) > MIN_CHANGE or abs(b) > MIN_CHANGE * spread / before.numel() ** 0.5
    return (a, b) if is_fit and is_off else None
