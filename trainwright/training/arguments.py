"""Reads arguments of ``tw.fit``: unknown names, optimizers and schedules as objects, metrics, and ready batches.

Also calls a function that returns these arguments, and records its name, so that another process can call it again.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, default_collate, default_convert

from trainwright.checkpoint.rng import preserved_rng, seed_all
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.engine.metrics import MetricSet, metric_set
from trainwright.errors import UsageError, text_of
from trainwright.optim.stepped_schedule import function_of_step
from trainwright.optim.user_optimizers import makes_own_groups, takes_first
from trainwright.plan.trace.blueprint import fake_copy
from trainwright.plan.trace.fake_tensors import UNTRACEABLE, fake_batch, fake_tensors
from trainwright.recipe import Source, from_mapping
from trainwright.recipe.outline import EARLY_STOPPING_KEYS, path_of_key
from trainwright.recipe.resolve import LIVE, find
from trainwright.training.custom_objects import named_metrics
from trainwright.training.options import FitOptions, MetricsLike

P = ParamSpec("P")
T = TypeVar("T")
_BY_ARGUMENT = {
    "data": ("train_dataloaders", "train_dataloader", "train_loader", "train_dataset", "train_data", "dataset"),
    "val": (
        *("val_dataloaders", "val_dataloader", "val_loader", "val_dataset", "val_data", "validate", "validation_data"),
        *("eval_dataset", "eval_data", "eval_loader"),
    ),
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
    "name": ("run_name", "run", "experiment"),
    "quiet": ("verbose", "enable_progress_bar"),
}
_EQUIVALENTS = {theirs: ours for ours, names in _BY_ARGUMENT.items() for theirs in names}
"""Maps arguments of other trainers to the equivalent argument of ``fit``."""
_FOLDERS = frozenset(
    {"out", "out_dir", "output_dir", "default_root_dir", "log_dir", "logging_dir", "run_dir", "save_dir", "folder"}
)
"""Arguments of other trainers for the folder in which a run writes."""


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
        raise UsageError(what, remedy="; ".join(dict.fromkeys(_remedy(name, known) for name in unknown)))


def _remedy(name: str, known: Iterable[str]) -> str:
    if name in _EQUIVALENTS:
        return f"write {_EQUIVALENTS[name]}= for {name}="
    if name in EARLY_STOPPING_KEYS:
        return f"write observers=[tw.EarlyStopping(patience=3)] for {name}="
    if path := "folder" if name in _FOLDERS else path_of_key(name):
        return f"write {path}= for {name}=" if path in known else f"write settings={{'{path}': ...}} for {name}="
    close = difflib.get_close_matches(name[:100], [*known], n=1, cutoff=0.6)
    return (
        f"did you mean {close[0]}=?"
        if close
        else f"the arguments are {', '.join(known)}; see docs/how-to/train-your-model.md"
    )


OBJECT_SECTIONS = (("model",), ("loss",), ("data", "train"), ("data", "val"), ("data", "more_val"))
"""Recipe sections that ``fit`` receives as objects: ``settings`` may not set the keys that build them.

