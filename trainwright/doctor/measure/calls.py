"""Measures which optimizer holds which weight, and the order of calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.calls import CallsFacts, GroupFacts, OptimizerFacts, ScaledClip, ScalerFacts
from trainwright.doctor.measure.tensors import sampled
from trainwright.doctor.measure.weights import was_trained
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.graph import graph_behind, leaves_among
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import local_part
from trainwright.recorder.user_types import Args, Loader, TorchFunction

MAX_ROUNDING_RATIO = 1e-5
"""Gradients below this fraction of the largest one are rounding errors, as for a bias before a normalization."""
BACKWARDS_READ = 2  # First backward passes whose graph is searched for parameters outside of the models
MAX_PARAMETERS_OUTSIDE = 4  # A module with more may be a pretrained network that measures a loss
ELEMENTS_PER_WEIGHT = 16  # Number of elements of each weight that are compared to detect changes
MAX_WEIGHTS_SAMPLED = 64
MAX_TURNS_READ = 24  # Number of backward passes of several optimizers whose graph is read


class _LeftGradients:
    """Finds updates with gradients of another optimizer's turn: a generator's backward pass also reaches its critic.

    A turn is one or more backward passes and the step after them. Gradients count as left in an optimizer if (1) its
    parameters are applied to results of the parameters that the turn updates, (2) no ``zero_grad()`` precedes its own
    step, and (3) its own turn does not reach the others. If its parameters are applied first, as in an encoder with
    several heads, both gradients may be intended.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._num_read = 0
        self._used: list[list[Tensor]] = [[] for _ in optimizers]
        self.forget()

    def forget(self) -> None:
        """Begins a step of the loop."""
        self._uses: list[tuple[int, int, int]] = []  # (optimizer, first and last number of a node with its parameters)
        self._stepped: set[int] = set()
        self._turn: set[int] = set()  # optimizers that stepped since the last backward pass
        # by optimizer: the turn, versions of the turn's gradients and of its own, and its largest gradient
        self._left: dict[int, tuple[set[int], object, object, Tensor]] = {}

    def on_backward(self, losses: Sequence[Tensor]) -> None:
        if len(self._optimizers) < 2 or self._num_read >= MAX_TURNS_READ:
            return
        self._num_read += 1
        for number in {*range(len(self._optimizers))} - self._stepped if self._turn else ():
            grads = [p.grad for p in owned_by(self._optimizers[number])[:MAX_WEIGHTS_SAMPLED] if p.grad is not None]
            if grads and number not in self._left and self._is_after(number, self._turn):
                size = torch.stack([_sample(g).abs().amax().float() for g in grads if g.numel() and not g.is_sparse])
                self._left[number] = self._turn, self._versions(self._turn), self._versions({number}), size.amax()
        if self._turn:
            self._uses, self._turn = [], set()
        self._uses += self._uses_in(losses)

    def _uses_in(self, losses: Sequence[Tensor]) -> list[tuple[int, int, int]]:
        owner = {id(p): number for number, each in enumerate(self._optimizers) for p in owned_by(each)}
        found: dict[int, list[int]] = {}
        for node in graph_behind(losses):
            for leaf in (getattr(each, "variable", None) for each, _ in node.next_functions):
                if id(leaf) in owner:
                    found.setdefault(owner[id(leaf)], []).append(node._sequence_nr())
        return [(number, min(each), max(each)) for number, each in found.items()]

    def _is_after(self, number: int, turn: set[int]) -> bool:
        """Returns True if the parameters of an optimizer are applied to results of the parameters of ``turn``."""
        first = [low for each, low, _ in self._uses if each == number]
        last = [high for each, _, high in self._uses if each in turn]
        return bool(first and last) and min(first) > max(last)

    def _versions(self, numbers: set[int]) -> object:
        grads = [p.grad for number in numbers for p in owned_by(self._optimizers[number])]
        return [None if each is None else (id(each), each._version) for each in grads]

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        if self._left:
            cleared = {id(p) for p in (owned_by(owner) if isinstance(owner, Optimizer) else owner.parameters())}
            kept = [n for n in self._left if not any(id(p) in cleared for p in owned_by(self._optimizers[n]))]
            self._left = {number: self._left[number] for number in kept}

    def on_gradients(self) -> None:
        """Drops optimizers whose turn also reaches the others."""
        kept = {number: each for number, each in self._left.items() if self._versions(each[0]) == each[1]}
        self._left = kept

    def on_step(self, optimizer: Optimizer) -> None:
        number = next((n for n, each in enumerate(self._optimizers) if each is optimizer), -1)
        if number in self._left:
            _, _, versions, size = self._left.pop(number)
            self._used[number] += [size] if self._versions({number}) != versions else []
        self._stepped.add(number)
        self._turn.add(number)

    def updates(self) -> tuple[int, ...]:
        """Returns for each optimizer the number of its updates that used gradients left by another optimizer's turn."""
        return tuple(sum(float(each) > 0 for each in sizes) for sizes in self._used)


