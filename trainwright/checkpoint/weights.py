"""Weights under the names that the model's author gave them: of a live model, whatever wraps it, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainwright.checkpoint.codec import StateDict, Tree, decode
from trainwright.checkpoint.manifest import raising_checkpoint_error, read_state, verify
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.shards import divided_like
from trainwright.errors import CheckpointError, UsageError


def unwrapped(model: nn.Module) -> nn.Module:
    """What is inside of (Distributed)DataParallel and torch.compile around the whole model, however nested."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := model._modules.get("_orig_mod"), nn.Module):
            model = compiled
        else:
            return model


def require_python(model: nn.Module) -> None:
    """Raises UsageError for a model that torch.jit made: nothing can listen to its calls, or put its state back."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"the model was made by torch.jit (a {type(model).__name__})",
            remedy="train the module that it was made from, and trace or script the trained one",
        )


def plain_state_dict(model: nn.Module, *, keep_vars: bool = False) -> StateDict:
    """The whole state_dict, buffers and extra state too, under plain names; the tensors are the live ones.

    With ``keep_vars`` they are the parameters themselves, of which a tied one is the same object under each name.
    """
    state = unwrapped(model).state_dict(keep_vars=keep_vars)
    plain = {plain_name(name): value for name, value in state.items()}
    assert len(plain) == len(state), "two keys differ in nothing but the name of a wrapper"
    return plain


def load_plain_state_dict(model: nn.Module, tensors: Mapping[str, Tree], *, is_stage: bool = False) -> None:
    """Loads what ``plain_state_dict`` gave, into a model that may be wrapped or sharded otherwise than it was then.

    ``is_stage``: it has a part of the layers, and takes what it has. Raises torch's RuntimeError with the names when
    some are missing, left over or of another shape.
    """
    inside = unwrapped(model)
    live = inside.state_dict()
    wrapped = {plain_name(name): name for name in live}
    renamed = {wrapped.get(name, name): value for name, value in tensors.items() if name in wrapped or not is_stage}
    inside.load_state_dict({name: _fitting(value, live.get(name)) for name, value in renamed.items()})


def _fitting(value: Tree, live: Tree) -> Tree:
    return divided_like(value, live) if isinstance(value, Tensor) and isinstance(live, Tensor) else value


def read_weights(checkpoint: Path, *, average: bool = False) -> StateDict:
    """The model's whole state_dict as it was saved, on the CPU: parameters, buffers and extra state.

    Tied weights are one tensor under several names. With ``average``, the average replaces every parameter that was
    trained, and the running statistics of BatchNorm where it has its own; other buffers and frozen parameters are the
    saved ones. Raises CheckpointError when the checkpoint is damaged, or holds no average.
    """
    verify(checkpoint)
    with raising_checkpoint_error(checkpoint):
        state = read_state(checkpoint)
        weights: StateDict = decode(load_file(checkpoint / "model.safetensors"), state["model"])
        if not average:
            return weights
        saved: StateDict = decode(load_file(checkpoint / "rest.safetensors"), state["rest"]["ema"])
    if not saved:
        raise CheckpointError(
            f"{checkpoint} holds no average of the weights",
            remedy="take the weights themselves; a run keeps an average with model.ema or model.swa in its recipe",
        )
    if not saved["num_updates"]:
        raise CheckpointError(
            f"{checkpoint} holds no average of the weights yet: it is older than model.swa.start",
            remedy="take the weights themselves, or a later checkpoint",
        )
    return _with_average(weights, saved["shadow"])


def _with_average(weights: StateDict, shadow: Mapping[str, Tensor]) -> StateDict:
    """An average is kept under one name of its parameter; it goes into all places of a tied one."""
    averages = {}
    for name, average in shadow.items():
        plain = plain_name(name)
        plain = plain if plain in weights else plain.removeprefix("module.")  # as (Distributed)DataParallel says it
        averages[id(weights[plain])] = average
    return {name: averages.get(id(value), value) for name, value in weights.items()}
