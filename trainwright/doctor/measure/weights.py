"""Compares the weights at each examination with the initial ones and those of the previous examination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.checksums import start_checksums
from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.weights import MAX_NAMES, WeightsFacts
from trainwright.doctor.measure.tensors import made_by
from trainwright.recorder.graph import graph_behind, leaves_among
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import OptimizerStep, RecordedStep, tensors_of
from trainwright.recorder.ranks import local_part
from trainwright.recorder.user_types import Args

MAX_WRITES_OF_INITIALIZATION = 16
"""Writes to a weight before the first step. Creation, initialization and loading take fewer."""


OUTPUT_STEPS = 32  # Steps in which the gradients of the output layers are read
MAX_OUTPUT_WEIGHTS = 1 << 18  # Elements of an output layer that is read
MISSPELLED = ("require_grad", "requires_grads", "require_grads", "required_grad")  # for ``requires_grad``
MIN_FRESH_WEIGHTS = 128  # Weights of a layer whose distribution is compared with that of an initialisation


class MovingWeights(Probe):
    """Reads all weights at each examination in one pass over their memory. Counts updates in between."""

    name = WeightsFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        subject = watched.subject
        names = {id(p): name for name, p in named_parameters(subject.roots)}
        self._optimizers, self._roots = subject.optimizers, subject.roots
        self._parameters = [
            p for p in subject.parameters if p.is_floating_point() and p.layout is torch.strided and not p.is_meta
        ]
        self._names = [names.get(id(p), "a parameter outside of the model") for p in self._parameters]
        self._last: list[int] = []
        self._moved: set[int] = set()
        self._ever_in_optimizers: set[int] = set()
        self._with_gradient: set[int] = set()
        self._zeros: set[int] = set()  # matrices that begin as zeros
        self._found = WeightsFacts()
        self._updates_then = self._examined_at = 0
        self._rate = 0.0
        # the weights of output layers, with the units that had a gradient in any step, and in all steps
        self._outputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._is_edited = False

    def begin(self, site: WatchSite) -> None:
        self._last = self._checksums()
        self._found.worked_on = tuple(name for name, p in zip(self._names, self._parameters) if was_trained(p))
        self._zeros = {n for n, p in enumerate(self._parameters) if p.dim() > 1 and not local_part(p.detach()).any()}
        held = {id(self._parameters[n]) for n in self._in_optimizers() if self._parameters[n].requires_grad}
        self._found.frozen_by_name = tuple(_frozen_by_name(self._roots, held))[:MAX_NAMES]
        layers, _, fresh = frozen_layers(self._roots)
        if fresh and fresh[-1] == layers[-1]:
            self._found.frozen_at_random, self._found.frozen_outputs = fresh[-1][0], fresh[-1][1].out_features

    def on_output(self, root: nn.Module, output: object) -> None:
        if self._found.steps < 2 and torch.is_grad_enabled():
            for each in tensors_of(output, 3):
                for p in _weights_of_output(each):
                    if len(p) > 1 and p.numel() <= MAX_OUTPUT_WEIGHTS:
                        alive = torch.zeros(len(p), dtype=torch.bool, device=p.device)
                        self._outputs.setdefault(id(p), (p, alive, ~alive))

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        for p, in_any, in_all in self._outputs.values() if self._found.steps < OUTPUT_STEPS else ():
            if p.grad is not None and not p.grad.is_sparse:
                alive = (p.grad.detach() != 0).flatten(1).any(1)
                in_any |= alive
                in_all &= alive

    def on_closed(self, step: RecordedStep) -> None:
        found = self._found
        self._is_edited |= "edited" in step.values
        if step.step == OUTPUT_STEPS and not self._is_edited:
            self._find_idle_outputs()
        found.steps = step.step
        if step.step == 1:
            counts = [s.get("step", 0) for each in self._optimizers for s in each.state.values() if isinstance(s, dict)]
            found.updates_before = max([int(n) for n in counts if isinstance(n, int | float | Tensor)], default=1) - 1
        rates = [_rate(group) for each in step.program if type(each) is OptimizerStep for group in each.groups]
        if not rates or "vetoed" in step.values:  # a scaler may have skipped the update
            return
        highest = max(rates)
        found.updates += highest > 0.0
        found.highest_rate = max(found.highest_rate, highest)
        if highest != 0.0:
            found.at_0_since, found.rate_before_0 = 0, 0.0
        elif not found.at_0_since:
            found.at_0_since, found.rate_before_0 = step.step, self._rate
        self._rate = highest

    def _find_idle_outputs(self) -> None:
        """Finds units without a gradient before units with one. Idle units at the end may be padding."""
        names = dict(zip(map(id, self._parameters), self._names))
        for key, (p, in_any, in_all) in self._outputs.items():
            idle = (~in_any).nonzero().flatten().tolist()
            if idle and key in names and bool((in_any == in_all).all()) and bool(in_any[idle[0] :].any()):
                self._found.idle_outputs = tuple(idle[:MAX_NAMES])
                self._found.idle_module, self._found.outputs = names[key].rpartition(".")[0], len(p)
        self.urgent, self._outputs = bool(self._found.idle_outputs), {}

    def facts(self) -> WeightsFacts | None:
        self.urgent = False
        if not self._last:
            return None
        now = self._checksums()
        changed = {n for n, (was, one) in enumerate(zip(self._last, now)) if was != one}
        trainable = {n for n in self._in_optimizers() if self._parameters[n].requires_grad}
        moved = self._moved
        self._last, found = now, self._found
        if changed:
            found.stands_since, self._updates_then = found.steps, found.updates
        moved |= changed
        zero_now = self._record_gradients()
        with_zeros = {n for n in (zero_now - self._with_gradient) & trainable if self._parameters[n].dim() > 1}
        found.since, self._examined_at = self._examined_at, found.steps
        found.tensors, found.moved = len(trainable), len(trainable & moved)
        found.zero_gradients = self._named(with_zeros)
        found.zero_weights = self._named((self._zeros & trainable) - moved)
        found.zeros = len(self._zeros & trainable)
        found.has_gradient = bool(self._with_gradient & trainable)
        found.updates_since = found.updates - self._updates_then
        found.unchanged = self._named(trainable - changed | trainable & zero_now)
        return found

    def _record_gradients(self) -> set[int]:
        """Returns the tensors whose gradient is all zeros. Records the tensors with a nonzero one."""
        known = [n for n, p in enumerate(self._parameters) if p.grad is not None]
        grads = [local_part(grad.detach()) for n in known if (grad := self._parameters[n].grad) is not None]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        is_any = torch.stack([norm > 0 for norm in torch._foreach_norm(dense, 1)]).tolist() if dense else []
        self._with_gradient |= {n for n, found in zip(known, is_any) if found}
        return {n for n, found in zip(known, is_any) if not found}

    def _named(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._names[n] for n in sorted(numbers)[:MAX_NAMES])

    def _in_optimizers(self) -> set[int]:
        """Returns the tensors in optimizer groups whose learning rate is, or was at an examination, above 0."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups if _rate(group) > 0.0]
        held = {id(p) for group in groups for p in group["params"]}
        self._ever_in_optimizers |= {n for n, p in enumerate(self._parameters) if id(p) in held}
        return self._ever_in_optimizers

    def _checksums(self) -> list[int]:
        return start_checksums([local_part(p.detach()) for p in self._parameters])()


