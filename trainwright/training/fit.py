"""``tw.fit``: trains a module and data that the caller built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.assembly.assemble import CustomObjects, Parts, at_recipe, build_loss, require_ready
from trainwright.checkpoint.rng import RngBag
from trainwright.data.ready_batches import REPEATABLE_REMEDY, ReadyBatches
from trainwright.data.unwrap import Unwrapped, unwrap
from trainwright.distributed import Launch
from trainwright.engine.loss import ModelLoss, require_callable
from trainwright.engine.observer import as_observer
from trainwright.errors import UsageError, require_choice
from trainwright.finetune.packing import with_packing
from trainwright.models.pretrained import load_pretrained
from trainwright.monitoring.signals import default_handler, forward_signal, set_late_handlers
from trainwright.plan.make import Note
from trainwright.recipe import LOSSES, Loaded, from_mapping
from trainwright.recipe.resolve import import_factory
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.training.arguments import (
    LOADING_KEYS,
    NO_FUNCTION,
    ObjectArguments,
    Rebuild,
    call_function,
    live_name,
    naming_remedies,
    object_arguments,
    ready_if_batches,
    require_known,
    seeded,
    split_metrics,
)
from trainwright.training.custom_objects import no_loss
from trainwright.training.options import (
    FitOptions,
    MetricsLike,
    ModelLike,
    ObserverLike,
    OptimizerLike,
    RunOptions,
    ScheduleLike,
)
from trainwright.training.problems import all_problems_reported
from trainwright.training.result import Result
from trainwright.training.resume import folder_of
from trainwright.training.run import train

if TYPE_CHECKING:
    from trainwright.engine.manual_step import OwnStep
    from trainwright.recipe.load import Setting

SHORT_NAMES = {
    "until": "until",
    "lr": "optimizer.lr",
    "batch": "batch.size",
    "accumulation": "batch.accumulation",
    "optimizer": "optimizer.use",
    "schedule": "schedule.use",
    "warmup": "schedule.warmup",
    "clip": "optimizer.clip.at",
    "preset": "preset",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
    "name": "name",
}
"""Maps arguments of ``fit`` to the recipe key that each sets."""
FIT_OPTIONS = (*RunOptions.__annotations__, "steps")


class FitObjects(NamedTuple):
    """The recipe and the live objects of one call of ``tw.fit``."""

    loaded: Loaded
    parts: Parts


@naming_remedies
def fit(
    model: ModelLike,
    data: object = None,
    loss: str | Callable[..., object] | None = None,
    *,
    advance: OwnStep | None = None,
    val: object = None,
    until: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    optimizer: str | OptimizerLike | None = None,
    schedule: str | ScheduleLike | None = None,
    warmup: str | None = None,
    clip: float | None = None,
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"] | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    preset: Literal["recommended"] | None = None,
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
    resume: str | Path | Result | None = None,
    accept: str | Sequence[str] = (),
    metrics: MetricsLike | None = None,
    observers: ObserverLike | Sequence[ObserverLike] = (),
    restore_best: bool = False,
    retain_grad: Sequence[str] = (),
    on_interrupt: Literal["raise", "return"] = "raise",
    quiet: bool = False,
    serve: bool = False,
) -> Result:
    """Train ``model`` in place and write a run folder.

    Defaults do not change the mathematics. With an optimizer, the steps are the same as in the loop
    ``for batch in data: optimizer.zero_grad(); loss(...).backward(); optimizer.step()``, except that an update with
    non-finite gradients is skipped. A run first prints every setting and its origin (the call, a default, the plan).
    docs/how-to/train-your-model.md has the table of defaults. ``tw.verify_plain`` compares ``fit`` with the loop.

    Args:
        model: The module to train; or the folder or the hub name of a pretrained model of ``transformers``, which is
            loaded in float32 (docs/how-to/fine-tune.md). Alternatively a function without arguments, passed as such or
            as ``"module:function"``, that returns ``(model, data, loss, optimizer)``, a shorter tuple of these, or a
            dict of arguments of ``tw.fit``. The run folder then records the function, so that commands can build the
            objects again to resume, replay and profile the run.
        data: A Dataset, a DataLoader, a tuple or dict of tensors (or NumPy arrays) of the same length, or ready
            batches: any other iterable, or a function without arguments that returns one. The sampler, batch sampler,
            collate function and workers of a DataLoader are used. docs/how-to/data.md lists for each kind of data
            which sample ids are known and how exactly it is resumed. A dict of datasets, such as a DatasetDict, is
            split: its ``train`` is used for training, and its ``validation``, ``val`` or ``valid`` as ``val``.
        loss: ``loss(output, target)``, such as ``nn.CrossEntropyLoss()``; or ``loss(model, batch)``, whose first
            parameter must be named ``model``; or a name such as ``"cross_entropy"``. It returns a mean, or a
            ``tw.Loss(total, weight)`` for exact weighting. None: the model returns its loss itself, as models of
            ``transformers`` do.
        advance: A custom step for training that needs more than one loss, such as a GAN. ``step(state, batch)`` calls
            backward and the optimizers and returns the loss to log (see docs/how-to/custom-step.md). ``loss`` is then
            used for evaluation only.
        val: The validation set, in any form that ``data`` may have, or several by name: ``{"clean": a, "noisy": b}``.
            The batch size of a DataLoader is used for evaluation. The first set decides which checkpoint is the best.
        until: The length of the run: ``"5ep"``, ``"1000steps"``, ``"60s"``, ``"5Mtok"``.
        epochs: The length of the run in epochs.
        steps: The length of the run in optimizer steps.
        lr: Peak learning rate. Default: the learning rate of the optimizer.
        batch: Samples per optimizer step.
        accumulation: Micro-batches per optimizer step. Without ``batch``, a DataLoader's batch is a micro-batch.
        optimizer: A name such as ``"adamw"`` (the default, with the defaults of ``torch.optim.AdamW``), or
            ``"package.module:callable"``; an optimizer over parameters of the model, whose groups and learning rates
            are used; several optimizers over disjoint parameters, which are stepped together; or a class, partial or
            function that makes them (see docs/how-to/train-your-model.md).
        schedule: A name such as ``"cosine"``, or ``"package.module:callable"``; an LRScheduler of torch, or a class,
            partial or function that makes one for ``optimizer``; or a function of the step, or of (step, fraction),
            that returns the factor on the learning rate.
        warmup: The length of the linear warm-up: ``"100steps"``, ``"0.05run"``. Default: no warm-up.
        clip: The maximum global norm of the gradients. Default: no clipping.
        precision: Arithmetic of the forward and backward pass. Default: float32. ``"auto"`` selects the fastest
            precision of the device.
        device: ``"cpu"`` or ``"cuda"``. Default: the GPU if there is one.
        seed: Seed of all random generators, whose states are restored at the end. By default training draws from the
            generators of the process in their current state, and data other than a DataLoader are shuffled with the
            seed 1337.
        preset: ``"recommended"`` sets precision auto, clipping at norm 1, a cosine schedule with warm-up, and no weight
            decay on norms and biases. Other arguments take precedence.
        name: Name of the run and of its folder.
        settings: Any other recipe keys by path, ``{"optimizer.clip.at": 0.5}``, or as nested mappings.
        resume: The folder or result of an earlier run of the same call, or the URL of its copy. That run is continued.
        accept: The recipe path or paths, such as ``"optimizer.lr"``, at which a difference to that run is accepted.
        metrics: Metrics over the full validation set, and over the training batches since the previous log record:
            names such as ``["accuracy", "f1"]`` (docs/reference/catalog.md lists them), or a mapping from names to
            objects with ``update(outputs, targets)``, ``compute()`` and ``reset()``, such as ``torchmetrics`` has, or
            to functions of all outputs and all targets.
        observers: Functions of ``(result, state)``, or objects whose ``observe(result, state)`` is called after each
            step, and whose ``close()``, if defined, is called at the end. Returning a ``tw.Stop`` ends the run. Also
            entries as in a recipe, such as ``{"use": "generate", "args": {...}}``.
        restore_best: Load the weights of the best validation into the model at the end.
        retain_grad: Glob patterns of module names, such as ``["blocks.3.*"]``. Norms and histograms of the gradients
            with respect to the outputs of these modules are logged in some steps and shown on the page
            (docs/how-to/layer-statistics.md).
        on_interrupt: The behaviour after a signal (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP) has stopped the run and it is
            saved.
            ``"raise"``: raise KeyboardInterrupt for Ctrl-C. For other signals, call the handler of your program, or
            exit the process with code 75 if it has none. ``"return"``: return the result, whose ``interrupted_by``
            is the name of the signal.
        quiet: Print nothing.
        serve: Show the run in a browser while it trains, from a separate process whose address is printed.

    Returns:
        The result: how the run ended, its losses and metrics, and the findings of the doctor.

    Raises:
        UsageError: A setting cannot be used. The error names its remedy.
        RecipeError: As UsageError, for a recipe key.
        KeyboardInterrupt: After Ctrl-C, once the run is saved, unless ``on_interrupt`` is ``"return"``.
    """
    passed = locals()
    require_choice("on_interrupt", on_interrupt, ("raise", "return"))
    earlier = resume.run if isinstance(resume, Result) else resume
    if isinstance(earlier, bool):
        raise UsageError(f"fit: resume is {earlier}", remedy="name the run: resume='runs/my-run', or pass its result")
    options = cast("FitOptions", {key: passed[key] for key in FIT_OPTIONS})
    loaded, parts = fit_objects(model, data, loss, options)
    result = train(
        loaded,
        parts=parts,
        resume=None if earlier is None else folder_of(earlier),
        accept=(accept,) if isinstance(accept, str) else tuple(accept),
        quiet=quiet,
        serve=serve,
    )
    set_late_handlers(default_handler)
    if result.interrupted_by and on_interrupt == "raise":
        go_on = f"tw.fit(..., resume={str(result.run)!r})"
        forward_signal(result.interrupted_by, f"the run stopped after step {result.step:,}; continue it with {go_on}")
    return result


def fit_objects(
    model: ModelLike,
    data: object,
    loss: str | Callable[..., object] | None,
    options: FitOptions,
    *,
    more: Sequence[Setting] = (),
) -> FitObjects:
    """Return the recipe and the live objects of a call of ``tw.fit``. ``more`` overrides recipe values.

    Raises UsageError or RecipeError as ``tw.fit`` does.
    """
    require_known("fit", options, FIT_OPTIONS)
    if isinstance(model, Path) or (isinstance(model, str) and ":" not in model):
        if data is None:
            raise UsageError(
                f"fit: the model is {str(model)!r}, and data are missing",
                remedy="pass data for this pretrained model; or pass an nn.Module, or a function that returns "
                "(model, data, loss), or its name 'module:function'",
            )
        settings, args = _without_model_args(options.get("settings"))
        options = {**options, "settings": settings}
        with seeded(options.get("seed")):
            model = load_pretrained(model, **args)
    if not isinstance(model, nn.Module):
        with seeded(options.get("seed")):
            made = call_function(model, {"data": data, "loss": loss, **options})
        return _fit_objects(made.model, made.data, made.loss, made.options, made.rebuild, more)
    return _fit_objects(model, data, loss, options, NO_FUNCTION, more)


def _fit_objects(
    model: nn.Module,
    data: object,
    loss: str | Callable[..., object] | None,
    options: FitOptions,
    rebuild: Rebuild,
    more: Sequence[Setting],
) -> FitObjects:
    generators = RngBag.capture()
    advance, optimizer, schedule = options.get("advance"), options.get("optimizer"), options.get("schedule")
    batch, device, settings = options.get("batch"), options.get("device"), options.get("settings")
    observers = options.get("observers", ())
    if isinstance(observers, Mapping) or not isinstance(observers, Iterable):
        observers = [observers]
    named_observers = [each for each in observers if isinstance(each, str | Mapping)]
    require_ready(model)
    judge = loss if loss is not None else ModelLoss() if advance is None else no_loss
    if not isinstance(judge, str):
        require_callable(judge)
    named_metrics, own_metrics = split_metrics(options.get("metrics"))
    objects = object_arguments(optimizer, schedule, judge, lr=options.get("lr"), warmup=options.get("warmup"))
    asked = {
        **options,
        "until": _until(options.get("until"), options.get("epochs"), options.get("steps")),
        "optimizer": None if objects.optimizer is not None else optimizer,
        "schedule": None if objects.schedule is not None else schedule,
        "device": None if device is None else str(device),
    }
    by_path = {path: asked[key] for key, path in SHORT_NAMES.items() if asked.get(key) is not None}
    train, val = _split(data, options.get("val"))
    take = partial(_unwrapped, model, judge)
    train_data = take(train, "data")
    sets = {name: take(each, f"val[{name!r}]" if name else "val") for name, each in _by_name(val).items()}
    _require_usable(train_data, sets.values(), batch)
    overrides = _overrides({} if settings is None else settings, by_path, objects)
    says_batch = {str(path) for path, _ in overrides if str(path).split(".")[0] == "batch"}
    batch_key = "micro" if says_batch == {"batch.accumulation"} else "size"
    recipe = _recipe_of(model, train_data, sets, advance or judge, batch_key) | objects.sections
    if options.get("restore_best"):
        overrides.append(("checkpoint.restore_best", True))
    if patterns := options.get("retain_grad"):
        overrides.append(("log.retain_grad", [patterns] if isinstance(patterns, str) else list(patterns)))
    if named_metrics:
        overrides.append(("metrics", named_metrics))
    if named_observers:
        overrides.append(("observers", named_observers))
    loaded = from_mapping(recipe, overrides=[*overrides, *more], name="tw.fit")
    if judge is no_loss and sets:
        no_loss(model, None)
    with at_recipe(loaded.source, "data.packing"):
        train_data = with_packing(train_data, loaded.recipe.data.packing)
        sets = {name: with_packing(each, loaded.recipe.data.packing) for name, each in sets.items()}
    val_sets = {name or "val": each for name, each in sets.items()}
    is_seeded = "seed" in loaded.stated
    custom = CustomObjects(
        optimizer=objects.optimizer,
        schedule=objects.schedule,
        observers=[as_observer(each) for each in observers if not isinstance(each, str | Mapping)],
        advance=advance,
        metrics=own_metrics,
        generators=None if is_seeded else generators,
        rebuild=rebuild._replace(is_seeded=is_seeded)._asdict(),
    )
    notes = (*_unused_splits(data, train, val), *_unused_notes(train_data, next(iter(sets.values()), None)))
    parts = Parts(model, train_data, val_sets, no_loss if isinstance(judge, str) else judge, notes, custom=custom)
    if not isinstance(judge, str):
        return FitObjects(loaded, parts)
    with all_problems_reported(loaded, parts, Launch.read(os.environ).size):
        return FitObjects(loaded, replace(parts, loss=build_loss(loaded)))


def _by_name(val: object) -> dict[str, object]:
    """Return validation sets by name; a single set has the name "". A mapping of columns is a single set."""
    if val is None:
        return {}
    is_several = isinstance(val, Mapping) and not any(
        isinstance(each, Tensor | np.ndarray | list) for each in val.values()
    )
    if not is_several:
        return {"": val}
    assert isinstance(val, Mapping)
    strange = [name for name in val if not isinstance(name, str) or not name]
    if strange or not val:
        raise UsageError(
            f"fit: val is a mapping with {f'the name {strange[0]!r}' if strange else 'no entries'}",
            remedy="pass validation sets by name: val={'clean': a, 'noisy': b}",
        )
    return dict(val)


def _unwrapped(model: nn.Module, judge: str | Callable[..., object], data: object, argument: str) -> Unwrapped:
    if judge in LOSSES:
        judge = import_factory(LOSSES[str(judge)].factory)
    if judge is not no_loss and not isinstance(judge, str):
        data = ready_if_batches(data, model, judge, argument)
    try:
        return unwrap(data)
    except UsageError as error:
        raise UsageError(f"fit: {argument}: {error.message}", remedy=error.remedy) from None


def _split(data: object, val: object) -> tuple[object, object]:
    """Return the training and the validation set. A dict of datasets is split by its keys."""
    if not isinstance(data, Mapping) or isinstance(data.get("train"), Tensor | np.ndarray | None):
        return data, val
    named = next((data[name] for name in ("validation", "val", "valid") if name in data), None)
    return data["train"], named if val is None else val


def _unused_splits(data: object, train: object, val: object) -> Iterator[Note]:
    """Yield a note on each split of a dict of datasets that is neither trained nor evaluated on."""
    used = [train, val, *(val.values() if isinstance(val, Mapping) else ())]
    for name, split in data.items() if isinstance(data, Mapping) and train is not data else ():
        if not any(split is each for each in used):
            yield Note("not used", f"the split {name!r}", f"to evaluate on it, pass it as val=data[{name!r}]")


def _require_usable(train: Unwrapped, sets: Iterable[Unwrapped], batch: int | None) -> None:
    """Raise UsageError if ``batch`` contradicts batched data, or a validation set can be iterated only once."""
    if train.own_batches is not None and batch is not None:
        raise UsageError(
            f"fit: batch={batch} contradicts data that are already batched",
            remedy="leave batch out, or pass the Dataset itself; accumulation joins several batches to a step",
        )
    for val in sets:
        if isinstance(val.dataset, ReadyBatches) and val.dataset.once:
            raise UsageError(
                f"fit: val: a {val.dataset.kind} can be iterated only once, and every evaluation iterates it",
                remedy=REPEATABLE_REMEDY,
            )


def _unused_notes(train: Unwrapped, val: Unwrapped | None) -> Iterator[Note]:
    for name, why in train.not_used.items():
        yield Note("not used", f"{name} of the DataLoader", why)
    if val is not None and val.workers:
        yield Note(
            "not used", f"num_workers={val.workers} of val", "the validation set is read by the training process"
        )


def _until(until: str | None, epochs: float | None, steps: int | None) -> str | None:
    lengths = {"until": until, "epochs": epochs, "steps": steps}
    named = [name for name, value in lengths.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"the length of the run is set twice: {' and '.join(named)}", remedy="keep one of them")
    if epochs is not None:
        return f"{epochs}ep"
    return until if steps is None else f"{steps}steps"


def _overrides(
    settings: Mapping[str, object], by_path: Mapping[str, object], objects: ObjectArguments
) -> list[tuple[str, object]]:
    """Return recipe paths with their values. A section precedes the keys inside it.

    Raises UsageError if ``settings`` repeats an argument of ``fit`` or describes an object that was passed.
    """
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"settings is a {type(settings).__name__}", remedy="pass a mapping: settings={'optimizer.clip.at': 0.5}"
        )
    overrides = sorted(_flattened(settings), key=lambda override: str(override[0]).count("."))
    for path, _ in overrides:
        _require_new(str(path), by_path, objects)
    return [*overrides, *by_path.items()]


def _without_model_args(settings: object) -> tuple[Any, dict[str, Any]]:
    """Return ``settings`` without arguments of the model, and these, with which it is loaded by its name."""
    if not isinstance(settings, Mapping):
        return settings, {}
    rest: dict[str, object] = {}
    args: dict[str, Any] = {}
    for path, value in _flattened(settings):
        section, _, key = path.rpartition(".")
        if path == "model.args" and isinstance(value, Mapping):
            args |= value
        elif section == "model.args" or (section == "model" and key in LOADING_KEYS):
            args[key] = value
        else:
            rest[path] = value
    return rest, args


def _require_new(path: str, by_path: Mapping[str, object], objects: ObjectArguments) -> None:
    """Raise UsageError if a path of ``settings`` is already set by another argument of ``fit``."""
    keys = tuple(path.split("."))
    for set_already in by_path:
        if keys[: len(section := tuple(set_already.split(".")))] == section:
            argument = next(name for name, known in SHORT_NAMES.items() if known == set_already)
            raise UsageError(f"{set_already} is set twice: as {argument}= and in settings", remedy="keep one of them")
    if argument := objects.conflicting_argument(keys):
        raise UsageError(
            f"settings has {path}, but the {argument} was passed to fit as an object",
            remedy=f"leave {path} out and pass an object that was built with that setting",
        )


def _flattened(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield nested mappings as dotted paths. ``args`` and tables of patterns are values and are not flattened.

    An empty mapping within a section, as in ``{"model.swa": {}}``, enables that feature.
    """
    values = ("args", "plan", "stages")
    for path, value in settings.items():
        is_value = path.rpartition(".")[2] in values or ("." in path and not value) if isinstance(path, str) else True
        if isinstance(value, Mapping) and not is_value:
            yield from _flattened({f"{path}.{key}": inner for key, inner in value.items()})
        else:
            yield path, value