A loss may also be a name; its ``args`` may then be set.
"""
LOADING_KEYS = ("architecture", "dtype", "revision", "trust_remote_code")
BUILDING_KEYS = ("use", "args", "name", *LOADING_KEYS)


class ObjectArguments(NamedTuple):
    """The optimizer and schedule of a call of ``tw.fit`` that are objects rather than names.

    Attributes:
        optimizer, schedule: None if the recipe names it.
        sections: Recipe sections that describe the passed objects.
        may_set: For each section, the keys that ``settings`` may still set; None: all but ``use``.
    """

    optimizer: object
    schedule: object
    sections: dict[str, dict[str, object]]
    may_set: dict[str, tuple[str, ...] | None]

    def conflicting_argument(self, keys: Sequence[str]) -> str:
        """Return the argument, passed as an object, that a setting at this path would contradict; "" for none."""
        for section in OBJECT_SECTIONS:
            if (
                section[0] not in self.may_set
                and tuple(keys[: len(section)]) == section
                and (len(keys) == len(section) or keys[len(section)] in BUILDING_KEYS)
            ):
                return section[-1]
        if keys[0] not in self.may_set:
            return ""
        allowed = self.may_set[keys[0]]
        is_allowed = len(keys) > 1 and (keys[1] in allowed if allowed is not None else keys[1] != "use")
        return "" if is_allowed else keys[0]


def object_arguments(
    optimizer: object, schedule: object, loss: object, *, lr: float | None, warmup: str | None
) -> ObjectArguments:
    """Return the passed objects with their recipe sections. Raises UsageError for an argument without effect."""
    found = ObjectArguments(None, None, {}, {"loss": None} if isinstance(loss, str) else {})
    if optimizer is not None and not isinstance(optimizer, str):
        found = found._replace(optimizer=optimizer)
        found.sections["optimizer"] = {"use": live_name(optimizer), **_rates(optimizer, lr)}
        found.may_set["optimizer"] = None if callable(optimizer) else ("clip",)
    if schedule is not None and not isinstance(schedule, str):
        _require_schedule(schedule)
        if warmup is not None:
            raise UsageError(
                "warmup has no effect on a custom schedule", remedy="leave warmup out, and warm up in the schedule"
            )
        found = found._replace(schedule=schedule)
        found.sections["schedule"] = {"use": live_name(schedule)}
        found.may_set["schedule"] = ("every",)
    return found


def live_name(thing: object) -> str:
    """Return the name under which a recipe mentions an object that was passed in Python, which no file can build."""
    if isinstance(thing, list | tuple):
        return f"{LIVE}:several"
    thing = getattr(thing, "func", thing)  # unwraps a partial
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{LIVE}:{name if name.isidentifier() else type(thing).__name__}"


def _rates(optimizer: object, lr: float | None) -> dict[str, object]:
    """Return the learning rate and weight decay of the passed optimizer, so that the recipe shows them."""
    if callable(optimizer):
        known = {key: value for key, value in _keywords(optimizer).items() if key in ("lr", "weight_decay")}
        if lr is not None and ("lr" in known or makes_own_groups(optimizer)):
            raise UsageError(
                f"lr={lr} has no effect: {live_name(optimizer).partition(':')[2]} sets its learning rate itself",
                remedy="leave lr out, or remove it from the function that makes the optimizer",
            )
        return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
    if lr is not None:
        raise UsageError(
            f"lr={lr} has no effect on an existing optimizer", remedy="leave lr out and set it in the optimizer"
        )
    first = optimizer[0] if isinstance(optimizer, list | tuple) and optimizer else optimizer
    if not isinstance(first, Optimizer):
        return {}
    group = first.param_groups[0]
    rate = float(group.get("initial_lr", group.get("lr", 0.0)))
    return {"lr": rate} if rate > 0 else {}


def _keywords(factory: object) -> Mapping[str, object]:
    return factory.keywords if isinstance(factory, partial) else {}


def _require_schedule(schedule: object) -> None:
    listed = schedule if isinstance(schedule, list | tuple) else [schedule]
    if listed and all(isinstance(each, LRScheduler) for each in listed):
        return
    if not (callable(schedule) and takes_first(schedule, "optimizer")):
        function_of_step(schedule)


def split_metrics(metrics: object) -> tuple[list[object], dict[str, object]]:
    """Split a ``MetricsLike`` or None into the value of the recipe key ``metrics`` and the objects by name.

    Raises UsageError for a value of any other type.
    """
    if metrics is None:
        return [], {}
    if isinstance(metrics, str):
        return [metrics], {}
    if isinstance(metrics, Mapping):
        named: list[object] = [_part(name, each) for name, each in metrics.items() if isinstance(each, str | Mapping)]
        objects: dict[str, object] = {
            name: each for name, each in metrics.items() if not isinstance(each, str | Mapping)
        }
        metric_set(objects)
        return named, objects
    if not isinstance(metrics, Sequence):
        raise UsageError(f"metrics is a {type(metrics).__name__}", remedy="give names: metrics=['accuracy', 'f1']")
    for each in metrics:
        if not isinstance(each, str | Mapping):
            name = getattr(each, "__name__", type(each).__name__)
            raise UsageError(
                f"the metric {name} has no name", remedy=f"give a mapping: metrics={{'{name.lower()}': ...}}"
            )
    return list(metrics), {}


def _part(name: object, asked: str | Mapping[Any, object]) -> dict[str, object]:
    return {"name": name, **({"use": asked} if isinstance(asked, str) else asked)}


def resolve_metrics(metrics: MetricsLike, loss: object) -> MetricSet:
    """Return the metrics of a call without a recipe, such as ``tw.evaluate``."""
    named, objects = split_metrics(metrics)
    nothing = f"{LIVE}:nothing"
    recipe = {"model": nothing, "data": {"train": nothing}, "loss": nothing, "metrics": named}
    return metric_set({**named_metrics(from_mapping(recipe, name="metrics"), loss), **objects})


REMEDY = "pass ready batches as a function, lambda: batches, and samples as DataLoader(samples, batch_size=32)"
CPU = torch.device("cpu")


def ready_if_batches(data: object, model: nn.Module, loss: Callable[..., Any], argument: str) -> object:
    """Return a loader over the items of a list if they are ready batches; return any other data unchanged.

    Items look like batches if inputs and targets have the same number of rows. Samples may look so too, for example a
    sequence with one target vector per step. The list is therefore taken as batches only if just the last item is
    shorter, or if model and loss accept one item but not several stacked ones, or if they accept both and there is one
    target per row.

    Raises UsageError if both readings are possible, or neither.
    """
    if not isinstance(data, list | tuple) or (sizes := _rows(data)) is None:
        return data
    batches: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    if len(set(sizes[:-1])) == 1 and sizes[-1] < sizes[0]:
        return batches
    what = f"fit: {argument} is a {type(data).__name__} whose items have {sizes[0]} rows each"
    if len(set(sizes)) > 1:
        remedy = f"{REMEDY[:-1]}, collate_fn=tw.pad())"
        raise UsageError(
            f"{what.replace(' each', '')}, and others do not: they may be batches, or samples of different lengths",
            remedy=remedy,
        )
    one, several = _rejection_of(data[:1], model, loss), _rejection_of([data[0], data[-1]], model, loss)
    if one and several:
        raise UsageError(f"{what}: model and loss take neither one item nor several stacked: {one}", remedy=REMEDY)
    if one == "" and (several or _parts(data[0])[1].ndim == 1):  # a target for each row
        return batches
    if one or _parts(data[0])[0].ndim > 2:  # for example images
        return data
    raise UsageError(f"{what}: each may be a ready batch or a sample", remedy=REMEDY)


def _parts(item: object) -> list[Any]:
    """Return the tensors of an item; empty if it contains anything else."""
    parts = [*item.values()] if isinstance(item, Mapping) else [*item] if isinstance(item, tuple | list) else []
    return parts if all(isinstance(part, Tensor | np.ndarray) for part in parts) else []


def _rows(items: Sequence[object]) -> list[int] | None:
    """Return the number of rows of each item; None if the items do not look like batches of inputs and targets."""
    found = []
    for item in items:
        parts = _parts(item)
        if len(parts) < 2 or parts[0].ndim < 2 or any(part.ndim < 1 or len(part) != len(parts[0]) for part in parts):
            return None
        found.append(len(parts[0]))
    return found or None


def _rejection_of(items: Sequence[object], model: nn.Module, loss: Callable[..., Any]) -> str | None:
    """Return the error of model and loss for one item, or for several stacked; "" if they accept it.

    Runs on fake tensors. Returns None if that is not possible, because model or loss need values or cannot be copied.
    """
    converted = [default_convert(item) for item in items]  # type: ignore[no-untyped-call]
    batch = converted[0] if len(items) == 1 else default_collate(converted)
    with fake_tensors():
        try:
            judge = fake_copy(loss, CPU) if isinstance(loss, nn.Module) else loss
            copied = fake_copy(model, CPU)
        except Exception:
            return None
        try:
            found = as_loss_fn(judge)(copied, fake_batch(batch, CPU))
        except Exception as error:
            is_fake = isinstance(error, UNTRACEABLE) or "Fake" in str(error)
            return None if is_fake else text_of(error, lines=1)
    total = found.total if isinstance(found, Loss) else found
    return "" if isinstance(total, Tensor) and total.dim() == 0 else "the loss is not a scalar"


ORDER = ("model", "data", "loss", "optimizer")
WHERE = Source("module:function")
OBJECTS = ("data", "loss", "advance", "val", "optimizer", "schedule", "metrics", "observers")
"""Arguments of ``tw.fit`` that may be objects, which no file describes."""
LET_A_FUNCTION = "let a function in a module return them: tw.fit('module:function')"


class Rebuild(NamedTuple):
    """The function that builds the objects of a run again, or the reason why there is none.

    Attributes:
        function: The function as ``module:function``; None if there is none.
        reason: The reason why there is none, else "".
        is_seeded: True if the run seeds the random generators, including before it calls the function.
    """

    function: str | None
    reason: str
    is_seeded: bool = False


NO_FUNCTION = Rebuild(None, "model, data and loss were passed as objects, and no file says how they are made")


class FitArguments(NamedTuple):
    """The arguments of ``tw.fit`` that a function returned, merged with the arguments of the call."""

    model: nn.Module
    data: object
    loss: str | Callable[..., object] | None
    options: FitOptions
    rebuild: Rebuild


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the generators within the block and restore them afterwards; do nothing for None."""
    if seed is None:
        yield
        return
    with preserved_rng():
        seed_all(seed)
        yield


