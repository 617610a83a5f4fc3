"""Imports torchao, which Trainwright uses for low precision, only when it is needed."""

from __future__ import annotations

import importlib
import logging
import warnings
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

from trainwright.errors import MissingExtra

_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
"""These loggers report CUDA kernels that cannot be loaded on this machine, and deprecations inside torchao."""


@cache
def torchao_module(name: str, needed_for: str) -> Any:
    """Import a module of torchao, such as ``optim``, without its messages about kernels for other machines.

    Raises:
        MissingExtra: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise MissingExtra("torchao", needed_for=needed_for)
    with ExitStack() as restored:
        for logger in map(logging.getLogger, _NOISY_LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        restored.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torchao.{name}")
