"""Reads and loads weights by the names in the author's model: from a checkpoint, or a model that may be wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainwright.checkpoint.codec import StateDict, Tree, decode
from trainwright.checkpoint.manifest import raising_checkpoint_error, read_state, verify
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.shards import divided_like
from trainwright.checkpoint.stored import StoredTensor, read_whole
from trainwright.checkpoint.tensor_file import open_tensors
from trainwright.errors import CheckpointError, UsageError


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside any nesting of (Distributed)DataParallel and torch.compile."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := model._modules.get("_orig_mod"), nn.Module):
            model = compiled
        else:
            return model


def fill_zeros(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Fill parameters that are all 0 with small numbers, the same in each process, and return their names.

    Gates, adapters and positions that begin at 0 have no effect until they are trained, which hides differences.
    """
    generator = torch.Generator().manual_seed(0)
    zeros = [(name, each) for name, each in named if each.is_floating_point() and each.numel() and not each.any()]
    for _, each in zeros:
        each.data.copy_(torch.randn(each.shape, generator=generator, device="cpu") * 0.02)
    return [name for name, _ in zeros]


def require_python(model: nn.Module) -> None:
    """Raise UsageError for a model made by torch.jit: its calls cannot be hooked, nor its state restored."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"the model was made by torch.jit (a {type(model).__name__})",
            remedy="train the module that it was made from, and trace or script the trained one",
        )


def plain_state_dict(model: nn.Module, *, keep_vars: bool = False) -> StateDict:
    """Return the full state_dict, including buffers and extra state, under plain names; the tensors are the live ones.

    With ``keep_vars`` the values are the parameters themselves; a tied parameter is the same object under each name.
    """
    state = unwrapped(model).state_dict(keep_vars=keep_vars)
    plain = {plain_name(name): value for name, value in state.items()}
    assert len(plain) == len(state), "two keys differ in nothing but the name of a wrapper"
    return plain


def load_plain_state_dict(model: nn.Module, tensors: Mapping[str, Tree], *, is_stage: bool = False) -> None:
    """Load the result of ``plain_state_dict`` into a model that may be wrapped or sharded differently.

    ``is_stage``: the model has part of the layers, and ignores other entries. Raises torch's RuntimeError with the
    names if entries are missing, unexpected or of another shape.
    """
    inside = unwrapped(model)
    live = inside.state_dict()
    wrapped = {plain_name(name): name for name in live}
    renamed = {wrapped.get(name, name): value for name, value in tensors.items() if name in wrapped or not is_stage}
    inside.load_state_dict({name: _fitting(value, live.get(name)) for name, value in renamed.items()})


def _fitting(value: Tree, live: Tree) -> Tree:
    if isinstance(value, Tensor | StoredTensor) and isinstance(live, Tensor):
        return divided_like(value, live)
    return read_whole(value)


def read_weights(checkpoint: Path, *, average: bool = False) -> StateDict:
    """Return the model's full saved state_dict, on the CPU: parameters, buffers and extra state.

    Tied weights are one tensor under several names. With ``average``, the average replaces every parameter that was
    trained, and the running statistics of BatchNorm if it has them; other buffers and frozen parameters are the saved
    ones. Raises CheckpointError if the checkpoint is damaged, or has no average.
    """
    verify(checkpoint)
    with raising_checkpoint_error(checkpoint):
        state = read_state(checkpoint)
        weights: StateDict = _read_once(decode(open_tensors(checkpoint, "model"), state["model"]))
        if not average:
            return weights
        saved: StateDict = read_whole(decode(open_tensors(checkpoint, "rest"), state["rest"]["ema"]))
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


def _read_once(weights: StateDict) -> StateDict:
    """Return the weights with stored tensors read. A tied weight is one tensor under several names."""
    stored = {id(each): each for each in weights.values() if isinstance(each, StoredTensor)}
    read = {key: each.whole() for key, each in stored.items()}
    return {name: read[id(each)] if id(each) in read else read_whole(each) for name, each in weights.items()}


def _with_average(weights: StateDict, shadow: Mapping[str, Tensor]) -> StateDict:
    """Insert the averages.

    An average is stored under one name of its parameter. If the parameter is tied, it replaces the weight under each
    of its names.
    """
    averages = {}
    for name, average in shadow.items():
        plain = plain_name(name)
        plain = plain if plain in weights else plain.removeprefix("module.")  # prefix of (Distributed)DataParallel
        averages[id(weights[plain])] = average
    return {name: averages.get(id(value), value) for name, value in weights.items()}
