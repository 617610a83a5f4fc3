"""Finds the call sites of evaluations: passes without gradients whose outputs are compared with targets.

Counts which class the samples of each class are predicted as.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.doctor.facts.modes import MIN_STILL, EvaluationFacts, RenamedClasses
from trainwright.recorder.comparisons import ComparedOutputs, Site
from trainwright.recorder.hooks import listening_to_calls
from trainwright.recorder.part_calls import PartCalls
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader

FOLLOWED_PASSES = 4  # First evaluations of a call site, all observed. After them only the 8th, 16th, 32nd, ... are.
VALUES_PER_SAMPLE = 256  # Values that are compared, evenly spaced: 256 to 511, or all of a smaller sample
MAX_CLASSES = 128  # Classes that are counted. The last one stands for all larger ones
MIN_ROWS, MIN_ROWS_PER_CLASS = 64, 8
MIN_STEPS_OF_LABELS = 3  # Minimum number of different distances between labels that follow each other
MIN_RENAMED = 2  # Minimum number of renamed classes. One may be a class that was not learned
MIN_PURITY, MIN_GAIN = 0.5, 0.2
"""Minimum fraction of the samples of a renamed class with the same prediction, and of right predictions gained."""
MAX_COPIES = 4  # Copies of a model that are observed: a loop may make one for each evaluation


class Evaluations(Probe):
    """Observes the outputs of passes without gradients between two steps. In a step, only follows earlier outputs."""

    name = EvaluationFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._modules, self._roots, self._sites = watched.modules, watched.subject.roots, watched.sites
        self._outputs = ComparedOutputs(watched.sites, self._on_compared)
        self._parts = PartCalls(self._on_part, self._on_part_output)
        self._copies: list[nn.Module] = []
        self._open = ExitStack()
        self._passes: Counter[Site] = Counter()
        self._observed: dict[Site, None] = {}  # call sites that are observed until the next step has ended, in order
        self._left_out: set[Site] = set()  # call sites that are not observed until the next step has ended
        self._site: Site | None = None
        self._given: list[Tensor] = []
        self._steps, self._in_step = 0, False
        self._facts: EvaluationFacts | None = None
        # (target, prediction) -> samples, for each pass over a loader
        self._counts: dict[tuple[Site | None, int], Tensor] = {}
        self._num_iterators = 0
        # Of the first pass of each model in an evaluation, by call site and place among the models that it calls: the
        # versions of the weights, the sums of inputs and outputs, and whether they equal those of the last evaluation
        self._first: dict[tuple[Site, int], tuple[int, tuple[float, ...]]] = {}
        self._same: dict[tuple[Site, int], bool] = {}
        self._called: dict[Site, list[int]] = {}
        self._still, self._is_copy = 0, False
        self._batch: tuple[object, list[Tensor]] | None = None  # the newest batch, and its dataset
        self._trained_on: object = None  # the dataset of the newest training batch
        # the labels and a weighted sum of each sample in this and the last evaluation, by call site and dataset
        self._samples: dict[tuple[Site, int], list[tuple[Tensor, Tensor]]] = {}
        self._samples_before: dict[tuple[Site, int], tuple[Tensor, Tensor]] = {}
        self._altered = 0.0
        self._altered_at: str | None = None
        self._is_shared = False  # the datasets of training and evaluation are one, or share data or transforms

    def begin(self, site: WatchSite) -> None:
        self._sites.follow = self._observe
        self._observe(self._modules())

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._parts.is_inside = True
        if self._outputs.pushed:
            self._outputs.stop()  # operations inside the model are not part of the evaluation
        self._site = None
        if torch.is_grad_enabled():
            self._in_step = True
            (self._trained_on, _), self._batch = self._batch or (self._trained_on, None), None
            if self._outputs.derived:
                self._outputs.trained_on(tensors_of((args, kwargs), 3))
        elif not self._in_step and self._is_followed(site := self._sites.current):
            self._site, self._given = site, tensors_of((args, kwargs), 3)
            self._read_samples(site)

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        self._batch = None if self._in_step else (getattr(iterator, "_dataset", None), tensors_of(batch, 3))

    def _read_samples(self, site: Site) -> None:
        """Keeps the labels of the newest batch, and a weighted sum of some values of each sample."""
        (dataset, tensors), self._batch = self._batch or (0, []), None
        x = next(
            (each for each in plain(tensors) if each.is_floating_point() and each.dim() > 1 and each.numel()), None
        )
        labels = [each for each in plain(tensors) if each.dtype == torch.int64 and each.dim() == 1]
        if x is not None and labels and len(labels[0]) == len(x):
            flat = x.detach().flatten(1)
            flat = flat[:, :: max(1, flat.shape[1] // VALUES_PER_SAMPLE)].double()
            sums = flat @ torch.arange(1.0, flat.shape[1] + 1, dtype=flat.dtype, device=flat.device)
            self._samples.setdefault((site, id(dataset)), []).append((labels[0].clone(), sums))
            self._is_shared |= bool(_parts_of(dataset) & _parts_of(self._trained_on))

    def _compare_samples(self) -> None:
        """Finds evaluated samples whose values differ from those in the last evaluation, though the labels are equal.

        Labels in a regular order, such as those of few-shot episodes, do not identify the samples.
        """
        for key, rows in self._samples.items() if self._steps else ():
            labels, sums = (torch.cat(each) for each in zip(*rows))
            before, self._samples_before[key] = self._samples_before.get(key), (labels, sums)
            if before is None or key[0] not in self._sites or not torch.equal(before[0], labels):
                continue
            if len(labels) >= MIN_ROWS and len(set(labels.diff().tolist())) >= MIN_STEPS_OF_LABELS:
                altered = float((before[1] != sums).double().mean())
                self.urgent |= altered > 0 and not self._altered
                self._altered, self._altered_at = altered, source_of(key[0])
        self._samples.clear()

    def _is_followed(self, site: Site) -> bool:
        """Returns True if this call is observed. See FOLLOWED_PASSES: evaluations are counted for each call site."""
        if site in self._observed or site in self._left_out:
            return site in self._observed
        self._passes[site] += 1
        number = self._passes[site]
        if number > FOLLOWED_PASSES and number.bit_count() != 1:
            self._left_out.add(site)
            return False
        self._observed[site] = None
        return True

    def on_output(self, root: nn.Module, output: object) -> None:
        self._parts.is_inside = False
        if self._site is not None and output is not None:
            self._outputs.returned(output, self._given, self._site)
            called = self._called.setdefault(self._site, [])
            if id(root) not in called and len(called) < MAX_COPIES:
                called.append(id(root))
                self._compare((self._site, len(called)), root, tensors_of((self._given, output), 6))
            self._outputs.start()
            self._parts.open(root)
        elif self._in_step and self._outputs.derived:  # a loss may use outputs from before the step
            self._outputs.start()

    def _compare(self, key: tuple[Site, int], root: nn.Module, tensors: list[Tensor]) -> None:
        """Compares inputs and outputs with the last ones, if weights have moved since. Synchronizes with the device."""
        self._is_copy = not any(root is each for each in self._roots)
        weights = [p for each in (self._roots if self._is_copy else [root]) for p in each.parameters()]
        version = sum(p._version for p in weights if not p.is_inference())
        real = [each.detach().abs() if each.is_complex() else each.detach() for each in plain(tensors)]
        sums = tuple(float(each.double().sum()) for each in real)
        before, self._first[key] = self._first.get(key), (version, sums)
        self._same[key] = before is not None and before[0] != version and before[1] == sums and len(sums) > 1

    def on_backward_called(self) -> None:
        if self._outputs.pushed:
            self._outputs.stop()

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self.on_backward_called()

    def _on_part(self, part: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._outputs.stop()
        if torch.is_grad_enabled():
            self._outputs.trained_on(tensors_of((args, kwargs), 3))

    def _on_part_output(self, part: nn.Module, output: object) -> None:
        if self._observed and not self._in_step and not torch.is_grad_enabled():
            self._outputs.returned(output, (), self._sites.here())
            self._outputs.start()

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._num_iterators += 1
        if not self._in_step:
            self._observe(self._modules())

    def _on_compared(self, name: str, output: Tensor, target: Tensor) -> None:
        """Counts a comparison of predicted classes, or of scores (N, C), with classes.

        Next tokens are not counted: a tokenizer numbers them, and an untrained model repeats a few for each context.
        """
        count: Tensor | int = 1
        if name in ("cross_entropy", "nll_loss") and output.dim() == 2:
            ids = next((each for each in self._given if _has_target_per_token(each, target)), None)
            count = 1 if ids is None else (ids.max() >= output.shape[1]).long()
            output = output.argmax(1)
        is_class = not (output.is_floating_point() or target.is_floating_point() or output.dtype == torch.bool)
        if is_class and output.shape == target.shape and output.dim() == 1 and output.device == target.device:
            places = MAX_CLASSES * target.clamp(0, MAX_CLASSES - 1) + output.clamp(0, MAX_CLASSES - 1)
            counts = self._counts.setdefault(
                (self._site, self._num_iterators), torch.zeros(MAX_CLASSES**2, dtype=torch.int64, device=output.device)
            )
            counts.index_add_(0, places.long(), count * torch.ones_like(places, dtype=torch.int64))

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training:
            self._observe([module])

    def _observe(self, modules: Sequence[nn.Module]) -> None:
        """Observes calls of modules that are copies of the trained ones: a loop may evaluate these."""
        known = {id(each) for each in (*self._roots, *self._copies)}
        for module in modules:
            if len(self._copies) < MAX_COPIES and id(module) not in known and _is_copy(module, self._roots):
                known.add(id(module))
                self._copies.append(module)
                self._open.enter_context(listening_to_calls([self._sites, self], [module]))

    def on_closed(self, step: RecordedStep) -> None:
        if self._outputs.pushed:
            self._outputs.stop()
        if self._observed:
            self._parts.close()
            self._close()
        self._left_out.clear()
        self._in_step, self._steps = False, step.step

    def on_forked(self) -> None:
        self._outputs.stop()

    def end(self, error: BaseException | None) -> None:
        self._outputs.stop()
        self._parts.close()
        self._open.close()

    def _close(self) -> None:
        """Ends the passes since the last step. Passes whose outputs were compared with targets are an evaluation."""
        stale = self._outputs.stale_reads
        if stale > 1 or any(site in self._sites for site in self._observed):
            found = (_renamed(counts, site) for (site, _), counts in self._counts.items())
            renamed = next((each for each in found if each is not None), None)
            self.urgent |= renamed is not None and (self._facts is None or self._facts.renamed is None)
            same = [is_same for (site, _), is_same in self._same.items() if site in self._sites]
            self._compare_samples()
            self._still = self._still + 1 if same and all(same) else 0
            self.urgent |= self._still == MIN_STILL
            self._facts = EvaluationFacts(
                after=self._steps,
                still=self._still,
                still_at=source_of(next(iter(self._observed))),
                is_copy=self._is_copy,
                stale=stale,
                stale_at=self._outputs.stale_at,
                altered=self._altered,
                altered_at=self._altered_at,
                is_shared=self._is_shared,
                renamed=renamed,
            )
            self.urgent |= stale > 1
        self._same.clear()
        self._called.clear()
        self._samples.clear()
        self._outputs.forget()
        self._counts.clear()
        self._observed.clear()
        self._given, self._site = [], None

    def facts(self) -> EvaluationFacts | None:
        if self._observed and not self._in_step:
            self._close()
        self.urgent = False
        return self._facts


def _is_copy(module: nn.Module, roots: Sequence[nn.Module]) -> bool:
    """Returns True if a module has the shapes of a root and shares no parameters with any root."""
    ours = {id(p) for root in roots for p in root.parameters()}
    theirs = list(module.parameters())
    if any(map(is_lazy, (*theirs, *(p for root in roots for p in root.parameters())))):  # no shape yet
        return False
    shapes = [[p.shape for p in root.parameters()] for root in roots]
    return bool(theirs) and not any(id(p) in ours for p in theirs) and [p.shape for p in theirs] in shapes


def _parts_of(dataset: object) -> set[int]:
    """Returns the ids of a dataset without wrappers such as ``Subset``, and of the objects in its attributes."""
    while (inner := getattr(dataset, "dataset", None)) is not None:
        dataset = inner
    held = (each for each in (getattr(dataset, "__dict__", None) or {}).values())
    return {id(dataset), *(id(each) for each in held if hasattr(each, "__dict__") or isinstance(each, list | Tensor))}


def _has_target_per_token(ids: Tensor, target: Tensor) -> bool:
    is_ids = ids.dim() > 1 and not ids.is_floating_point() and ids.device == target.device
    return is_ids and ids.numel() - ids.shape[0] <= target.numel() <= ids.numel()


def _renamed(counts: Tensor, site: Site | None) -> RenamedClasses | None:
    """Returns the classes whose samples are predicted as another class, if no two classes share a prediction.

    Synchronizes with the device, once for each followed evaluation.
    """
    table = counts.view(MAX_CLASSES, MAX_CLASSES)[:-1, :-1].cpu().double()
    rows, best = table.sum(1), table.max(1)
    known = (rows >= MIN_ROWS_PER_CLASS).nonzero().flatten()
    moved = [int(n) for n in known if best.indices[n] != n and best.values[n] >= MIN_PURITY * rows[n]]
    total = float(rows[known].sum())
    if total < MIN_ROWS or len(moved) < MIN_RENAMED or len(set(best.indices[known].tolist())) < len(known):
        return None
    right, renamed = float(table.diagonal()[known].sum()) / total, float(best.values[known].sum()) / total
    if renamed < right + MIN_GAIN:
        return None
    predicted = tuple(int(best.indices[n]) for n in moved)
    return RenamedClasses(
        targets=tuple(moved),
        predicted=predicted,
        right=right,
        right_renamed=renamed,
        source=None if site is None else source_of(site),
    )


def source_of(site: Site) -> str | None:
    """Returns the line in the user's source that calls the model, such as ``train.py:44``."""
    _, code, line = site
    return None if code is None else f"{Path(code.co_filename).name}:{line}"
