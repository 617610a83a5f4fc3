"""Finds inputs that a step writes to, samples that change, and inputs that are flipped unlike their targets."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.doctor.facts.data import SamplesFacts
from trainwright.doctor.measure.datasets import leaves_of
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.callers import caller
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.recorder.user_types import Loader

EVERY_STEP_UNTIL, INTERVAL_STEPS = 64, 8
"""All steps until EVERY_STEP_UNTIL are examined, later every INTERVAL_STEPS-th step."""
MAX_SAMPLES = 256
ELEMENTS_PER_SAMPLE = 64
MAX_PAIRS = 8  # Changed samples that are kept to fit their change
MIN_PAIRS = 4
MAX_FIT_ERROR = 1e-4  # Maximum relative error of the fit ``now = a * before + b`` of each element
MIN_CHANGE = 0.02  # Minimum change of ``a`` from 1, and of ``b`` from 0 in standard deviations
MAX_PICTURES = 48
MIN_SIDE, MAX_ELEMENTS = 4, 2**16  # Sizes of pictures that are compared
MIN_CORRELATION, MAX_OTHER_CORRELATION = 0.98, 0.9
"""Correlation of a picture with the flip that it has undergone (minimum), and with each other flip (maximum)."""

Key = tuple[int, ...]
"""A sample of a dataset (identity, position), or a slice of a larger tensor (identity, position, size)."""


class StoredSamples(Probe):
    """Keeps values of at most 256 samples and 48 pairs of pictures.

    ``urgent``: data have changed, or an input and its target are flipped differently.
    """

    name = SamplesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._steps = 0
        self._found = SamplesFacts()
        self._lines: weakref.WeakKeyDictionary[object, tuple[int, str | None]] = weakref.WeakKeyDictionary()
        self._known: dict[Key, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []  # values of a changed sample before and now
        self._factors: list[float] = []  # ``a`` of each changed sample that is ``a * before + b``
        self._pictures: dict[Key, tuple[Tensor, Tensor]] = {}
        self._shape: torch.Size | None = None  # of the pictures in the batches of this step
        self._num_rows = 0
        self._is_target: bool | None = None  # the second picture is the target of the loss; None: not known yet

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._lines[iterator] = id(getattr(loader, "dataset", None)), caller()

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if iterator not in self._lines or not isinstance(ids, list) or not torch.is_grad_enabled():
            return
        dataset, line = self._lines[iterator]
        self._found.source = self._found.source or line
        leaves = [each for each in leaves_of(batch) if each.dim() > 1 and len(each) == len(ids) and not each.is_cuda]
        keys = [(at, (dataset, sample)) for at, sample in enumerate(ids) if type(sample) is int]
        x = next((each for each in leaves if each.is_floating_point()), None)
        if x is not None:
            self._add_values(x, keys[:4])
        if self._is_target is not False:
            self._add_pictures(leaves, keys)

    def _add_values(self, x: Tensor, keys: Sequence[tuple[int, Key]]) -> None:
        if len(self._known) >= MAX_SAMPLES:  # only samples that are known can be compared
            keys = [each for each in keys if each[1] in self._known] if self._is_due(self._steps + 1) else []
        for at, key in keys:
            self._compare(key, x[at])

    def _is_due(self, step: int) -> bool:
        return step <= EVERY_STEP_UNTIL or step % INTERVAL_STEPS == 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps, found = step.step, self._found
        if found.apart and self._is_target is None and self._shape is not None and step.calls:
            self._is_target = _is_target(step, self._shape, self._num_rows)
        self._num_rows = 0
        if not self._is_due(step.step):
            return
        given = [each for call in step.calls for each in constants_of((call.args, call.kwargs))]
        if written := [each for each in given if not each.is_unchanged]:
            found.written += 1
            found.written_views += any(each.tensor._base is not None for each in written)
            found.since_written = found.since_written or step.step
        for tensor, whole in ((each.tensor, each.tensor._base) for each in given[:4] if each.is_unchanged):
            if whole is not None and tensor.device.type == "cpu" and tensor.numel() < whole.numel():
                self._compare((id(whole), int(tensor.storage_offset()), tensor.numel()), tensor)

    # data that are changed in place

    def _compare(self, key: Key, tensor: Tensor) -> None:
        now, before = sampled(tensor, ELEMENTS_PER_SAMPLE).double(), self._known.get(key)
        if before is not None or len(self._known) < MAX_SAMPLES:
            self._known[key] = now
        if before is None or before.shape != now.shape:
            return
        if torch.equal(before, now):
            return
        is_like = not self._pairs or self._pairs[0][0].shape == now.shape
        was = len(self._pairs), len(self._factors)
        if is_like and len(self._pairs) < MAX_PAIRS:
            self._pairs.append((before, now))
            self._found.since_changed = self._found.since_changed or self._steps + 1
        # if samples are also flipped at random, only the unflipped ones fit
        if len(self._factors) < MIN_PAIRS and (factor := _fitted(before[:, None], now[:, None])) is not None:
            self._factors.append(factor)
        self.urgent = self.urgent or (
            MIN_PAIRS in (len(self._pairs), len(self._factors))
            and was != (len(self._pairs), len(self._factors))
            and self._change() is not None
        )

    def _change(self) -> float | None:
        """Returns the factor of the changed samples; None unless one change explains them."""
        factors = sorted(self._factors)
        if len(factors) >= MIN_PAIRS and factors[-1] - factors[0] <= MIN_CHANGE * abs(factors[0]):
            return factors[0]
        return _factor(self._pairs)

    # pictures

    def _add_pictures(self, leaves: Sequence[Tensor], keys: Sequence[tuple[int, Key]]) -> None:
        """Finds the flips of an input and of its dense target, a second tensor with the same last two dimensions."""
        pictures = [each for each in leaves if each.dim() > 2 and min(each.shape[-2:]) >= MIN_SIDE]
        if len(pictures) != 2 or pictures[0].shape[-2:] != pictures[1].shape[-2:]:
            return
        self._shape = pictures[0].shape[-2:]
        self._num_rows += len(pictures[0])
        if pictures[0][0].numel() > MAX_ELEMENTS:
            return
        for at, key in keys:
            x, y = (each[at].reshape(-1, *each.shape[-2:]).float() for each in pictures)
            known = self._pictures.get(key)
            if known is None:
                if len(self._pictures) < MAX_PICTURES:
                    self._pictures[key] = x.clone(), y.clone()
            elif known[0].shape == x.shape and known[1].shape == y.shape and self._is_due(self._steps + 1):
                flips, found = (_flip(known[0], x), _flip(known[1], y)), self._found
                if None not in flips and flips[0] == flips[1]:
                    found.together += 1
                elif None not in flips:
                    found.apart += 1
                    found.since_apart = found.since_apart or self._steps + 1
                    self.urgent = self.urgent or found.apart == MIN_PAIRS

    def facts(self) -> SamplesFacts:
        self.urgent = False
        factor = self._change()
        changed = 0 if factor is None else max(len(self._pairs), len(self._factors))
        apart = self._found.apart if self._is_target else 0
        return replace(self._found, changed=changed, factor=factor or 1.0, apart=apart)


def _factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Fits ``now = a * before + b`` to each element over all samples. Returns the median ``a``; None without a fit."""
    if len(pairs) < MIN_PAIRS or pairs[0][0].numel() < MIN_PAIRS:
        return None
    before, now = (torch.stack([pair[n] for pair in pairs]) for n in (0, 1))
    return _fitted(before, now)