def _weights_of_output(output: Tensor) -> list[Tensor]:
    """Returns the weight matrix of the layer that made an output of the model, apart from views and copies."""
    node = made_by(output, "Addmm", "Mm", "Linear", "Convolution")
    inputs = [] if node is None else [each for each, _ in node.next_functions if each is not None]
    leaves = leaves_among(graph_behind([each for each in inputs if type(each).__name__.startswith(("TB", "Acc"))]))
    return [each for each in leaves if each.dim() > 1]


def _frozen_by_name(roots: Sequence[nn.Module], trained: set[int]) -> Iterator[str]:
    """Yields modules and parameters of ``trained`` with an attribute that was meant to freeze them."""
    for name, module in named_modules(roots):
        if vars(module).get("requires_grad") is False and any(id(p) in trained for p in module.parameters()):
            yield name
    for name, p in named_parameters(roots):
        if id(p) in trained and any(vars(p).get(each) is False for each in MISSPELLED):
            yield name


def was_trained(parameter: Tensor) -> bool:
    """Returns True if the parameter was written to more often than initialization explains."""
    return not parameter.is_inference() and parameter._version > MAX_WRITES_OF_INITIALIZATION


Layers: TypeAlias = list[tuple[str, nn.Linear]]


def frozen_layers(roots: Sequence[nn.Module]) -> tuple[Layers, Layers, Layers]:
    """Returns the linear layers, the frozen ones, and those of them with the values of an initialisation.

    If all are, the model is a network of random features, and none is returned.
    """
    layers = [(name, m) for root in roots for name, m in root.named_modules() if type(m) is nn.Linear]
    frozen = [(name, m) for name, m in layers if not any(p.requires_grad for p in m.parameters())]
    held = Counter(id(p) for root in roots for m in root.modules() for p in m._parameters.values())
    fresh = [(name, m) for name, m in frozen if held[id(m.weight)] == 1 and _is_fresh(m.weight)]
    return layers, frozen, fresh if len(fresh) < len(frozen) else []


def _is_fresh(weight: Tensor) -> bool:
    """Returns True if the values are uniform within the bounds of ``nn.Linear``, or normal with a deviation of 0.02."""
    flat = local_part(weight.detach()).flatten().double()
    if len(flat) < MIN_FRESH_WEIGHTS or weight.is_meta or was_trained(weight):
        return False
    bound, deviation = weight.shape[1] ** -0.5, flat.std()
    kurtosis, error = ((flat - flat.mean()) / deviation).pow(4).mean(), (24 / len(flat)) ** 0.5
    is_uniform = (flat.abs().max() <= 1.0001 * bound) & ((deviation * 3**0.5 / bound - 1).abs() < error)
    is_normal = ((deviation / 0.02 - 1).abs() < error) & ((kurtosis - 3).abs() < 4 * error)
    return bool((is_uniform & (kurtosis < 2)) | is_normal)


def _rate(group: Mapping[str, Any]) -> float:
    """Returns the learning rate of a group; 1 if the optimizer has none."""
    rate = group.get("lr", 1.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 1.0