def _recipe_of(
    model: nn.Module, data: Unwrapped, val: Mapping[str, Unwrapped], loss: str | Callable[..., object], batch_key: str
) -> dict[str, object]:
    """Return a recipe that names the passed objects.

    ``batch_key`` is the key that the batch size of a DataLoader sets: ``size`` of a step, or ``micro``.
    """
    from_loader = {
        "shuffle": data.shuffle,
        "drop_last": data.drop_last,
        "workers": data.workers,
        "prefetch": data.prefetch,
        "timeout": f"{data.timeout_s:g}s" if data.timeout_s else None,
    }
    section: dict[str, object] = {key: value for key, value in from_loader.items() if value is not None}
    section["train"] = {"use": live_name(data.origin)}
    first, more = next(iter(val.values()), None), list(val.items())[1:]
    if first is not None:
        section["val"] = {"use": live_name(first.origin)}
        section["more_val"] = [{"name": name, "use": live_name(each.origin)} for name, each in more]
    own = data.own_batches
    size, batch_key = (data.batch_size, batch_key) if own is None else (own.size or DEFAULT_BATCH_SIZE, "size")
    return {
        "model": {"use": live_name(model)},
        "data": section,
        "loss": {
            "use": loss if isinstance(loss, str) else "of_model" if isinstance(loss, ModelLoss) else live_name(loss)
        },
        "batch": {} if size is None else {batch_key: size},
        "evaluation": {} if first is None or first.batch_size is None else {"batch": first.batch_size},
    }
