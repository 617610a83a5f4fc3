"""Sets the state of live objects aside during a replay, and restores it afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.isolation import NotIsolated, isolated, not_compiled
from trainwright.checkpoint.reach import ReachableState
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.snapshot import LiveObjects, Snapshot, copied
from trainwright.recorder.hooks import muted
from trainwright.recorder.ranks import COMMUNICATES, has_others, local_part
from trainwright.recorder.user_types import Args, Kwargs

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operators of torch's communication library."""


class NotReplayable(Exception):
    """A step cannot be replayed. The message has the reason."""


@contextmanager
def staged(subject: LiveObjects, snapshot: Snapshot) -> Iterator[ReachableState]:
    """Context in which the live objects have the state of ``snapshot``. They are restored afterwards.

    Parameters refer to copies of their data, so the original data is not written to. Yields the current reachable
    state, which is restored. The states before and after the first replay are compared. If they differ, or if something
    cannot be restored, this and all later calls raise NotReplayable.
    """
    _require_same(subject, snapshot)
    if subject.is_closed is not None:
        raise NotReplayable(subject.is_closed)
    is_first, subject.is_replay_compared = not subject.is_replay_compared, True
    before = _visible_state(subject) if is_first else {}
    with muted(), preserved_rng(), not_compiled(), with_autograd():
        now = subject.reach()
        if snapshot.reach is not None:
            now.include_parts_of(snapshot.reach)
        try:
            with isolated(now), ExitStack() as undo:
                _set_aside(subject, undo)
                _load(subject, snapshot)
                if has_others():
                    undo.enter_context(_Alone())  # type: ignore[no-untyped-call]
                yield now
        except NotIsolated as error:
            subject.close(str(error))
            raise NotReplayable(str(error)) from error
    if is_first:
        now_visible = _visible_state(subject)
        moved = [what for what, value in before.items() if not _is_same(value, now_visible[what])]
        if moved:
            subject.close(f"a replay has changed {moved[0]}")
            raise NotReplayable(f"a replay has changed {moved[0]}")


def _visible_state(subject: LiveObjects) -> dict[str, object]:
    """Returns copies of all state that training continues with, by name."""
    now = subject.snapshot(0, with_reach=False)
    return {
        "weights": now.parameters,
        "gradients": [copied(parameter.grad) for parameter in subject.parameters],
        "buffers": now.buffers,
        "the state of an optimizer": [now.states, now.groups],
        "random generators": now.rng,
        "modes of modules": [module.training for module in subject.modules],
        "hooks": subject.hooks(),
    }


def _is_same(one: object, other: object) -> bool:
    """Returns True if two copies of a state have the same bits. NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = local_part(one), local_part(other)
        if one.layout != torch.strided or one.is_quantized or one.is_nested:
            return True  # torch cannot compare them
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return _is_same(vars(one), vars(other))
    return True if one is other else bool(one == other)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Context with autograd, even if the loop is inside no_grad or inference_mode."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before a collective, because the other processes take no part in a replay."""

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if function.namespace in _COMMUNICATION:
            raise NotReplayable(f"{COMMUNICATES} ({function})")
        return function(*args, **(kwargs or {}))


def _require_same(subject: LiveObjects, snapshot: Snapshot) -> None:
    """Raises if the model or an optimizer has new modules or parameters, which a replay would not restore."""
    modules = {id(m): m for root in subject.roots for m in root.modules()}
    parameters = [p for root in subject.roots for p in root.parameters()]
    parameters += [p for o in subject.optimizers for group in o.param_groups for p in group["params"]]
    known = {id(p) for p in subject.parameters}
    if modules.keys() != {id(m) for m in subject.modules} or any(id(p) not in known for p in parameters):
        raise NotReplayable("the model or the optimizer has other modules or parameters than when the watch began")
    if snapshot.hooks and subject.hooks() != snapshot.hooks:
        raise NotReplayable("the model has other hooks than it had in this step")


def _set_aside(subject: LiveObjects, undo: ExitStack) -> None:
    for parameter in subject.parameters:
        undo.callback(setattr, parameter, "grad", parameter.grad)
        undo.callback(_point, parameter, parameter.data)
        undo.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.grad = None


def _load(subject: LiveObjects, snapshot: Snapshot) -> None:
    for parameter, data in zip(subject.parameters, snapshot.parameters):
        parameter.data = data.clone()
    if snapshot.reach is None:  # the snapshot was read from a bundle
        _load_attributes(subject, snapshot)
    elif lost := snapshot.reach.put_back():
        raise NotIsolated(f"{lost[0]} has changed and cannot be put back")
    for (module, name), buffer in zip(subject.buffers(), snapshot.buffers):
        module._buffers[name] = None if buffer is None else buffer.clone()
    for optimizer, state, groups in zip(subject.optimizers, snapshot.states, snapshot.groups):
        fresh_state: Any = type(optimizer.state)(dict)
        for number, own in state.items():
            fresh_state[subject.parameters[number]] = {k: copied(v) for k, v in own.items()}
        optimizer.state = fresh_state
        for group, kept in zip(optimizer.param_groups, groups):
            group.update({k: copied(v) for k, v in kept.items()})
    snapshot.rng.restore()


def _load_attributes(subject: LiveObjects, snapshot: Snapshot) -> None:
    """Loads clones of attributes, because a forward pass may write to them. A trained tensor is the live one."""
    clones: dict[int, Tensor] = {}

    def cloned(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return tensor
        if id(tensor) not in clones:  # two attributes may refer to one tensor
            clones[id(tensor)] = tensor.clone()
        return clones[id(tensor)]

    for module, attributes in zip(subject.modules, snapshot.attributes):
        for name, value in attributes.items():
            live, then = vars(module).get(name), tree_map_only(Tensor, cloned, value)
            if type(live) is type(then) and isinstance(live, list | dict):
                _refill(live, then)  # other code may refer to this container
            else:
                vars(module)[name] = then


def _point(parameter: Tensor, data: Tensor) -> None:
    parameter.grad = None  # a gradient of another dtype would not fit
    parameter.data = data


def _refill(live: Any, before: Any) -> None:
    live.clear()
    if isinstance(live, list):
        live.extend(before)
    else:
        live.update(before)