class Calls(Probe):
    """Observes all optimizers, passed to the watch or not. Nested steps are not counted."""

    name = CallsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._optimizers = watched.subject.roots, watched.subject.optimizers
        self._parameters = watched.subject.parameters
        self._found = CallsFacts(accumulation=watched.accumulation)
        self._watched = {id(each) for each in (*self._roots, *self._optimizers)}
        self._known = WeakValueDictionary({id(each): each for each in self._optimizers})
        self._stepped_at: dict[int, int] = {}
        self._depth = self._since = self._split = 0
        self._last: RecordedStep | None = None
        self._at_first = [_sample(p) for p in self._parameters[:MAX_WEIGHTS_SAMPLED]]
        self._seen: dict[int, Tensor] = {}
        self._missing: list[str] = []
        self._trainable: set[int] = set()  # some loops freeze a discriminator while they train the generator
        self._were_trained = {name for name, p in self._named().items() if was_trained(p)}
        self._modules = watched.modules
        self._left = _LeftGradients(self._optimizers)
        self._outside: dict[str, Tensor] = {}  # parameters outside of the models that a loss depends on

    def on_backward(self, losses: tuple[Tensor, ...], options: dict[str, object]) -> None:
        self._found.backwards += 1
        self._since += 1
        if self._found.backwards <= BACKWARDS_READ:
            self._find_outside(losses)
            self._trainable.update(id(p) for p in self._parameters if p.requires_grad)
        self._left.on_backward(losses)

    def on_gradients(self) -> None:
        self._left.on_gradients()

    def _find_outside(self, losses: tuple[Tensor, ...]) -> None:
        """Finds parameters of small modules, such as a loss function with weights, that are not in the models."""
        inside = {id(p) for p in self._parameters}
        leaves = leaves_among(graph_behind(losses))
        found = {id(p): p for p in leaves if isinstance(p, nn.Parameter) and id(p) not in inside}
        for module in self._modules() if found else ():
            named = list(module.named_parameters())
            if len(named) <= MAX_PARAMETERS_OUTSIDE:
                these = {f"{type(module).__name__}.{name}": p for name, p in named if id(p) in found}
                self._outside |= these
                self._were_trained |= {name for name, p in these.items() if was_trained(p)}

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        self._left.on_zero_grad(owner)
        if id(owner) in self._watched:
            self._since = self._split = 0

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._split = self._split or self._since

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        self._depth += 1
        self._known.setdefault(id(optimizer), optimizer)
        if self._depth > 1:  # called inside the step of an optimizer that wraps this one
            return
        self._left.on_step(optimizer)
        now = self._found.backwards
        same = (key for key, at in self._stepped_at.items() if at == now > 0 and key != id(optimizer))
        self._found.doubles += any(self._shares(optimizer, key) for key in same)
        self._stepped_at[id(optimizer)] = now

    def on_stepped(self, optimizer: Optimizer) -> None:
        self._depth = max(0, self._depth - 1)

    def _shares(self, optimizer: Optimizer, key: int) -> bool:
        """Returns True if the known optimizer ``key`` holds a parameter of ``optimizer`` that has a gradient."""
        held = {id(p) for p in owned_by(other)} if (other := self._known.get(key)) is not None else set()
        return any(p.grad is not None and id(p) in held for p in owned_by(optimizer))

    def on_closed(self, step: RecordedStep) -> None:
        if self._split:
            self._found.split_windows = (*self._found.split_windows[-31:], (step.step, self._split, self._since))
        self._last = step
        self._left.forget()
        self._since = self._split = self._depth = 0

    def facts(self) -> CallsFacts:
        found, named = self._found, self._named() | self._outside
        held = {id(p) for optimizer in self._known.values() for p in owned_by(optimizer)}
        missing = self._find_missing({name: p for name, p in named.items() if id(p) not in held})
        sizes = {name: p.numel() for name, p in named.items() if p.requires_grad or id(p) in held or name in missing}
        found.optimizers = tuple(map(self._about, self._optimizers))
        found.missing = tuple(missing)
        found.missing_outside = bool(missing) and set(missing) <= self._outside.keys()
        found.missing_share = sum(sizes[name] for name in missing) / max(1, sum(sizes.values()))
        found.missing_were_trained = bool(missing) and set(missing) <= self._were_trained
        found.carried = self._carried(self._last) if self._last is not None else ()
        now = map(_sample, self._parameters[:MAX_WEIGHTS_SAMPLED])
        found.moved = self._last is None and not all(map(torch.equal, now, self._at_first))
        found.with_left = self._left.updates()
        found.steps_seen = len(self._stepped_at)
        return found

    def _named(self) -> dict[str, Tensor]:
        return dict(named_parameters(self._roots))

    def _about(self, optimizer: Optimizer) -> OptimizerFacts:
        inside = {id(p) for root in self._roots for p in root.parameters()}
        held = owned_by(optimizer)
        groups = tuple(
            GroupFacts(
                parameters=len(group["params"]),
                with_grad=sum(p.grad is not None for p in group["params"]),
                lr=_number(group.get("lr")),
                initial_lr=_number(group.get("initial_lr")),
            )
            for group in optimizer.param_groups
        )
        stale = sum(id(p) not in inside and p.grad is None for p in held)
        names, mine = self._named(), set(map(id, held))
        parts = [name.split(".")[:-1] for name, p in names.items() if id(p) in mine]
        common = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts))
        return OptimizerFacts(len(held), stale, groups, ".".join(each[0] for each in common))

    def _find_missing(self, outside: dict[str, Tensor]) -> list[str]:
        """Returns names of parameters in no optimizer that have a gradient and did not change since the last call."""
        outside = {name: p for name, p in outside.items() if p.requires_grad or id(p) in self._trainable}
        graded = [p.grad for p in self._parameters if p.grad is not None] if outside else []
        largest, found = max(map(_largest, graded), default=0.0), []
        for name, p in outside.items():
            has_gradient = p.grad is not None and _largest(p.grad) > MAX_ROUNDING_RATIO * largest
            if not has_gradient and name not in self._missing:  # model.zero_grad() also drops their gradients
                continue
            before, self._seen[id(p)] = self._seen.get(id(p)), _sample(p)
            if before is not None and torch.equal(before, self._seen[id(p)]):
                found.append(name)
        self._missing = found
        return found

    def _carried(self, step: RecordedStep) -> tuple[float, ...]:
        by_id = {id(p): g for p, g in zip(self._parameters, step.values.get("carried") or ()) if g is not None}
        grads = [[by_id[id(p)] for p in owned_by(each) if id(p) in by_id] for each in self._optimizers]
        return tuple(math.sqrt(sum(float(local_part(g).float().norm()) ** 2 for g in each)) for each in grads)


