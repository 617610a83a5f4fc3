"""Finds weights that stay as they were initialised: evaluated copies, frozen new heads, and running statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.names import named_modules
from trainwright.doctor.facts.unmoved import (
    HeadFacts,
    RunningStatistics,
    StatisticsFacts,
    UnmovedEvaluation,
    UnmovedFacts,
)
from trainwright.doctor.measure.tensors import sampled
from trainwright.doctor.measure.weights import was_trained
from trainwright.recorder.callers import caller
from trainwright.recorder.calls import Hook
from trainwright.recorder.comparisons import EvaluationSites, Site
from trainwright.recorder.copies import is_a_copy
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.listener import has_listeners
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import Args, Kwargs

MAX_COPIES = 8
SAMPLED_TENSORS = 4
SAMPLED_ELEMENTS = 64
MAX_CHECKS = 64  # The first evaluations, whose weights are all compared with the initial ones
URGENT_STEP = 20  # From this step on, a second evaluation is reported at once
MAX_EVALUATIONS = 8  # Evaluations that are reported for each module


class _Weights:
    """A sample of the initial weights of a module, to compare it with later ones."""

    def __init__(self, module: nn.Module) -> None:
        moving = [p for p in module.parameters() if _is_comparable(p)]
        last = len(moving) - 1
        chosen = sorted({round(index * last / (SAMPLED_TENSORS - 1)) for index in range(SAMPLED_TENSORS)})
        self._tensors = [moving[index] for index in chosen] if moving else []
        self._first = self._sample()

    def _sample(self) -> list[Tensor]:
        return [sampled(p, SAMPLED_ELEMENTS) for p in self._tensors]

    def are_unmoved(self) -> Tensor | None:
        """Returns a 0-d tensor, True if all sampled elements have their initial values; None without weights."""
        now = self._sample()
        if not now or [each.shape for each in now] != [each.shape for each in self._first]:
            return None
        same = [(one == other).all() for one, other in zip(now, self._first)]
        return torch.stack([each.to(same[0].device) for each in same]).all()


def _is_comparable(p: Tensor) -> bool:
    """Returns False for weights that cannot be compared: without values, sparse, or with a dtype of one byte."""
    is_plain = not is_lazy(p) and not p.is_meta and p.layout is torch.strided
    return is_plain and p.is_floating_point() and p.itemsize > 1 and p.numel() > 0


class _Evaluated:
    """A module whose calls without gradients are observed. ``checks``: (step, unmoved weights, call site, line)."""

    def __init__(self, module: nn.Module, *, is_copy: bool) -> None:
        self.kind = type(module).__name__
        self.is_copy = is_copy
        self.weights = _Weights(module)
        self.is_trained_with = False
        self._last_step = -1
        self._number = 0
        self.checks: list[tuple[int, Tensor, Site, str | None]] = []

    def called(self, step: int, site: Site) -> None:
        """Compares the weights at most once per step: in the first 64 such calls, then in calls 128, 256, ..."""
        if step == self._last_step:
            return
        self._last_step = step
        self._number += 1
        if self._number > MAX_CHECKS and self._number.bit_count() != 1:
            return
        if (unmoved := self.weights.are_unmoved()) is not None:
            self.checks.append((step, unmoved, site, caller()))

    def unmoved(self, steps: int, sites: EvaluationSites) -> UnmovedEvaluation | None:
        """Returns the evaluations if all used the initial weights and there was at most one per four steps."""
        checks = [each for each in self.checks if each[2] in sites]
        if self.is_trained_with or not checks or 4 * self._number > steps:
            return None
        if not all(torch.stack([unmoved for _, unmoved, _, _ in checks]).tolist()):
            return None
        at = tuple(step for step, _, _, _ in checks)[:MAX_EVALUATIONS]
        return UnmovedEvaluation(self.kind, self.is_copy, at, checks[0][3])


class UnmovedEvaluations(Probe):
    """Compares the weights that a loop evaluates with the initial ones. Costs nothing within a step."""

    name = UnmovedFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._steps = 0
        self._roots: dict[int, _Evaluated] = {}
        self._copies: list[_Evaluated] = []
        self._handles: list[RemovableHandle] = []

    def begin(self, site: WatchSite) -> None:
        subject = self._watched.subject
        if any(is_lazy(p) or type(p).__name__ == "DTensor" for p in subject.parameters):
            return
        owned = {id(p) for optimizer in subject.optimizers for p in owned_by(optimizer)}
        self._roots = {id(root): _Evaluated(root, is_copy=False) for root in subject.roots}
        known = {id(root) for root in subject.roots}
        for module in self._held_modules():
            parameters = [id(p) for p in module.parameters()]
            if id(module) in known or owned.intersection(parameters) or len(self._copies) >= MAX_COPIES:
                continue
            known.add(id(module))
            if is_a_copy(module, subject.roots):
                known.update(id(each) for each in module.modules())
                self._follow(module)

    def _held_modules(self) -> Iterator[nn.Module]:
        """Yields the modules among the variables of the loop, and modules that are attributes of these variables."""
        yield from self._watched.modules()
        for value in self._watched.values():
            if not isinstance(value, type | Tensor):
                held = getattr(value, "__dict__", None)
                yield from (each for each in [*(held or {}).values()] if isinstance(each, nn.Module))

    def _follow(self, module: nn.Module) -> None:
        copy = _Evaluated(module, is_copy=True)
        self._copies.append(copy)

        def called(module: nn.Module, args: Args) -> None:
            if has_listeners():
                copy.is_trained_with |= torch.is_grad_enabled()
                self._call(copy)

        self._handles.append(module.register_forward_pre_hook(Hook(module, called)))

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if (known := self._roots.get(id(root))) is not None and self._steps:
            self._call(known)

    def _call(self, evaluated: _Evaluated) -> None:
        evaluated.called(self._steps, self._watched.sites.here())
        if self._steps >= URGENT_STEP and len(evaluated.checks) == 2:
            self.urgent = True

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    def facts(self) -> UnmovedFacts | None:
        self.urgent = False
        still = [each.weights.are_unmoved() for each in self._roots.values()]
        if not self._roots or all(each is None or bool(each) for each in still):
            return None  # the trained weights do not move either
        roots = zip(self._roots.values(), still)
        moved = [each for each, is_still in roots if is_still is not None and not bool(is_still)]
        found = (each.unmoved(self._steps, self._watched.sites) for each in (*moved, *self._copies))
        return UnmovedFacts(self._steps, tuple(each for each in found if each is not None))


class Heads(Probe):
    """Finds a frozen last layer with freshly initialised weights through which gradients flow."""

    name = HeadFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject
        self._facts: HeadFacts | None = None
        self._handle: RemovableHandle | None = None

    def begin(self, site: WatchSite) -> None:
        owned = {id(p) for optimizer in self._subject.optimizers for p in owned_by(optimizer)}
        for root in self._subject.roots:
            linear = [(path, module) for path, module in named_modules([root]) if isinstance(module, nn.Linear)]
            if any(map(is_lazy, root.parameters())):
                continue
            trained = sum(id(p) in owned and p.requires_grad for p in root.parameters())
            sizes = {module.num_embeddings for module in root.modules() if isinstance(module, nn.Embedding)}
            if len(linear) < 2 or not trained or linear[-1][1].out_features in sizes:
                continue
            path, head = linear[-1]
            around = next((m for m in root.modules() if any(child is head for child in m.children())), root)
            if around is not root and any(id(p) in owned for p in around.parameters(recurse=False)):
                continue  # an adapter of the head
            if not any(p.requires_grad or id(p) in owned for p in head.parameters()) and is_fresh(head):
                self._follow(head, HeadFacts(path, head.out_features, trained))

    def _follow(self, head: nn.Linear, found: HeadFacts) -> None:
        def called(module: nn.Module, args: Args, output: object) -> None:
            if torch.is_grad_enabled() and isinstance(output, Tensor):
                self._facts = found if output.requires_grad else None
                self.end(None)

        self._handle = head.register_forward_hook(Hook(head, called))

    def end(self, error: BaseException | None) -> None:
        if self._handle is not None:
            self._handle.remove()

    def facts(self) -> HeadFacts | None:
        facts, self._facts = self._facts, None
        return facts


USUAL_DEVIATIONS = (0.01, 0.02)  # Common standard deviations of normal initialisations
MIN_WEIGHTS = 32


@torch.no_grad()
def is_fresh(layer: nn.Linear) -> bool:
    """Returns True if the weights of a linear layer have the distribution of an initialisation.

    This recognizes PyTorch's default, uniform weights between the bounds of Xavier with a bias of 0, and normal weights
    with a usual standard deviation and a bias of 0.
    """
    weight, bias = layer.weight, layer._parameters.get("bias")
    if was_trained(weight) or weight.numel() < MIN_WEIGHTS or type(own_part(weight.detach())) is not Tensor:
        return False
    values = weight.detach().double()
    largest, deviation = float(values.abs().max()), float(values.std())
    largest_bias = 0.0 if bias is None else float(bias.detach().double().abs().max())
    default, xavier = 1 / math.sqrt(layer.in_features), math.sqrt(6 / (layer.in_features + layer.out_features))
    tolerance = 3 / math.sqrt(2 * weight.numel())  # three standard errors of a standard deviation

    def is_uniform(bound: float) -> bool:
        return 0.9 * bound < largest <= 1.001 * bound and abs(deviation / bound * math.sqrt(3) - 1) < tolerance

    if largest_bias > 0.0:
        return largest_bias <= 1.001 * default and is_uniform(default)
    is_normal = any(abs(deviation / usual - 1) < tolerance for usual in USUAL_DEVIATIONS) and largest < 6 * deviation
    return is_uniform(xavier) or is_normal or (bias is None and is_uniform(default))


MIN_LARGE_MOMENTUM = 0.9


class Statistics(Probe):
    """Reads the running statistics of BatchNorms with a momentum of 0 or near 1. Other modules cost nothing."""

    name = StatisticsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject
        self._steps = 0
        self._means: dict[str, Tensor] = {}
        self._jumps: dict[str, list[float]] = {}

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step

    @torch.no_grad()
    def facts(self) -> StatisticsFacts | None:
        found = []
        for path, norm in named_modules(self._subject.roots):
            if not isinstance(norm, _BatchNorm) or not norm.training or not norm.track_running_stats:
                continue
            momentum, mean, variance = norm.momentum, norm.running_mean, norm.running_var
            if momentum is None or mean is None or variance is None or 0.0 < momentum < MIN_LARGE_MOMENTUM:
                continue
            before, self._means[path] = self._means.get(path), mean.clone()
            if before is not None:
                jump = ((mean - before).abs() / (variance + norm.eps).sqrt()).median()
                self._jumps.setdefault(path, []).append(float(jump))
            is_initial = bool((mean == 0).all() & (variance == 1).all())
            jumps = self._jumps.get(path, [])
            found.append(RunningStatistics(path, momentum, is_initial, statistics.median(jumps) if jumps else 0.0))
        return StatisticsFacts(self._steps, tuple(found)) if found else None
