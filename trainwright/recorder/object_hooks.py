"""Wrappers of calls that set modes and seeds, and get, save or load states. Each calls the listeners."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn

from trainwright.recorder.listener import has_listeners, inside, tell
from trainwright.recorder.user_types import TorchFunction


def _outermost(event: str, arguments: Callable[..., tuple[object, ...]]) -> Callable[[TorchFunction], TorchFunction]:
    """Makes a wrapper that reports ``event``. ``arguments`` maps the call's result and arguments to those of the event.

    Only the outermost call is reported, because a module calls the same method of its children.
    """

    def wrap(original: TorchFunction) -> TorchFunction:
        def call(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or inside.objects or not has_listeners():
                return original(*args, **kwargs)
            inside.enter("objects")
            try:
                result = original(*args, **kwargs)
            finally:
                inside.leave("objects")
            tell(event, *arguments(result, *args, **kwargs))
            return result

        return call

    return wrap


def _mode(result: object, module: nn.Module, mode: bool = True) -> tuple[object, ...]:
    return module, mode


def _state(result: object, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, ...]:
    return module, result


def _loaded(
    result: object, module: nn.Module, state_dict: object, *args: object, **kwargs: object
) -> tuple[object, ...]:
    return module, state_dict


def _saved(result: object, obj: object, *args: object, **kwargs: object) -> tuple[object, ...]:
    return (obj,)


def _seeded(generator: str, *, is_restored: bool) -> Callable[[TorchFunction], TorchFunction]:
    return _outermost("on_seeded", lambda *_, **__: (generator, is_restored))


def _wrap_deepcopy(original: TorchFunction) -> TorchFunction:
    def deepcopy(self: Tensor, memo: object) -> object:
        tell("on_copied", self)
        return original(self, memo)

    return deepcopy


OBJECT_WRAPPERS: tuple[tuple[object, str, Callable[[TorchFunction], TorchFunction]], ...] = (
    (nn.Module, "train", _outermost("on_mode", _mode)),
    (nn.Module, "state_dict", _outermost("on_state_dict", _state)),
    (nn.Module, "load_state_dict", _outermost("on_loaded", _loaded)),
    (torch, "save", _outermost("on_saved", _saved)),
    (torch, "manual_seed", _seeded("torch", is_restored=False)),
    (torch, "set_rng_state", _seeded("torch", is_restored=True)),
    (torch.random, "set_rng_state", _seeded("torch", is_restored=True)),
    (numpy.random, "seed", _seeded("numpy", is_restored=False)),
    (numpy.random, "set_state", _seeded("numpy", is_restored=True)),
    (random, "seed", _seeded("random", is_restored=False)),
    (random, "setstate", _seeded("random", is_restored=True)),
    (Tensor, "__deepcopy__", _wrap_deepcopy),
)
"""Owner, name and wrapper of each function that ``hooks`` replaces."""
