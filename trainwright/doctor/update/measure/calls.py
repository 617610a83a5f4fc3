"""Which optimizer owns which weight, and whether backward, unscale, clip and step come in the right order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.doctor.measure.weights import was_trained
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import Args, Kwargs, Loader, TorchFunction
from trainwright.runlog.json_values import Event, Facts
from trainwright.state.names import named_parameters

ROUNDED = 1e-5
"""Of the largest gradient: in float32 a sum of a few thousand parts that should be 0 comes to less."""
SAMPLE = 16
"""Elements of a weight that are compared to see whether it has changed."""

HYPERPARAMETERS = ("lr", "initial_lr", "weight_decay", "momentum")
"""Those of a parameter group that are reported."""


@probe
class Contract(Probe):
    """Also records optimizers that the watch was not called with. A step inside of another one is not counted."""

    name = "contract"
    closes_late = hears_last = True
    rests = frozenset({"on_backward", "on_zero_grad", "on_clip", "on_step", "on_stepped"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._optimizers = watched.subject.roots, watched.subject.optimizers
        self._parameters = watched.subject.parameters
        self._declared = watched.accumulation
        self._ours = {id(each) for each in (*self._roots, *self._optimizers)}
        self._owners: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()  # a loop may make one in every step
        self._held: dict[int, list[int]] = {}  # by optimizer: its parameters
        self._holders: defaultdict[int, list[int]] = defaultdict(list)  # by parameter: the optimizers that own it
        self._sharing: dict[int, list[tuple[int, list[Tensor]]]] = {}
        self._stepped_at: dict[int, int] = {}
        for each in self._optimizers:
            self._hold(each)
        self._depth = self._backwards = self._since = self._doubles = self._again = 0
        self._scale: Tensor | None = None  # of losses whose gradients were not unscaled yet
        self._unscaled: set[int] = set()
        self._scaled_clips: list[tuple[float, Tensor | None, Tensor]] = []
        self._num_scaled_clips = self._num_clips = 0
        self._split = 0
        self._windows: list[list[int]] = []
        self._last: RecordedStep | None = None
        self._at_first = {id(p): _sample(p) for p in self._parameters[:64]}
        self._seen: dict[int, Tensor] = {}
        self._known_missing: list[str] = []
        self._were_trained = {name for name, p in _named(self._roots).items() if was_trained(p)}

    # the order of things

    def on_woken(self, events: Sequence[Event]) -> None:
        for kind, _ in events:
            self._since = 0 if kind == "zero_grad" else self._since + (kind == "backward")
            self._backwards += kind == "backward"

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._backwards += 1
        self._since += 1

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        if id(owner) in self._ours:
            self._since = self._split = 0

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._split = self._split or self._since

    def on_scaled(self, scaler: object, loss: object, scaled: object) -> None:
        if scaled is not loss:
            self._scale = scaler._scale if isinstance(scaler, GradScaler) else None

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._unscaled.add(id(optimizer))

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        self._unscaled.discard(id(optimizer))

    def on_scaler_update(self, scaler: GradScaler) -> None:
        self._scale = None

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        self._num_clips += 1
        if self._scale is None or not parameters or not math.isfinite(at):
            return
        owner = next((key for key, each in self._owners.items() if _owns(each, parameters[0])), None)
        if owner is not None and owner not in self._unscaled:
            self._num_scaled_clips += 1
            found = None if norm is None else norm.detach()
            self._scaled_clips = [*self._scaled_clips[-1:], (at, found, self._scale.detach().clone())]

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimizer that is built on another
            self._owners.setdefault(id(optimizer), optimizer)
            return
        if id(optimizer) not in self._owners:
            self._hold(optimizer)
        if self._backwards and self._stepped_at.get(id(optimizer)) == self._backwards:
            self._again += 1
        for other, shared in self._shared_with(optimizer) if len(self._owners) > 1 else ():
            same = self._backwards and self._stepped_at.get(other) == self._backwards
            self._doubles += bool(same and any(p.grad is not None for p in shared))
        self._stepped_at[id(optimizer)] = self._backwards

    def on_stepped(self, optimizer: Optimizer) -> None:
        self._depth = max(0, self._depth - 1)

    def _hold(self, optimizer: Optimizer) -> None:
        for gone in self._held.keys() - self._owners.keys():
            for p in self._held.pop(gone):
                self._holders[p].remove(gone)
                if not self._holders[p]:
                    del self._holders[p]
            self._stepped_at.pop(gone, None)
        self._sharing.clear()
        self._owners[id(optimizer)] = optimizer
        self._held[id(optimizer)] = [id(p) for p in owned_by(optimizer)]
        for p in self._held[id(optimizer)]:
            self._holders[p].append(id(optimizer))

    def _shared_with(self, optimizer: Optimizer) -> list[tuple[int, list[Tensor]]]:
        """The other optimizers that own some of its parameters, and these."""
        key = id(optimizer)
        if key not in self._sharing:
            shared: defaultdict[int, list[Tensor]] = defaultdict(list)
            for p in owned_by(optimizer):
                for other in self._holders.get(id(p), ()):
                    if other != key:
                        shared[other].append(p)
            self._sharing[key] = [*shared.items()]
        return self._sharing[key]

    def on_closed(self, step: RecordedStep) -> None:
        if self._split:
            self._windows = [*self._windows[-31:], [step.step, self._split, self._since]]
        self._since = self._split = self._depth = 0  # of a step that is heard in part
        self._last = step

    # the facts

    def values(self) -> Facts | None:
        missing = self._missing()
        facts: Facts = {
            "optimizers": [self._about(optimizer) for optimizer in self._optimizers],
            "missing": missing,
            "missing_share": self._share(missing),
            "missing_were_trained": bool(missing) and set(missing) <= self._were_trained,
            "doubles": self._doubles,
            "again": self._again,
            "clips": self._num_clips,
            "scaled_clips": self._num_scaled_clips,
            "scaled_clip": [_plain(each) for each in self._scaled_clips[-1]] if self._scaled_clips else None,
            "split_windows": self._windows,
            "accumulation": self._declared,
        }
        if self._last is None:
            moved = [not torch.equal(_sample(p), self._at_first[id(p)]) for p in self._parameters[:64]]
            facts |= {"backwards": self._backwards, "moved": any(moved), "steps_heard": len(self._stepped_at)}
        else:
            facts["carried"] = self._carried(self._last)
        return facts

    def _about(self, optimizer: Optimizer) -> Facts:
        inside = {id(p) for root in self._roots for p in root.parameters()}
        stale = [p for p in owned_by(optimizer) if id(p) not in inside and p.grad is None]
        groups = []
        for group in optimizer.param_groups:
            numbers = {k: float(group[k]) for k in HYPERPARAMETERS if _is_number(group, k)}
            with_grad = [p for p in group["params"] if p.grad is not None]
            groups.append(numbers | {"parameters": len(group["params"]), "with_grad": len(with_grad)})
        return {
            "kind": type(optimizer).__name__,
            "parameters": len(owned_by(optimizer)),
            "stale": len(stale),
            "groups": groups,
        }

    def _missing(self) -> list[str]:
        """Names of parameters with a gradient that no optimizer has, and that did not change since the last checkup."""
        owned = {id(p) for optimizer in self._owners.values() for p in owned_by(optimizer)}
        found = []
        for name, p in _named(self._roots).items():
            if id(p) in owned or not p.requires_grad:
                continue
            # it gets one, or got one: model.zero_grad() drops theirs too
            gets = p.grad is not None and not _largest(p.grad) <= ROUNDED * self._largest_gradient()
            if not gets and name not in self._known_missing:
                continue
            before, self._seen[id(p)] = self._seen.get(id(p)), _sample(p)
            if before is not None and torch.equal(before, self._seen[id(p)]):
                found.append(name)
        self._known_missing = found
        return found

    def _largest_gradient(self) -> float:
        """Of all elements. A gradient that is far smaller everywhere is 0 but for rounding: a bias before a norm."""
        return max((_largest(p.grad) for p in self._parameters if p.grad is not None), default=0.0)

    def _share(self, missing: list[str]) -> float:
        """The share of the missing parameters in all trainable ones, by elements."""
        sizes = {name: p.numel() for name, p in _named(self._roots).items() if p.requires_grad}
        return sum(sizes[name] for name in missing) / max(1, sum(sizes.values()))

    def _carried(self, step: RecordedStep) -> list[float]:
        """For each optimizer the norm of the gradients that existed before the first backward pass of the step."""
        by_id = {id(p): g for p, g in zip(self._parameters, step.values.get("carried") or ()) if g is not None}
        norms = []
        for optimizer in self._optimizers:
            grads = [by_id[id(p)] for p in owned_by(optimizer) if id(p) in by_id]
            norms.append(math.sqrt(sum(float(own_part(g).float().norm()) ** 2 for g in grads)))
        return norms


def _largest(gradient: Tensor) -> float:
    values = own_part(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return float(values.abs().max()) if values.numel() else 0.0


def _owns(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(p is parameter for p in owned_by(optimizer))


def _named(roots: list[nn.Module]) -> dict[str, Tensor]:
    return dict(named_parameters(roots))


def _sample(parameter: Tensor) -> Tensor:
    """Elements from all over the parameter: some of them may happen to have no gradient."""
    flat = own_part(parameter.detach()).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _is_number(group: Facts, key: str) -> bool:
    return isinstance(group.get(key), int | float) or (isinstance(group.get(key), Tensor) and group[key].numel() == 1)


def _plain(value: Tensor | float | None) -> float | None:
    return None if value is None else float(value)
