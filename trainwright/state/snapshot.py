"""The live objects of a run, and copies of their state: taken on their device, and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainwright.state.rng import RngBag
from trainwright.state.shards import locals_of

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict)
_MOST_ENTRIES = 256
"""A longer list is a history, which would be copied at every snapshot."""
TORCHS_OWN = frozenset(vars(nn.Module()))


@dataclass
class Snapshot:
    """The state before ``step``: weights, buffers, optimizers, generators, and plain attributes of modules."""

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
        return _bytes([*self.parameters, *self.buffers], [own for state in self.states for own in state.values()])


class LiveObjects:
    """The live objects that a run is made of, and how their state is read."""

    def __init__(
        self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]
    ) -> None:
        self.roots, self.optimizers, self.parameters = list(roots), list(optimizers), list(parameters)
        self.modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._copies: dict[int, _TensorCopy] = {}
        self._own = [not type(m).__module__.startswith("torch.nn.") for m in self.modules]

    def hooks(self) -> tuple[int, ...]:
        """Number of hooks of each module, without those of the recorder."""
        of_module = [(*m._forward_pre_hooks.values(), *m._forward_hooks.values()) for m in self.modules]
        return tuple(
            [sum(not getattr(hook, "is_recorders", False) for hook in hooks) if hooks else 0 for hooks in of_module]
        )

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Where every buffer lies, in order."""
        return [(module, name) for module in self.modules for name in module._buffers.keys()]  # noqa: SIM118  torch.jit

    @property
    def is_closed(self) -> str | None:
        """Why no state can be set aside and put back; None: it can."""
        scripted = [type(m).__name__ for m in self.modules if isinstance(m, torch.jit.ScriptModule)]
        return f"a part of the model was made by torch.jit ({scripted[0]})" if scripted else None

    @property
    def num_bytes(self) -> int:
        """What a snapshot takes as things are."""
        buffers = [module._buffers[name] for module, name in self.buffers()]
        return _bytes([*self.parameters, *buffers], [own for o in self.optimizers for own in o.state.values()])

    @torch.no_grad()
    def snapshot(self, step: int) -> Snapshot:
        """Copies everything; on the device it lies on."""
        numbers = {id(p): number for number, p in enumerate(self.parameters)}
        data = [p.detach() for p in self.parameters]
        copies = [torch.empty_like(d) for d in data]
        if copies:
            torch._foreach_copy_(locals_of(copies), locals_of(data))
        states = [
            {numbers[id(p)]: {k: _copied(v) for k, v in own.items()} for p, own in o.state.items() if id(p) in numbers}
            for o in self.optimizers
        ]
        groups = [
            [{k: _copied(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self.optimizers
        ]
        buffers = [_copied(module._buffers[name]) for module, name in self.buffers()]
        known, self._copies = self._copies, {}
        attributes = [self._attributes(m, known) if own else {} for m, own in zip(self.modules, self._own)]
        return Snapshot(step, copies, buffers, states, groups, RngBag.capture(), attributes, self.hooks())

    def _attributes(self, module: nn.Module, known: Mapping[int, _TensorCopy]) -> dict[str, Any]:
        """Copies the plain attributes, which the forward pass of a user's module may change."""

        def copied(live: Tensor) -> Tensor:
            if live.requires_grad or live.is_inference():
                return live
            copy = known.get(id(live))
            if copy is None or copy.live is not live or copy.version != live._version:
                copy = _TensorCopy(live, live._version, live.clone())
            return self._copies.setdefault(id(live), copy).copy

        return {
            name: tree_map_only(Tensor, copied, value)
            for name, value in vars(module).items()
            if is_plain(name, value)
            and not any(isinstance(each, Tensor) and each.grad_fn is not None for each in entries_of(value))
        }


def _bytes(tensors: Sequence[Tensor | None], states: Sequence[Mapping[str, Any]]) -> int:
    of_states = [value for own in states for value in own.values() if isinstance(value, Tensor)]
    return sum([t.numel() * t.element_size() for t in (*tensors, *of_states) if t is not None])


class _TensorCopy(NamedTuple):
    """A copy of a tensor, good until somebody writes to the tensor: many are tables that nobody writes to."""

    live: Tensor
    version: int
    copy: Tensor


def is_plain(name: str, value: object) -> bool:
    """Whether an attribute of a module is a number, a string, a tensor, or a short list, tuple or dict of these."""
    if isinstance(value, _CONTAINERS) and (name in TORCHS_OWN or len(value) > _MOST_ENTRIES):
        return False
    return all(type(each) in _PLAIN or isinstance(each, Tensor) for each in entries_of(value))


def entries_of(value: object) -> list[object]:
    """What a list or tuple holds, the keys and values of a dict; anything else is the only entry."""
    if type(value) is dict:
        return [*value, *value.values()]
    return [*value] if type(value) is list or type(value) is tuple else [value]


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
