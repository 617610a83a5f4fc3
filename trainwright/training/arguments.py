"""Errors with remedies for unknown arguments, such as those of another trainer."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from trainwright.errors import UsageError
from trainwright.recipe.suggest import path_of_key

P = ParamSpec("P")
T = TypeVar("T")
_BY_ARGUMENT = {
    "data": ("train_dataloaders", "train_dataloader", "train_loader", "train_dataset", "dataset"),
    "val": ("val_dataloaders", "val_dataloader", "val_loader", "val_dataset", "eval_dataset", "validation_data"),
    "loss": ("criterion", "loss_fn"),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs"),
    "steps": ("max_steps",),
    "until": ("max_time",),
    "batch": ("batch_size", "per_device_train_batch_size", "train_batch_size"),
    "accumulation": ("accumulate_grad_batches", "gradient_accumulation_steps"),
    "lr": ("learning_rate",),
    "schedule": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "warmup": ("warmup_steps", "warmup_ratio"),
    "device": ("accelerator",),
    "observers": ("callbacks",),
    "metrics": ("compute_metrics",),
    "resume": ("ckpt_path", "resume_from_checkpoint"),
    "restore_best": ("load_best_model_at_end",),
    "name": ("out", "output_dir", "default_root_dir", "log_dir", "logging_dir", "run_name", "run_dir", "folder"),
    "quiet": ("verbose", "enable_progress_bar"),
}
_EQUIVALENTS = {theirs: ours for ours, names in _BY_ARGUMENT.items() for theirs in names}
"""Maps arguments of other trainers to the equivalent argument of ``fit``."""


def naming_remedies(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` to raise UsageError with a remedy for an unknown keyword argument."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        require_known(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return called


def require_known(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError, with a remedy for each name, if ``given`` has names that are not in ``known``."""
    if unknown := [name for name in given if name not in known]:
        what = f"{function}: there is no argument {' and none '.join(unknown)}"
        raise UsageError(what, remedy="; ".join(_remedy(name, known) for name in unknown))


def _remedy(name: str, known: Iterable[str]) -> str:
    if name in _EQUIVALENTS:
        return f"write {_EQUIVALENTS[name]}= for {name}="
    if path := path_of_key(name):
        return f"write settings={{'{path}': ...}} for {name}="
    close = difflib.get_close_matches(name[:100], [*known], n=1, cutoff=0.6)
    return (
        f"did you mean {close[0]}=?"
        if close
        else f"the arguments are {', '.join(known)}; see docs/how-to/train-your-model.md"
    )
