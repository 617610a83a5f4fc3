"""Measures the columns of evaluated inputs: their moments, and the codes of categories beside those of training."""

from __future__ import annotations

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
MAX_MEAN = 1e-5  # Absolute mean of a column standardized with its own mean. With that of other rows: 1 / sqrt(rows)


class Splits(Probe):
    """Reads the first input (rows, columns) of the passes of an evaluation. Keeps sums on their device."""

    name = SplitsFacts.experiment
    hears_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._sites, self._steps = watched.sites, 0
        self._trained = torch.zeros(0)  # counts of the codes (columns, codes)
        self._passes: dict[Site, list[Tensor]] = {}
        self._last: dict[Site, list[Tensor]] = {}  # of the newest evaluation

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        is_training = torch.is_grad_enabled()
        passes = [] if is_training else self._passes.setdefault(self._sites.current, [])
        if self._steps >= EVERY_STEP_UNTIL if is_training else len(passes) >= MAX_PASSES:
            return
        given = [each.detach() for each in plain(tensors_of((args, kwargs), 3))]
        x = next((each for each in given if each.dim() == 2 and len(each) > 1 and not each.is_complex()), None)
        if x is None or x.shape[1] > (MAX_COLUMNS if x.is_floating_point() else MAX_CODED_COLUMNS):
            return
        if not is_training:
            passes.append(_moments(x) if x.is_floating_point() else _counts(x))
        elif not x.is_floating_point():
            counts = _counts(x)
            self._trained = counts + self._trained if self._trained.shape == counts.shape else counts

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
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
        return found

    def _of_codes(self, evaluated: Tensor) -> SplitsFacts:
        """Finds columns whose evaluated codes have no gap although rare codes should be missing."""
        trained = self._trained.cpu()
        if trained.shape != evaluated.shape or bool(trained[:, -1].any()):
            return SplitsFacts()
        rows, gapless, gaps = int(evaluated[0].sum()), 0, 0.0
        for seen, known in zip(evaluated > 0, trained.double()):
            codes = seen.nonzero().flatten()
            if rows >= MIN_ROWS and len(codes) >= MIN_DISTINCT and int(codes[-1]) < int(known.nonzero().max()):
                within = known[codes[0] : codes[-1] + 1] / known.sum()
                if len(codes) == len(within):
                    gapless, gaps = gapless + 1, gaps + float((1 - within).pow(rows).sum())
        return SplitsFacts(rows=rows, columns=len(evaluated), gapless=gapless, gaps=gaps)


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
