"""The live objects of a run, and copies of their state: taken on their device, and written back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.state.rng import RngBag

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class Snapshot:
    """The state before ``step``: weights, buffers, optimizers, generators, and the plain attributes of modules."""

    step: int
    parameters: list[Tensor]
    buffers: list[Tensor | None]
    states: list[dict[int, dict[str, Any]]]
    groups: list[list[dict[str, Any]]]
    rng: RngBag
    attributes: list[dict[str, Any]]
    hooks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        tensors = [*self.parameters, *(b for b in self.buffers if b is not None)]
        tensors += [v for state in self.states for own in state.values() for v in own.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


class LiveObjects:
    """The live objects that a run is made of, and how their state is read."""

    def __init__(
        self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]
    ) -> None:
        self.roots, self.optimizers, self.parameters = list(roots), list(optimizers), list(parameters)
        self.modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._copies: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        self._own = [not type(m).__module__.startswith("torch.nn.") for m in self.modules]

    def hooks(self) -> tuple[int, ...]:
        """Number of hooks of each module, without those of the recorder."""
        of_module = [(*m._forward_pre_hooks.values(), *m._forward_hooks.values()) for m in self.modules]
        return tuple(
            [sum(not getattr(hook, "is_recorders", False) for hook in hooks) if hooks else 0 for hooks in of_module]
        )

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Where every buffer lies, in order."""
        return [(module, name) for module in self.modules for name in module._buffers]

    @torch.no_grad()
    def snapshot(self, step: int) -> Snapshot:
        """Copies everything; on the device it lies on."""
        numbers = {id(p): number for number, p in enumerate(self.parameters)}
        data = [p.detach() for p in self.parameters]
        copies = [torch.empty_like(d) for d in data]
        if copies:
            torch._foreach_copy_(copies, data)
        states = [
            {numbers[id(p)]: {k: _copied(v) for k, v in own.items()} for p, own in o.state.items() if id(p) in numbers}
            for o in self.optimizers
        ]
        groups = [
            [{k: _copied(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self.optimizers
        ]
        buffers = [_copied(module._buffers[name]) for module, name in self.buffers()]
        attributes = [self._attributes(m) if own else {} for m, own in zip(self.modules, self._own)]
        return Snapshot(step, copies, buffers, states, groups, RngBag.capture(), attributes, self.hooks())

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        """What a forward pass of one's own may count or keep; torch's own modules have no such thing."""
        attributes: dict[str, Any] = {}
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                attributes[name] = value
            elif isinstance(value, Tensor) and value.grad_fn is None:
                may_change = not value.requires_grad and not value.is_inference()
                attributes[name] = self._copy_of((id(module), name), value) if may_change else value
        return attributes

    def _copy_of(self, place: tuple[int, str], live: Tensor) -> Tensor:
        """A copy; the last one where nobody has written to the tensor since: many are tables."""
        known = self._copies.get(place)
        if known is None or known[0] is not live or known[1] != live._version:
            known = self._copies[place] = (live, live._version, live.clone())
        return known[2]


@torch.no_grad()
def put_back(subject: LiveObjects, snapshot: Snapshot) -> None:
    """Writes weights, buffers and optimizer state of ``snapshot`` into the live objects: training is there again.

    Hyperparameters, generators and the data go on as they are.
    """
    for parameter, data in zip(subject.parameters, snapshot.parameters):
        parameter.copy_(data)
    for (module, name), buffer in zip(subject.buffers(), snapshot.buffers):
        live = module._buffers[name]
        if live is not None and buffer is not None:
            live.copy_(buffer)
    for optimizer, states in zip(subject.optimizers, snapshot.states):
        for number, parameter in enumerate(subject.parameters):
            if number in states:
                optimizer.state[parameter].update({k: _copied(v) for k, v in states[number].items()})
            else:
                optimizer.state.pop(parameter, None)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value
