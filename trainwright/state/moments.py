"""Optimizer state by parameter name, so that it finds its parameters again when groups or frozen ones changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.state.codec import StateDict, Tree
from trainwright.state.weights import plain_name, unwrapped

Plain = StateDict
_SET_BY_RECIPE = ("lr", "weight_decay", "betas", "momentum", "eps", "nesterov", "initial_lr")


def moments(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """The optimizer's ``state`` and ``param_groups`` with names where torch has positions; its class; how it was built.

    A parameter that is none of the model's is named by its position, as ``#3``.
    """
    saved, names = optimizer.state_dict(), parameter_names(model, optimizer)
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    state = {names[i]: each for i, each in saved["state"].items() if isinstance(i, int)}
    own = {key: each for key, each in saved["state"].items() if not isinstance(key, int)}
    parts = {"state": state, "own": own, "param_groups": groups}
    return {"class": type(optimizer).__name__, "built": _built(optimizer), **parts}


def load_moments(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Tree]) -> None:
    """Puts what ``moments`` gave back; what a recipe sets stays as the optimizer was built.

    A parameter that was not trained before begins without moments, and moments of one that no longer is are
    dropped. The base learning rate is taken anew from ``lr``; the schedule goes on from the step that is reached.
    Raises ValueError for the state of another optimizer.
    """
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"it holds the state of {saved['class']}, not of {type(optimizer).__name__}")
    names, fresh = parameter_names(model, optimizer), optimizer.state_dict()
    state = {i: saved["state"][name] for i, name in enumerate(names) if name in saved["state"]} | saved["own"]
    built = _built(optimizer)
    groups = [_continued(group, [names[i] for i in group["params"]], saved, built) for group in fresh["param_groups"]]
    before = dict(optimizer.state)  # an optimizer may have been given buffers to begin with
    optimizer.load_state_dict({**fresh, "state": state, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, name in zip(parameters, names, strict=True):
        if name in saved["state"]:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(loaded, saved["state"][name], parameter)
        elif parameter in before:
            optimizer.state[parameter] = before[parameter]


def _as_saved(loaded: Tree, saved: Tree, parameter: Tensor) -> Tree:
    """State as it was, where torch has put it.

    torch casts it to the type of its parameter, and a file forgets how its memory was laid out: fused kernels take
    moments to lie as their parameter does. Copied, so that no file stays mapped into memory.
    """
    if isinstance(saved, Tensor):
        like = parameter if saved.shape == parameter.shape else saved
        return torch.empty_like(like, dtype=saved.dtype, device=loaded.device, requires_grad=False).copy_(saved)
    if isinstance(saved, Mapping):
        return {key: _as_saved(loaded[key], each, parameter) for key, each in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_as_saved(one, each, parameter) for one, each in zip(loaded, saved, strict=True))
    return loaded


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order of its groups."""
    known = {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"#{i}") for i, parameter in enumerate(parameters)]


def _continued(group: Mapping[str, Tree], names: list[str], saved: Mapping[str, Tree], built: Plain) -> StateDict:
    """A group as it was built, with the counters that an optimizer kept in the group of the same parameters.

    Counters cannot be told from options by name; but an option that was built otherwise this time was asked for.
    """
    before: Plain = next((each for each in saved["param_groups"] if not set(names).isdisjoint(each["params"])), {})
    asked = {key for key, value in built.items() if value != saved["built"].get(key, value)}
    kept = {key: value for key, value in before.items() if key not in {*_SET_BY_RECIPE, *asked, "params"}}
    base = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # it has trained: its rate is a scheduled one
    return {**{key: value for key, value in group.items() if key != "initial_lr"}, **base, **kept}


def _built(optimizer: Optimizer) -> Plain:
    """What the optimizer was constructed with, where that is a plain value."""
    plain = (bool, int, float, str, tuple, type(None))
    options = {key: value for key, value in optimizer.defaults.items() if isinstance(value, plain)}
    options.pop("differentiable", None)  # torch adds it when it loads
    return options
