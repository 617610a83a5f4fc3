"""The watch in loops of other libraries, one callback for each; ``import trainwright`` imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, TypedDict

from torch.optim import Optimizer

from trainwright.errors import MissingExtra
from trainwright.watching.experiments import OwnLaw


class WatchChoices(TypedDict, total=False):
    """The options of ``tw.watch`` that a callback takes; the model, optimizer, loader, ... are those of the trainer."""

    loss: object
    accumulation: int | None
    out: str | Path | None
    on_nonfinite: Literal["skip", "stop", "observe"]
    on_spike: Literal["warn", "skip", "rollback"]
    skip: str | Path | Iterable[Iterable[int]]
    keep: int
    memory_bytes: int | None
    patience_s: float
    laws: str | OwnLaw | Sequence[str | OwnLaw]
    profile: bool | int
    layers: bool
    sinks: Sequence[str]
    alerts: Mapping[str, object] | None
    quiet: bool


def required(package: str, *, needed_for: str) -> ModuleType:
    """Imports a package. Raises MissingExtra where it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(package, needed_for=needed_for) from error


def innermost(optimizer: object) -> Optimizer:
    """The torch optimizer inside of the wrappers of Accelerate and Lightning."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer):  # every torch optimizer has them
        optimizer = getattr(optimizer, "optimizer", None) or vars(optimizer)["_optimizer"]
    assert isinstance(optimizer, Optimizer)
    return optimizer
