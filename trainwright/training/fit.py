"""``tw.fit``: trains a module that the caller made, on data that the caller has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.assembly.assemble import Parts, build_loss
from trainwright.assembly.model import require_ready
from trainwright.checkpoint.rng import RngBag
from trainwright.data.ready_batches import REPEATABLE_REMEDY, ReadyBatches
from trainwright.data.unwrap import Unwrapped, unwrap
from trainwright.engine.loss import ModelLoss, require_callable
from trainwright.engine.observer import as_observer
from trainwright.errors import UsageError, require_choice
from trainwright.monitoring.signals import hand_over
from trainwright.plan.make import Note
from trainwright.recipe import LOSSES, Loaded, from_mapping
from trainwright.recipe.resolve import import_factory
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.runs.folder import RunFolder
from trainwright.training.arguments import naming_remedies, require_known
from trainwright.training.asked_metrics import MetricsLike, split_metrics
from trainwright.training.made_by import PASSED, Rebuild, made_by, seeded
from trainwright.training.own_step import no_loss, require_no_loss_needed
from trainwright.training.passed import GivenObjects, live_name, passed
from trainwright.training.ready_lists import ready_if_batches
from trainwright.training.result import Result
from trainwright.training.run import train

if TYPE_CHECKING:
    from trainwright.checkpoint.train_state import TrainState
    from trainwright.engine.manual_step import OwnStep
    from trainwright.engine.observer import Observer, Stop
    from trainwright.engine.step import StepResult
    from trainwright.recipe.override import Setting

OptimizerLike: TypeAlias = Optimizer | Sequence[Optimizer] | Callable[..., Optimizer | Sequence[Optimizer]]
ScheduleLike: TypeAlias = (
    LRScheduler | Sequence[LRScheduler] | Callable[..., LRScheduler | Sequence[LRScheduler] | float]
)
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
"""Arguments of ``fit`` that set one key of the recipe, and that key."""
ModelLike: TypeAlias = nn.Module | str | Callable[[], object]
"""A module; or a function that returns what ``tw.fit`` takes, itself or by its name ``module:function``."""


class RunOptions(TypedDict, total=False):
    """The arguments of ``tw.fit`` besides model, data, loss and steps that say what is trained and how."""

    advance: OwnStep | None
    val: object
    until: str | None
    epochs: float | None
    lr: float | None
    batch: int | None
    accumulation: int | None
    optimizer: str | OptimizerLike | None
    schedule: str | ScheduleLike | None
    warmup: str | None
    clip: float | None
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"] | None
    device: str | torch.device | None
    seed: int | None
    preset: Literal["recommended"] | None
    name: str | None
    settings: Mapping[str, object] | None
    metrics: MetricsLike | None
    observers: Sequence[Observer | Callable[[StepResult, TrainState], Stop | None]]
    restore_best: bool
    retain_grad: Sequence[str]


class FitOptions(RunOptions, total=False):
    """With steps, too."""

    steps: int | None


class FitObjects(NamedTuple):
    """The recipe of a call of ``tw.fit``, and its objects."""

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
    resume: str | Path | None = None,
    accept: str | Sequence[str] = (),
    metrics: MetricsLike | None = None,
    observers: Sequence[Observer | Callable[[StepResult, TrainState], Stop | None]] = (),
    restore_best: bool = False,
    retain_grad: Sequence[str] = (),
    on_interrupt: Literal["raise", "return"] = "raise",
    quiet: bool = False,
    serve: bool = False,
) -> Result:
    """Train ``model`` in place and write a run folder.

    What is not asked for does not change the mathematics: with an optimizer the steps are those of the loop
    ``for batch in data: optimizer.zero_grad(); loss(...).backward(); optimizer.step()``, except that an update whose
    gradients are not finite is left out. The start of a run prints every setting and whether it was asked for.
    docs/how-to/train-your-model.md has the table of defaults, and ``tw.verify_plain`` compares with the loop.

    Args:
        model: What is trained. Or a function without arguments, itself or as ``"module:function"``, that returns
            ``(model, data, loss, optimizer)``, fewer of them, or a dict of arguments of ``tw.fit``: the run folder
            then says how to make the objects again, so commands can resume, replay and profile the run.
        data: A Dataset, a DataLoader, a tuple or dict of tensors (or NumPy arrays) of the same length, or ready
            batches: anything else that can be iterated, or a function without arguments that makes such a thing.
            What a DataLoader is made of is kept: its sampler, batches, collate function and workers.
            docs/how-to/data.md says of each kind which sample ids are known and how exactly it is resumed. A dict of
            datasets, such as a DatasetDict, gives the one named train, and as ``val`` the one named validation or val.
        loss: ``loss(output, target)``, such as ``nn.CrossEntropyLoss()``, or ``loss(model, batch)`` (the first
            parameter is named ``model``), which returns a mean or, for exact weighting, a ``tw.Loss(total, weight)``;
            or a name such as ``"cross_entropy"``. None: the model returns its loss itself, as those of
            ``transformers`` do.
        advance: A step of your own, for what no single loss can say: ``step(state, batch)`` calls backward and the
            optimizers itself and returns the loss to log (see docs/how-to/custom-step.md). ``loss`` is then for the
            evaluation.
        val: The validation set, in any form that ``data`` may have, or several by name: ``{"clean": a, "noisy": b}``.
            The batch size of a DataLoader is used for evaluation. The best checkpoint goes by the first set.
        until: The length of the run: ``"5ep"``, ``"1000steps"``, ``"60s"``, ``"5Mtok"``.
        epochs: The same in epochs.
        steps: The same in optimizer steps.
        lr: Peak learning rate; by default that of the optimizer.
        batch: Samples per optimizer step.
        accumulation: Micro-batches per optimizer step. Without ``batch``, a DataLoader's batch is a micro-batch.
        optimizer: A name such as ``"adamw"`` (the default, with the defaults of ``torch.optim.AdamW``), or
            ``"package.module:callable"``; an optimizer over parameters of the model, whose groups and rates stay;
            several over disjoint parameters, which are stepped together; or a class, partial or function that makes
            them (see docs/how-to/train-your-model.md).
        schedule: A name such as ``"cosine"``, or ``"package.module:callable"``; an LRScheduler of torch, or a class,
            partial or function that makes one for ``optimizer``; or a function of the step, or of (step, fraction),
            that gives the factor on the learning rate.
        warmup: The length of the linear warm-up: ``"100steps"``, ``"0.05run"``; by default none.
        clip: The largest global norm of the gradients; by default they are not clipped.
        precision: Arithmetic of the forward and backward pass; by default float32. ``"auto"``: the fastest that the
            device has.
        device: ``"cpu"`` or ``"cuda"``; by default the GPU if there is one.
        seed: Seed of all random numbers, whose generators are put back at the end. By default training draws from the
            generators of the process as they are; the order of data that are no loader is that of the seed 1337.
        preset: ``"recommended"``: precision auto, clipping at norm 1, cosine with warm-up, no weight decay on norms and
            biases; each unless another argument says otherwise.
        name: Name of the run and of its folder.
        settings: Any other key of a recipe, by its path: ``{"optimizer.clip.at": 0.5}``, or nested mappings.
        resume: The folder of an earlier run of the same call, which is continued.
        accept: The paths of differences to that earlier run that are wanted: ``"optimizer.lr"``, or several.
        metrics: What is measured over the whole validation set, and over the training batches since the last record of
            the log: names such as ``["accuracy", "f1"]`` (docs/reference/catalog.md lists them), or a mapping of names
            to objects with ``update(outputs, targets)``, ``compute()`` and ``reset()``, as those of ``torchmetrics``,
            or to functions of all outputs and all targets.
        observers: Functions of ``(result, state)``, or objects whose ``observe(result, state)`` is called after each
            step, and ``close()``, if they have it, at the end. One that returns a ``tw.Stop`` ends the run.
        restore_best: At the end the model gets the weights of the best validation.
        retain_grad: Glob patterns of module names, such as ``["blocks.3.*"]``: now and then, norms and histograms of
            the gradients with respect to their outputs are logged and shown on the page (docs/how-to/see-a-run.md).
        on_interrupt: What follows when a signal (Ctrl-C, SIGTERM, SIGUSR1) has stopped the run and it is saved.
            ``"raise"``: KeyboardInterrupt for Ctrl-C; for the others the handler of your program is called, or the
            process exits with 75 if it has none. ``"return"``: the result, whose ``interrupted_by`` names the signal.
        quiet: Prints nothing.
        serve: Shows the run in a browser while it trains: a process of its own, whose address is printed.

    Raises UsageError or RecipeError for a setting that cannot be used; each error names its remedy. Raises
    KeyboardInterrupt after Ctrl-C, when the run is saved.
    """
    require_choice("on_interrupt", on_interrupt, ("raise", "return"))
    options: FitOptions = {
        "advance": advance,
        "val": val,
        "until": until,
        "epochs": epochs,
        "steps": steps,
        "lr": lr,
        "batch": batch,
        "accumulation": accumulation,
        "optimizer": optimizer,
        "schedule": schedule,
        "warmup": warmup,
        "clip": clip,
        "precision": precision,
        "device": device,
        "seed": seed,
        "preset": preset,
        "name": name,
        "settings": settings,
        "metrics": metrics,
        "observers": observers,
        "restore_best": restore_best,
        "retain_grad": retain_grad,
    }
    loaded, parts = fit_objects(model, data, loss, options)
    result = train(
        loaded,
        parts=parts,
        resume=None if resume is None else RunFolder.open(resume),
        accept=(accept,) if isinstance(accept, str) else tuple(accept),
        quiet=quiet,
        serve=serve,
    )
    if result.interrupted_by and on_interrupt == "raise":
        go_on = f"tw.fit(..., resume={str(result.run)!r})"
        hand_over(result.interrupted_by, f"the run stopped after step {result.step:,}; continue it with {go_on}")
    return result


def fit_objects(
    model: ModelLike,
    data: object,
    loss: str | Callable[..., object] | None,
    options: FitOptions,
    *,
    more: Sequence[Setting] = (),
) -> FitObjects:
    """Returns what a call of ``tw.fit`` trains: its recipe, in which ``more`` replaces values, and its objects.

    Raises UsageError or RecipeError as ``tw.fit`` does.
    """
    require_known("fit", options, [*RunOptions.__annotations__, "steps"])
    if not isinstance(model, nn.Module):
        with seeded(options.get("seed")):
            made = made_by(model, {"data": data, "loss": loss, **options})
        return _fit_objects(made.model, made.data, made.loss, made.options, made.rebuild, more)
    return _fit_objects(model, data, loss, options, PASSED, more)


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
    require_ready(model)
    judge = loss if loss is not None else ModelLoss() if advance is None else no_loss
    if not isinstance(judge, str):
        require_callable(judge)
    named_metrics, own_metrics = split_metrics(options.get("metrics"))
    objects = passed(optimizer, schedule, lr=options.get("lr"), warmup=options.get("warmup"))
    asked = {
        **options,
        "until": _until(options.get("until"), options.get("epochs"), options.get("steps")),
        "optimizer": None if objects.optimizer is not None else optimizer,
        "schedule": None if objects.schedule is not None else schedule,
        "device": None if device is None else str(device),
    }
    by_path = {path: asked[key] for key, path in SHORT_NAMES.items() if asked.get(key) is not None}
    data, val = _split(data, options.get("val"))
    take = partial(_unwrapped, model, judge)
    train_data = take(data, "data")
    sets = {name: take(each, f"val[{name!r}]" if name else "val") for name, each in _by_name(val).items()}
    val_name, val_data = next(iter(sets.items()), ("val", None))
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
    loaded = from_mapping(recipe, overrides=[*overrides, *more], name="tw.fit")
    if judge is no_loss:
        require_no_loss_needed(loaded.recipe)
    is_seeded = "seed" in loaded.stated
    parts = Parts(
        model,
        train_data,
        val_data,
        build_loss(loaded) if isinstance(judge, str) else judge,
        tuple(_not_used(train_data, val_data)),
        optimizer=objects.optimizer,
        schedule=objects.schedule,
        observers=[as_observer(each) for each in options.get("observers", ())],
        advance=advance,
        metrics=own_metrics,
        more_val={name: each for name, each in sets.items() if name != val_name},
        val_name=val_name or "val",
        generators=None if is_seeded else generators,
        rebuild=rebuild._replace(is_seeded=is_seeded)._asdict(),
    )
    return FitObjects(loaded, parts)


def _by_name(val: object) -> dict[str, object]:
    """Several validation sets by their names, one by ""; of a mapping of columns that is the mapping itself."""
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
            f"fit: val is a mapping with {f'the name {strange[0]!r}' if strange else 'nothing in it'}",
            remedy="give validation sets by name: val={'clean': a, 'noisy': b}",
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
    """The training and the validation set of a dict of datasets."""
    if not isinstance(data, Mapping) or isinstance(data.get("train"), Tensor | np.ndarray | None):
        return data, val
    named = next((data[name] for name in ("validation", "val", "valid") if name in data), None)
    return data["train"], named if val is None else val


def _require_usable(train: Unwrapped, sets: Iterable[Unwrapped], batch: int | None) -> None:
    """Raises UsageError for a batch size that the data do not leave open, and for a set that is evaluated only once."""
    if train.own_batches is not None and batch is not None:
        raise UsageError(
            f"fit: batch={batch} contradicts data that come in batches of their own",
            remedy="leave batch out, or give the Dataset itself; accumulation joins several batches to a step",
        )
    for val in sets:
        if isinstance(val.dataset, ReadyBatches) and val.dataset.once:
            raise UsageError(
                f"fit: val: a {val.dataset.kind} can be iterated only once, and an evaluation needs it each time",
                remedy=REPEATABLE_REMEDY,
            )


def _not_used(train: Unwrapped, val: Unwrapped | None) -> Iterator[Note]:
    """What of the given DataLoaders has no effect."""
    for name, why in train.not_used.items():
        yield Note("not used", f"{name} of the DataLoader", why)
    if val is not None and val.workers:
        yield Note(
            "not used", f"num_workers={val.workers} of val", "the validation set is read by the training process"
        )


def _until(until: str | None, epochs: float | None, steps: int | None) -> str | None:
    """The length of the run in the words of a recipe."""
    lengths = {"until": until, "epochs": epochs, "steps": steps}
    named = [name for name, value in lengths.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"the length of the run is given twice: {' and '.join(named)}", remedy="keep one of them")
    if epochs is not None:
        return f"{epochs}ep"
    return until if steps is None else f"{steps}steps"


def _overrides(
    settings: Mapping[str, object], by_path: Mapping[str, object], objects: GivenObjects
) -> list[tuple[str, object]]:
    """Returns paths with their values, a section before the keys inside it.

    Raises UsageError where ``settings`` repeats an argument of ``fit`` or describes an object that it was given.
    """
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"settings is a {type(settings).__name__}", remedy="give a mapping: settings={'optimizer.clip.at': 0.5}"
        )
    overrides = sorted(_flattened(settings), key=lambda override: str(override[0]).count("."))
    for path, _ in overrides:
        _require_new(str(path), by_path, objects)
    return [*overrides, *by_path.items()]


def _require_new(path: str, by_path: Mapping[str, object], objects: GivenObjects) -> None:
    """Raises UsageError where a path of ``settings`` says what another argument of ``fit`` says already."""
    keys = tuple(path.split("."))
    for set_already in by_path:
        if keys[: len(section := tuple(set_already.split(".")))] == section:
            argument = next(name for name, known in SHORT_NAMES.items() if known == set_already)
            raise UsageError(f"{set_already} is given twice: as {argument}= and in settings", remedy="keep one of them")
    if handed := objects.refuses(keys):
        raise UsageError(
            f"settings has {path}, but fit was handed the {handed} itself",
            remedy=f"leave {path} out and make the object that you hand over with what it needs",
        )


def _flattened(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields nested mappings as dotted paths. ``args``, and tables of patterns, are values of their own.

    An empty mapping within a section, as in ``{"model.swa": {}}``, turns its part on.
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
    """Returns a recipe that names the given objects. Such a run can be resumed from Python only.

    ``batch_key`` is what the batch of a DataLoader says: the ``size`` of a step, or ``micro``.
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
