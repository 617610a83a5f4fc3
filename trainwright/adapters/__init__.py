"""The watch in loops of other libraries: one callback each, so that ``import trainwright`` needs none of them."""

from __future__ import annotations

import importlib
from typing import Any

from torch.optim import Optimizer

from trainwright.errors import MissingExtra


def required(package: str, *, needed_for: str) -> Any:
    """The package; MissingExtra where it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(package, extra="adapters", needed_for=needed_for) from error


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer that really steps: accelerate's and Lightning's are shells around it."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer):  # what torch gives to each that it knows
        optimizer = getattr(optimizer, "optimizer", None) or optimizer._optimizer
    found: Optimizer = optimizer
    return found
