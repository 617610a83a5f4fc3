"""The live objects of a run, and restorable copies of their state on the same device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.reach import ReachableState, hooks_of_tensors, hooks_of_the_process
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.shards import locals_of

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict)
_MAX_ENTRIES = 256
"""Longer lists count as a history and are not written to a bundle (``replay.bundle``)."""
TORCH_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass
class Snapshot:
    """The state before ``step``: weights, buffers, optimizers, generators, and all else that the step can reach.

    ``attributes`` are the plain attributes of each custom module. ``reach`` is everything else that was reached. A
    bundle (``replay.bundle``) stores the attributes only; a snapshot that was read from one has ``reach`` None.
    """

    step: int
    parameters: list[Tensor]
    buffers: list[Tensor | None]
    states: list[dict[int, dict[str, Any]]]
    groups: list[list[dict[str, Any]]]
    rng: RngBag
    attributes: list[dict[str, Any]]
    hooks: tuple[int, ...] = ()
    reach: ReachableState | None = None

    @property
    def num_bytes(self) -> int:
        own = _bytes([*self.parameters, *self.buffers], [own for state in self.states for own in state.values()])
        return own + (self.reach.num_bytes if self.reach is not None else 0)


class LiveObjects:
    """The live objects of a run, and how their state is read.

    ``further`` are other objects that a step uses, such as arguments of the model; their contents are part of the
    state.
    """

    def __init__(
        self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]
    ) -> None:
        self.roots = list(roots)
        self.optimizers = list(optimizers)
        self.parameters = list(parameters)
        self.modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self.further: dict[int, object] = {}
        self.is_replay_compared = False
        self._own = [not type(m).__module__.startswith("torch.nn.") for m in self.modules]
        scripted = [type(m).__name__ for m in self.modules if isinstance(m, torch.jit.ScriptModule)]
        self._closed = f"a part of the model was made by torch.jit ({scripted[0]})" if scripted else None

    def hooks(self) -> tuple[int, ...]:
        """Return the number of forward hooks and pre-hooks of each module, without those of the recorder."""
        of_module = [(*m._forward_pre_hooks.values(), *m._forward_hooks.values()) for m in self.modules]
        return tuple(
            [sum(not getattr(hook, "is_recorders", False) for hook in hooks) if hooks else 0 for hooks in of_module]
        )

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Return (module, name) of every buffer, in order."""
        return [(module, name) for module in self.modules for name in module._buffers.keys()]  # noqa: SIM118  torch.jit

    @property
    def is_closed(self) -> str | None:
        """The reason for which no state can be stored and restored; None if it can."""
        return self._closed

    def close(self, why: str) -> None:
        """Stop storing state, because something cannot be restored."""
        self._closed = self._closed or why

    @property
    def num_bytes(self) -> int:
        """Current bytes of the weights, buffers and optimizer states."""
        buffers = [module._buffers[name] for module, name in self.buffers()]
        return _bytes([*self.parameters, *buffers], [own for o in self.optimizers for own in o.state.values()])

    def reach(self, *, is_brief: bool = False) -> ReachableState:
        """Capture everything that a step can reach, except weights, buffers and the state of optimizers."""
        roots: list[tuple[str, object]] = [(type(root).__name__, root) for root in self.roots]
        roots += [(type(each).__name__, each) for each in self.optimizers]
        roots += [*hooks_of_the_process(), *hooks_of_tensors(self.parameters)]
        roots += [(type(each).__name__, each) for each in self.further.values()]
        known: list[object] = [*self.parameters, *(module._buffers[name] for module, name in self.buffers())]
        for each in self.optimizers:
            known.append(each.state)
            _sort(each.state.values(), known, roots)
        return ReachableState(roots, known, is_brief=is_brief)

    @torch.no_grad()
    def snapshot(self, step: int, *, with_reach: bool = True) -> Snapshot:
        """Copy weights, buffers, optimizer states and generators. Tensors stay on their device.

        ``with_reach``: also copy the other state that a step can reach, which a replay needs.
        """
        numbers = {id(p): number for number, p in enumerate(self.parameters)}
        data = [p.detach() for p in self.parameters]
        copies = [torch.empty_like(d) for d in data]
        if copies:
            torch._foreach_copy_(locals_of(copies), locals_of(data))
        states = [
            {numbers[id(p)]: {k: copied(v) for k, v in own.items()} for p, own in o.state.items() if id(p) in numbers}
            for o in self.optimizers
        ]
        groups = [
            [{k: copied(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self.optimizers
        ]
        buffers = [copied(module._buffers[name]) for module, name in self.buffers()]
        reach = self.reach(is_brief=True) if with_reach else ReachableState(())
        if reach.gaps:
            self.close(reach.gaps[0])
        attributes = [_plain_attributes(reach, m) if own else {} for m, own in zip(self.modules, self._own)]
        return Snapshot(step, copies, buffers, states, groups, RngBag.capture(), attributes, self.hooks(), reach)


def _sort(values: Iterable[Any], known: list[object], others: list[tuple[str, object]]) -> None:
    """Add the plain containers and tensors in an optimizer's state to ``known``, and other objects to ``others``."""
    for value in values:
        if type(value) in (list, tuple, dict):
            known.append(value)
            _sort(value.values() if isinstance(value, dict) else value, known, others)
        elif isinstance(value, Tensor):
            known.append(value)
        else:
            others.append(("the state of the optimizer", value))


def _plain_attributes(reach: ReachableState, module: nn.Module) -> dict[str, Any]:
    def captured(live: Tensor) -> Tensor:
        copy = None if live.requires_grad else reach.saved_data(live)
        return live if copy is None else copy

    return {
        name: tree_map_only(Tensor, captured, value)
        for name, value in reach.saved_attributes(module).items()
        if is_plain(name, value)
    }


def _bytes(tensors: Sequence[Tensor | None], states: Sequence[Mapping[str, Any]]) -> int:
    state_tensors = [value for own in states for value in own.values() if isinstance(value, Tensor)]
    return sum([t.numel() * t.element_size() for t in (*tensors, *state_tensors) if t is not None])


def is_plain(name: str, value: object) -> bool:
    """Return True if an attribute is a number, a string, a tensor, or a short list, tuple or dict of these."""
    if isinstance(value, _CONTAINERS) and (name in TORCH_MODULE_ATTRIBUTES or len(value) > _MAX_ENTRIES):
        return False
    return all(type(each) in _PLAIN or isinstance(each, Tensor) for each in entries_of(value))


def entries_of(value: object) -> list[object]:
    """Return the entries of a list or tuple, or the keys and values of a dict; any other value is its only entry."""
    if type(value) is dict:
        return [*value, *value.values()]
    return [*value] if type(value) is list or type(value) is tuple else [value]


@torch.no_grad()
def put_back(subject: LiveObjects, snapshot: Snapshot) -> None:
    """Write weights, buffers and optimizer state of ``snapshot`` into the live objects.

    Hyperparameters, generators and the data continue unchanged.
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
                optimizer.state[parameter].update({k: copied(v) for k, v in states[number].items()})
            else:
                optimizer.state.pop(parameter, None)


def copied(value: Any) -> Any:
    """Copy the tensors and plain containers in a value, because a step may change them in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is list or type(value) is tuple:
        return type(value)([copied(each) for each in value])
    return {key: copied(each) for key, each in value.items()} if type(value) is dict else value
