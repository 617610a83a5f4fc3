"""Saves optimizer state by parameter name, so that it can be loaded after groups or frozen parameters changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import ChainedOptimizer
from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.shards import divided_like
from trainwright.checkpoint.stored import StoredTensor, read_whole
from trainwright.checkpoint.weights import unwrapped

_SET_BY_RECIPE = ("lr", "weight_decay", "betas", "momentum", "eps", "nesterov", "initial_lr")


def moments(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """Return the optimizer's ``state`` and ``param_groups`` by parameter name, its class and its defaults.

    A parameter that does not belong to the model is named by its position: ``#3``. With several optimizers, the
    classes, the defaults and the state that belongs to no parameter are stored in the order of the optimizers. The
    stored learning rate is the base one. The scheduled one follows from the step.
    """
    if isinstance(optimizer, ChainedOptimizer):
        return _joined([moments(model, part) for part in optimizer.parts])
    saved, names = optimizer.state_dict(), parameter_names(model, optimizer)
    groups = [{**_unscheduled(group), "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    state = {names[i]: each for i, each in saved["state"].items() if isinstance(i, int)}
    own = {key: each for key, each in saved["state"].items() if not isinstance(key, int)}
    parts = {"state": state, "own": own, "param_groups": groups}
    return {"class": type(optimizer).__name__, "built": _built(optimizer), **parts}


def load_moments(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Tree]) -> None:
    """Load the result of ``moments``. Options that a recipe sets keep the values that the optimizer was built with.

    A parameter that was not trained before starts without moments; moments of a parameter that is no longer trained are
    dropped. The base learning rate is the group's ``lr``; the schedule continues from the current step.

    Raises:
        ValueError: The state is from another optimizer class.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for part, saved_part in zip(optimizer.parts, _parted(saved), strict=True):
            load_moments(model, part, saved_part)
        return
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"it holds the state of {saved['class']}, not of {type(optimizer).__name__}")
    names, fresh = parameter_names(model, optimizer), optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = {
        name: _divided(saved["state"][name], parameter)
        for name, parameter in zip(names, parameters, strict=True)
        if name in saved["state"]
    }
    state = {i: by_name[name] for i, name in enumerate(names) if name in by_name} | saved["own"]
    built = _built(optimizer)
    groups = [_continued(group, [names[i] for i in group["params"]], saved, built) for group in fresh["param_groups"]]
    before = dict(optimizer.state)  # a constructor may have created buffers already
    optimizer.load_state_dict({**fresh, "state": state, "param_groups": groups})
    for parameter, name in zip(parameters, names, strict=True):
        if name in by_name:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], by_name[name], parameter)
        elif parameter in before:
            optimizer.state[parameter] = before[parameter]


def _joined(parts: Sequence[StateDict]) -> StateDict:
    state = {name: own for part in parts for name, own in part["state"].items()}
    groups = [group for part in parts for group in part["param_groups"]]
    built, own = ({str(number): part[key] for number, part in enumerate(parts)} for key in ("built", "own"))
    names = " + ".join(part["class"] for part in parts)
    return {"class": names, "built": built, "state": state, "own": own, "param_groups": groups}


def _parted(saved: Mapping[str, Tree]) -> Iterator[StateDict]:
    for number, name in enumerate(saved["class"].split(" + ")):
        yield {**saved, "class": name, "built": saved["built"][str(number)], "own": saved["own"][str(number)]}


def _divided(saved: Tree, parameter: Tensor) -> Tree:
    """Return the state. If ranks divide the parameter, tensors of its size are cut to the part of this rank."""
    if isinstance(saved, Tensor | StoredTensor):
        return divided_like(saved, parameter)
    if isinstance(saved, Mapping):
        return {key: _divided(each, parameter) for key, each in saved.items()}
    return read_whole(saved)


def _as_saved(loaded: Tree, saved: Tree, parameter: Tensor) -> Tree:
    """Return the saved state in its saved dtype, on the device to which torch loaded it.

    torch casts the state to the dtype of its parameter, and a file does not store the memory layout, but fused kernels
    expect moments with the strides of their parameter. The result is a copy, so that no file stays mapped into memory.
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
    """Return the name of each parameter of the optimizer, in the order of its groups."""
    known = {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"#{i}") for i, parameter in enumerate(parameters)]


def _continued(group: Mapping[str, Tree], names: list[str], saved: Mapping[str, Tree], built: StateDict) -> StateDict:
    """Return the group as built, with the counters of the saved group that has the same parameters.

    Counters cannot be told from options by their names, so all saved values are used, except for options that a recipe
    sets, and options that the user has changed since the save.
    """
    before: StateDict = next((each for each in saved["param_groups"] if not set(names).isdisjoint(each["params"])), {})
    changed = {key for key, value in built.items() if value != saved["built"].get(key, value)}
    kept = {key: value for key, value in before.items() if key not in {*_SET_BY_RECIPE, *changed, "params"}}
    return {**_unscheduled(group), **kept}


def _unscheduled(group: Mapping[str, Tree]) -> StateDict:
    """Return the group with the learning rate before the first step, which schedulers of torch store."""
    base = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
    return {**{key: value for key, value in group.items() if key != "initial_lr"}, **base}


def _built(optimizer: Optimizer) -> StateDict:
    """Return the optimizer's default options that are plain values."""
    plain = (bool, int, float, str, tuple, type(None))
    options = {key: value for key, value in optimizer.defaults.items() if isinstance(value, plain)}
    options.pop("differentiable", None)  # torch adds it on load
    return options