def call_function(function: object, given: Mapping[str, Any]) -> FitArguments:
    """Call ``function``, or the function of that name. ``given``, the arguments of the call, override what it returns.

    Raises UsageError if there is no such function, or if it returns no arguments of ``tw.fit``.
    """
    given = {name: each for name, each in given.items() if each is not None and each is not False}
    given = {name: each for name, each in given.items() if not (isinstance(each, tuple) and not each)}
    arguments = {**call_for_arguments(function), **given}
    if "data" not in arguments:
        raise UsageError("fit: data are missing", remedy="let the function return (model, data, loss)")
    model, data, loss = (arguments.pop(name, None) for name in ("model", "data", "loss"))
    return FitArguments(model, data, loss, cast("FitOptions", arguments), _rebuild(function, given))


def call_for_arguments(function: object) -> dict[str, Any]:
    """Return the arguments of ``tw.fit`` that a function returns. ``function`` may be a name, ``module:function``.

    It must return ``(model, data, loss, optimizer)``, a shorter tuple of these, or a dict. Raises UsageError otherwise.
    """
    if isinstance(function, str) and ":" in function:
        function = find(function, {}, "function", WHERE)
    if not callable(function) or isinstance(function, type | nn.Module):
        what = repr(function) if isinstance(function, str | type) else f"a {type(function).__name__}"
        raise UsageError(
            f"fit: the model is {what}",
            remedy="pass an nn.Module, or a function that returns (model, data, loss), or its name 'module:function'",
        )
    name = getattr(function, "__name__", type(function).__name__)
    made = function()
    if isinstance(made, tuple) and 1 < len(made) <= len(ORDER):
        made = dict(zip(ORDER, made, strict=False))
    if not isinstance(made, Mapping) or not isinstance(made.get("model"), nn.Module):
        kind = "a dict without a model" if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise UsageError(
            f"{name} returned {kind}",
            remedy="return (model, data, loss, optimizer), or fewer of them, or a dict of arguments of tw.fit",
        )
    return dict(made)


def _rebuild(function: object, given: Mapping[str, object]) -> Rebuild:
    besides = [name for name in OBJECTS if name in given and _is_object(given[name])]
    if besides:
        return Rebuild(None, f"{' and '.join(besides)} did not come from its function, and no file says how it is made")
    if isinstance(function, str):
        return Rebuild(function, "")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        return Rebuild(None, f"{name} is defined in the script itself, which trains when it is imported")
    found: object = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return Rebuild(None, f"{name or type(function).__name__} cannot be imported by its name")
    return Rebuild(f"{module}:{name}", "")


def _is_object(value: object) -> bool:
    """Return True if an argument contains objects other than names and numbers, which the recipe has."""
    if isinstance(value, Mapping):
        return any(map(_is_object, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_object, value))
    return not isinstance(value, str | int | float)
