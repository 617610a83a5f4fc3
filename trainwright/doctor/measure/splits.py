"""Compares evaluated inputs with training inputs: moments of columns, codes of categories, and the scale."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.data import SplitsFacts
from trainwright.doctor.measure.evaluations import source_of
from trainwright.recorder.comparisons import Site
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Args, Kwargs

EVERY_STEP_UNTIL = 128  # Training steps whose codes are counted
MAX_PASSES = 64  # Passes of an evaluation that are read
MAX_COLUMNS, MAX_CODED_COLUMNS, MAX_CODES = 512, 32, 1024
MIN_ROWS, MIN_DISTINCT = 32, 16
MAX_RANGED = 16  # Training steps, and passes of an evaluation, whose range is measured
MAX_MEAN_OF_ALL = 0.3  # Absolute mean of standardized inputs
MAX_MEAN = 1e-5  # Absolute mean of a column standardized with its own mean. With that of other rows: 1 / sqrt(rows)


class Splits(Probe):
    """Reads the first input (rows, columns) of training steps and of evaluations. Keeps sums on their device."""

    name = SplitsFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._sites, self._steps = watched.sites, 0
        self._trained = torch.zeros(0)  # counts of the codes (columns, codes)
        self._passes: dict[Site, list[Tensor]] = {}
        self._last: dict[Site, list[Tensor]] = {}  # of the newest evaluation
        self._training = _Range()
        self._evaluated: dict[Site, _Range] = {}  # in passes since the last step
        self._ranges: dict[Site, _Range] = {}  # of the newest evaluation

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        is_training = torch.is_grad_enabled()
        values = self._training if is_training else self._evaluated.setdefault(self._sites.current, _Range())
        if values.passes < MAX_RANGED:
            values.add(plain(tensors_of((args, kwargs), 3)))
        passes = [] if is_training else self._passes.setdefault(self._sites.current, [])
        if self._steps >= EVERY_STEP_UNTIL if is_training else len(passes) >= MAX_PASSES:
            return
        given = [each.detach() for each in plain(tensors_of((args, kwargs), 3))]
        x = next((each for each in given if each.dim() == 2 and len(each) > 1 and not each.is_complex()), None)
        x = _joined(given) if x is None else x
        if x is None or x.shape[1] > (MAX_COLUMNS if x.is_floating_point() else MAX_CODED_COLUMNS):
            return
        if not is_training:
            passes.append(_moments(x) if x.is_floating_point() else _counts(x))
        elif not x.is_floating_point():
            counts = _counts(x)
            self._trained = counts + self._trained if self._trained.shape == counts.shape else counts

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if self._evaluated:
            ranges, self._evaluated = self._evaluated, {}
            self._ranges = {site: each for site, each in ranges.items() if site in self._sites} or self._ranges
        if self._passes:
            passes, self._passes = self._passes, {}
            self._last = {site: each for site, each in passes.items() if each and site in self._sites} or self._last

    def facts(self) -> SplitsFacts:
        self.on_closed(RecordedStep(self._steps))  # an evaluation after the last step
        found = SplitsFacts()
        for site, passes in self._last.items():
            if all(each.shape == passes[0].shape for each in passes):
                total = torch.stack(passes).sum(0).cpu()
                made = self._of_codes(total) if total.shape[1] == MAX_CODES else _of_moments(total, source_of(site))
                found = made if made.columns else found
        scale, kinds = self._training.scale(), [(each.scale(), site) for site, each in self._ranges.items()]
        others = [(each, source_of(site)) for each, site in kinds if scale and each and each != scale]
        if others and not any(each == scale for each, _ in kinds):
            found = replace(found, scales=(scale, others[0][0]), source=others[0][1])
        return found

    def _of_codes(self, evaluated: Tensor) -> SplitsFacts:
        """Finds columns whose evaluated codes have no gap although rare codes should be missing."""
        trained = self._trained.cpu()
        if trained.shape != evaluated.shape or bool(trained[:, -1].any()):
            return SplitsFacts()
        rows, gapless, gaps, beyond = int(evaluated[0].sum()), 0, 0.0, 0.0
        seen, number = evaluated > 0, (evaluated > 0).sum(1)
        first, lowest = (x.long().argmax(1) for x in (seen, trained > 0))
        last, highest = (MAX_CODES - 1 - x.flip(1).long().argmax(1) for x in (seen, trained > 0))
        is_gapless = (number >= MIN_DISTINCT) & (last < highest) & (number == last - first + 1)
        for n in is_gapless.nonzero().flatten().tolist() if rows >= MIN_ROWS else ():
            missing = (1 - trained[n].double() / trained[n].sum()).pow(rows)  # probability that a code does not occur
            gapless, gaps = gapless + 1, gaps + float(missing[first[n] : last[n] + 1].sum())
            beyond += float((1 - missing[last[n] + 1 :]).sum())
        coded = (trained > 0).sum(1) >= MIN_DISTINCT
        beyond = beyond if gapless == int((coded & (first == lowest)).sum()) == int(coded.sum()) > 1 else 0.0
        return SplitsFacts(rows=rows, columns=len(evaluated), gapless=gapless, gaps=gaps, beyond=beyond)


def _joined(given: list[Tensor]) -> Tensor | None:
    """Returns vectors of codes, such as users and items, as columns; None if there are fewer than two."""
    vectors = [each for each in given if each.dim() == 1 < len(each) and each.dtype == torch.int64]
    columns = [each for each in vectors if len(each) == len(vectors[0])]
    return torch.stack(columns, 1) if len(columns) > 1 else None


class _Range:
    """Range and moments of the first input with floating-point rows, in several passes, on its device."""

    def __init__(self) -> None:
        self.passes = 0
        self._total: Tensor | None = None

    def add(self, given: list[Tensor]) -> None:
        x = next(
            (each.detach() for each in given if each.dim() > 1 and each.is_floating_point() and each.numel()), None
        )
        if x is None:
            return
        self.passes += 1
        wide, ones = x.double(), torch.ones((), dtype=torch.double, device=x.device)
        ends = torch.stack([wide.amin(), -wide.amax(), -(wide != wide.round()).any().double()])
        sums = torch.stack([ones * x.numel(), wide.sum(), wide.square().sum()])
        now = torch.cat([ends, sums])
        if self._total is not None and self._total.device == now.device:
            now = torch.cat([torch.minimum(self._total[:3], ends), self._total[3:] + sums])
        self._total = now

    def scale(self) -> str:
        """Returns the name of a usual scale of pictures; "" for another one. Synchronizes with the device."""
        if self._total is None:
            return ""
        low, high, fraction, number, total, squares = self._total.tolist()
        high, mean = -high, total / number
        deviation = max(0.0, squares / number - mean * mean) ** 0.5
        if low >= 0:
            is_byte = fraction == 0 and 32 < high <= 255
            return "0 to 255" if is_byte else "0 to 1" if 0.5 < high <= 1 and fraction else ""
        if low >= -1 and high <= 1:
            return "-1 to 1" if low < -0.5 and high > 0.5 else ""
        return "standardized" if abs(mean) < MAX_MEAN_OF_ALL and 0.7 < deviation < 1.3 else ""


def _moments(x: Tensor) -> Tensor:
    """Returns the number of rows, the sums and the sums of squares of all columns, (3, columns)."""
    wide = x.double()
    return torch.stack([torch.full_like(wide[0], len(x)), wide.sum(0), wide.square().sum(0)])


def _counts(x: Tensor) -> Tensor:
    """Returns the counts (columns, codes). The last code stands for all larger ones."""
    places = x.long().clamp(0, MAX_CODES - 1) + MAX_CODES * torch.arange(x.shape[1], device=x.device)
    counts = torch.zeros(MAX_CODES * x.shape[1], dtype=torch.int64, device=x.device)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    return counts.index_put_((places.flatten(),), one, accumulate=True).view(-1, MAX_CODES)  # bincount synchronizes


def _of_moments(total: Tensor, source: str | None) -> SplitsFacts:
    rows = float(total[0, 0])
    mean, square = total[1] / rows, total[2] / rows
    varies = square - mean.square() > 1e-12
    is_own = (mean.abs() < MAX_MEAN) & ((square - 1).abs() < 1e-4 + 2 / rows) & varies
    if rows < MIN_ROWS:
        return SplitsFacts()
    return SplitsFacts(rows=int(rows), columns=int(varies.sum()), standardized=int(is_own.sum()), source=source)