class Scaler(Probe):
    """Observes whether scaled gradients are unscaled before they are clipped and applied."""

    name = ScalerFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._scaled_by: GradScaler | None = None  # the scaler of the losses whose gradients the next update uses
        self._unscaled: set[int] = set()
        self._is_raw = False
        self._optimizers = watched.subject.optimizers
        self._clip: tuple[float, Tensor | None, Tensor] | None = None  # threshold, norm and scale
        self._found, self._is_updated = ScalerFacts(), False

    def on_scaled(self, scaler: object, loss: object, scaled: object) -> None:
        if isinstance(scaler, GradScaler) and scaled is not loss:
            self._scaled_by = scaler

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._unscaled.add(id(optimizer))
        self._found.other += self._scaled_by is not None and scaler is not self._scaled_by

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        if self._scaled_by is None or not parameters or not math.isfinite(at):
            return
        holders = (each for each in self._optimizers if any(p is parameters[0] for p in owned_by(each)))
        scale = self._scaled_by._scale
        if scale is not None and id(next(holders, None)) not in {*self._unscaled, id(None)}:
            self._found.scaled_clips += 1
            self._clip = (at, None if norm is None else norm.detach(), scale.detach().clone())

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        is_raw = self._scaled_by is not None and id(optimizer) not in self._unscaled
        self._is_raw |= is_raw and getattr(optimizer, "grad_scale", None) is None

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        self._found.steps += scaler.is_enabled()
        self._unscaled.discard(id(optimizer))

    def on_scaler_update(self, scaler: GradScaler) -> None:
        self._is_updated, self._scaled_by = True, None

    def on_closed(self, step: RecordedStep) -> None:
        if self._is_raw and "edited" not in step.values and "vetoed" not in step.values:
            self._found.scaled_updates += 1
            self._found.since = self._found.since or step.step
        self._is_raw = False
        if not self._is_updated:
            self._scaled_by = None
        self._unscaled.clear()

    def facts(self) -> ScalerFacts:
        if (clip := self._clip) is not None:
            at, norm, scale = clip
            self._found.scaled_clip = ScaledClip(at, None if norm is None else float(norm), float(scale))
        return self._found


def _largest(gradient: Tensor) -> float:
    values = local_part(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return float(values.abs().max()) if values.numel() else 0.0


def _sample(parameter: Tensor) -> Tensor:
    return sampled(parameter, ELEMENTS_PER_WEIGHT)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None  # type: ignore[arg-type]