def _fitted(before: Tensor, now: Tensor) -> float | None:
    """Fits ``now = a * before + b`` to each column. Returns the median ``a``; None without a fit or a change."""
    if len(before) < MIN_PAIRS:
        return None
    x, y = before - before.mean(0), now - now.mean(0)
    spread = x.norm(dim=0)
    varies = spread > 1e-6 * before.abs().amax()
    if int(varies.sum()) < min(MIN_PAIRS, len(varies)):
        return None
    x, y, spread = x[:, varies], y[:, varies], spread[varies]
    a = (x * y).sum(0) / spread.square()
    shift = (now - before).mean(0)[varies].abs() / (spread / len(before) ** 0.5)
    is_fit = float((y - a * x).norm()) <= MAX_FIT_ERROR * float(y.norm()) and float(a.abs().min()) > 0
    is_off = float((a - 1).abs().median()) > MIN_CHANGE or float(shift.median()) > MIN_CHANGE
    return float(a.median()) if is_fit and is_off else None


def _flips_of(picture: Tensor) -> Iterator[Tensor]:
    """Yields a picture turned and mirrored in all ways that keep its size."""
    is_square = picture.shape[-1] == picture.shape[-2]
    for each in (picture, picture.flip(-1)):
        for turns in range(0, 4, 1 if is_square else 2):
            yield each.rot90(turns, (-2, -1))


def _flip(before: Tensor, now: Tensor) -> int | None:
    """Returns the number of the only flip that turns ``before`` into ``now``, up to brightness and contrast."""
    y = now.flatten() - now.mean()
    size = float(y.norm())
    if not size > 0 or not float(before.std()) > 0:
        return None
    likeness = [float((each.flatten() - before.mean()) @ y) / size for each in _flips_of(before)]
    likeness = [each / float((before - before.mean()).norm()) for each in likeness]
    best = max(range(len(likeness)), key=likeness.__getitem__)
    others = [each for n, each in enumerate(likeness) if n != best]
    return best if likeness[best] >= MIN_CORRELATION and max(others) <= MAX_OTHER_CORRELATION else None


def _is_target(step: RecordedStep, shape: torch.Size, num_rows: int) -> bool:
    """Returns True if the models took one of two pictures of each sample, and the loss the other one."""
    given = [each.tensor for call in step.calls for each in constants_of((call.args, call.kwargs))]
    inside = sum(len(each) for each in given if each.dim() > 2 and each.shape[-2:] == shape)
    operations = [each for each in step.program if isinstance(each, Operation)]
    beside = [c.tensor for each in operations for c in constants_of((each.args, each.kwargs))]
    return inside == num_rows and any(each.shape[-2:] == shape for each in beside)
