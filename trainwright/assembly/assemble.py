"""Builds the live objects of a recipe and its plan: datasets, model, loss, state, batches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.assembly.adapters import add_adapters
from trainwright.assembly.checkpointing import checkpointing_as_requested, find_blocks
from trainwright.assembly.linear_layers import convert_linear_layers, note_of
from trainwright.assembly.retain_grad import remedy_for_glob, retain_grad_problems
from trainwright.checkpoint.average import Ema, NoAverage, Swa, WeightAverage
from trainwright.checkpoint.cursor import Cursor, count_tokens
from trainwright.checkpoint.optimizer_modes import names_with_modes, use_training_weights, with_modes
from trainwright.checkpoint.rng import RngBag, seed_all
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import require_python
from trainwright.data.fork import first_samples
from trainwright.data.loading import EvaluationBatches, Loading, StepBatches
from trainwright.data.ready_batches import ReadyBatches, Say, silent
from trainwright.data.unwrap import Unwrapped, length_of, unwrap
from trainwright.distributed import device_name, low_precision
from trainwright.distributed.group import SOLO, World
from trainwright.errors import DataError, Problem, RecipeError, TrainwrightError, UsageError, listed, unknown_args
from trainwright.finetune.audit import tokenized_set_of
from trainwright.finetune.losses import with_reference
from trainwright.finetune.packing import with_packing
from trainwright.models.pretrained import pretrained_of
from trainwright.optim.choose import make_optimizer
from trainwright.optim.groups import GroupRule
from trainwright.optim.schedule import make_schedule
from trainwright.optim.stepped_schedule import (
    ScheduleFn,
    SteppedSchedule,
    convert_schedule,
    function_of_step,
    unchanged,
)
from trainwright.optim.user_optimizers import as_one, takes_first
from trainwright.plan.checkpointing import Checkpointing, describe
from trainwright.plan.duration import Pace, interval
from trainwright.plan.machine import Machine, read_machine
from trainwright.plan.make import Note, Plan, RunFacts, require_fp8
from trainwright.recipe import DATASETS, LOSSES, MODELS, OPTIMIZERS, SCHEDULES, Dataset, Loaded, Recipe
from trainwright.recipe.resolve import find, is_live, make, parameters_of, require_arguments
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE, Evaluation, Fp8
from trainwright.recipe.source import Source

MAX_SAMPLES_TRIED = 16  # number of samples tried until one can be read, to count its tokens


@dataclass(frozen=True)
class CustomObjects:
    """Objects that a caller passed in Python beside model, data and loss.

    Attributes:
        optimizer: One optimizer, several, or a factory; None: the recipe's optimizer.
        schedule: Any form that ``convert_schedule`` accepts; None: the recipe's schedule.
        observers: Called before the observers of the recipe.
        advance: A step function of the user, instead of one made from the loss.
        metrics: In addition to the recipe's metrics.
        generators: Random state at the start of training, if the run does not seed the generators itself.
        rebuild: How to create the objects again, as recorded in the run folder; empty if this is not known.
    """

    optimizer: object = None
    schedule: object = None
    observers: Sequence[object] = ()
    advance: Callable[..., Any] | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    generators: RngBag | None = None
    rebuild: Mapping[str, object] = field(default_factory=dict)


NOTHING_CUSTOM = CustomObjects()


@dataclass(frozen=True)
class Parts:
    """The live objects of a run, named by a recipe or passed in Python.

    Attributes:
        val_sets: The validation sets by name. The first one determines the best checkpoint.
        prepared: True if ``prepare`` has applied the recipe to the model.
    """

    model: nn.Module
    train: Unwrapped
    val_sets: Mapping[str, Unwrapped]
    loss: Callable[..., Any]
    notes: tuple[Note, ...] = ()
    prepared: bool = False
    custom: CustomObjects = NOTHING_CUSTOM

    @property
    def val(self) -> Unwrapped | None:
        """The first validation set."""
        return next(iter(self.val_sets.values()), None)


@contextmanager
def at_recipe(source: Source, path: str) -> Iterator[None]:
    """Context that adds the file and line of the recipe to errors."""
    where = source.where
    try:
        yield
    except RecipeError as error:
        placed = [replace(p, where=p.where or where(p.path or path)) for p in error.problems]
        raise RecipeError(placed) from None
    except UsageError as error:
        if type(error) is not UsageError:  # a missing extra is not an error of the recipe
            raise
        raise RecipeError(Problem(path, error.message, remedy=error.remedy, where=where(path))) from None


def build_parts(loaded: Loaded, device: torch.device, planned: Checkpointing | None = None) -> Parts:
    """Build the objects that the recipe names; ``planned`` is as in ``prepare``.

    Raises RecipeError with file:line for objects that cannot be built.
    """
    recipe = loaded.recipe
    if is_live(recipe.model.use):
        raise UsageError(
            f"the model {recipe.model.use} was passed in Python and cannot be built from a recipe",
            remedy="run the script again with tw.fit(..., resume=<run folder>)",
        )
    seed_all(recipe.seed)
    train = build_dataset(loaded, "train")
    val_sets = {"val": build_dataset(loaded, "val")} if recipe.data.val else {}
    model, notes = build_model(loaded, train)
    for i, each in enumerate(recipe.data.more_val):
        val_sets[each.name] = make_dataset(loaded, each, f"data.more_val.{i}")
    return prepare(Parts(model, train, val_sets, build_loss(loaded), notes), loaded, device, planned)


def loss_by_name(use: str, args: Mapping[str, Any], source: Source) -> Callable[..., Any]:
    """Return the loss with this name. ``args`` are passed to a class or factory, or bound to a function."""
    loss: Callable[..., Any] = find(use, LOSSES, "loss", source)
    if args and not inspect.isclass(loss) and takes_first(loss, "model"):
        require_arguments(partial(loss, None, None), args, use, "loss", source)
        return partial(loss, **args)
    if args or inspect.isclass(loss):
        loss = make(use, args, LOSSES, "loss", source)
    return loss


def build_loss(loaded: Loaded) -> Callable[..., Any]:
    """Return the loss of a recipe. Raises RecipeError if ``chunked`` is set and the loss has no such parameter.

    The recipe's ``args`` are passed to a class or factory, or as further arguments to a function
    ``loss(model, batch, ...)``.
    """
    ask = loaded.recipe.loss
    loss = loss_by_name(ask.use, ask.args, loaded.source)
    has_chunks = "chunked" in parameters_of(loss)
    if ask.chunked == "auto" or not (ask.chunked or has_chunks):
        return loss
    if has_chunks:
        return partial(loss, chunked=ask.chunked)
    remedy, where = "leave it out, or use language_model or hf_causal_lm", loaded.source.where("loss.chunked")
    raise RecipeError(Problem("loss.chunked", f"{ask.use} has no chunks", got="true", remedy=remedy, where=where))


def build_model(loaded: Loaded, train: Unwrapped | None = None) -> tuple[nn.Module, tuple[Note, ...]]:
    """Return the model of a recipe, before LoRA etc. Builds the training set if the model's size depends on it."""
    recipe, where = loaded.recipe, loaded.source.where
    args, notes = _with_classes(loaded, train)
    seed_all(recipe.seed)  # the weights depend on the seed alone, not on how the data were read
    model = make(recipe.model.use, args, MODELS, "model", loaded.source)
    if not isinstance(model, nn.Module):
        got, remedy = type(model).__name__, "return the module from it"
        raise RecipeError(Problem("model.use", "must give an nn.Module", got, remedy, where("model.use")))
    if recipe.model.use in MODELS and pretrained_of(model) is None:
        vars(model)["newly_initialized"] = True  # the doctor reports adapters on weights that are not pretrained
    return model, notes


def prepare(parts: Parts, loaded: Loaded, device: torch.device, planned: Checkpointing | None = None) -> Parts:
    """Apply the recipe to a model: LoRA, freezing, 8-bit layers, activation checkpointing, device, compile.

    ``planned`` is the activation checkpointing of the plan, if the recipe leaves it to the plan. Raises RecipeError,
    also if ``data.quarantine`` has positions beyond the training set.
    """
    recipe = loaded.recipe
    model = parts.model
    notes = list(parts.notes)
    parts = _with_reference(_with_sources(parts, loaded), loaded)
    require_in_set(parts.train, loaded)
    with at_recipe(loaded.source, "model.use"):
        require_ready(model)
    notes += pretrained_notes(model)
    if recipe.model.lora is not None:
        with at_recipe(loaded.source, "model.lora"):
            model, found = add_adapters(model, recipe.model.lora)
        notes += found
    if recipe.model.freeze:
        with at_recipe(loaded.source, "model.freeze"):
            frozen = freeze(model, recipe.model.freeze)
        notes.append(Note("freeze", f"{len(frozen)} parameters", ", ".join(recipe.model.freeze)))
    if recipe.log.retain_grad and (wrong := list(retain_grad_problems(model, recipe))):
        raise RecipeError([replace(each, where=loaded.source.where(each.path)) for each in wrong])
    if recipe.precision in ("fp8", "mxfp8"):
        machine = read_machine()
        with at_recipe(loaded.source, "precision"):
            require_fp8(recipe, device_name(device, machine), low_precision(device, machine))
        if recipe.parallel.tensor != 1:
            rule, remedy = "does not divide 8-bit layers among ranks", "use parallel.shard, or precision: bf16"
            where = loaded.source.where("parallel.tensor")
            raise RecipeError(Problem("parallel.tensor", rule, str(recipe.parallel.tensor), remedy, where))
        settings = recipe.fp8 or Fp8()
        with at_recipe(loaded.source, "fp8"):
            converted = convert_linear_layers(model, recipe.precision, settings)
        notes.append(note_of(converted, recipe.precision, settings))
    if recipe.model.activation_checkpointing != "none":
        with at_recipe(loaded.source, "model.activation_checkpointing"):
            applied = checkpointing_as_requested(model, recipe.model.activation_checkpointing, planned)
        if applied.count:
            notes.append(Note("activation checkpointing", f"{applied.count} blocks", describe(applied)))
    model.to(device)
    if isinstance(parts.loss, nn.Module):  # it may contain class weights, or a frozen teacher
        parts.loss.to(device)
    if not model.training:  # else leave it: train() would also switch modules that the user froze, such as BatchNorm
        model.train()
    if recipe.model.compile:
        with at_recipe(loaded.source, "model.compile"):
            for module in [model] if recipe.model.compile is True else find_blocks(model):
                compile_in_place(module, mode=recipe.model.compile_mode)
    return replace(parts, model=model, notes=tuple(notes), prepared=True)


def pretrained_notes(model: nn.Module) -> Iterator[Note]:
    """Yield notes on the files of a pretrained model, and on names that only the files or only the model has."""
    origin = pretrained_of(model)
    if origin is None:
        return
    yield Note("model", origin.name, f"{type(model).__name__}, {origin.dtype}, revision {origin.revision[:19]}")
    if origin.new:
        why = "these weights are not in the files of the model; a new head is normal"
        yield Note("new weights", listed(origin.new, 4), why)
    if origin.unused:
        yield Note("not used", listed(origin.unused, 4), "the model has no weights of these names in its files")


def _with_sources(parts: Parts, loaded: Loaded) -> Parts:
    """Return the parts with one more validation set per data source, for each set with ``by_source``."""
    val_sets = dict(parts.val_sets)
    for val in parts.val_sets.values():
        found = tokenized_set_of(val.dataset)
        for name, part in (found.sources() if found is not None else {}).items():
            val_sets.setdefault(name, with_packing(unwrap(part), loaded.recipe.data.packing))
    return replace(parts, val_sets=val_sets)


def _with_reference(parts: Parts, loaded: Loaded) -> Parts:
    """Return the parts; if the loss compares with a reference model, samples get keys for its log-probabilities."""
    with at_recipe(loaded.source, "data.train"):
        train = with_reference(parts.loss, parts.train)
    with at_recipe(loaded.source, "data.val"):
        val_sets = {name: with_reference(parts.loss, each) for name, each in parts.val_sets.items()}
    return replace(parts, train=train, val_sets=val_sets)


def gather_facts(
    parts: Parts,
    device: torch.device,
    machine: Machine,
    threads: tuple[int, ...],
    quarantine: Collection[int] = (),
) -> RunFacts:
    """Return the facts of the live objects that the plan needs. Samples in ``quarantine`` are not read."""
    total, trainable = count_parameters(parts.model)
    return RunFacts(
        train_samples=parts.train.samples,
        tokens_per_sample=_tokens_per_sample(parts.train, quarantine),
        parameters=total,
        trainable=trainable,
        device=device.type,
        device_name=device_name(device, machine),
        low_precision=low_precision(device, machine),
        threads=threads,
        classes=getattr(parts.train.dataset, "classes", None),
        notes=(*parts.notes, *_resume_notes(parts.train)),
        own_batches=parts.train.own_batches,
    )


def build_state(parts: Parts, loaded: Loaded, plan: Plan) -> TrainState:
    """Return the state before the first step."""
    optimizer, ask = build_optimizer(parts, loaded, plan), loaded.recipe.model
    if ask.keeps_average and with_modes(optimizer):
        path, names = "model.ema" if ask.ema is not None else "model.swa", names_with_modes(optimizer)
        rule, remedy = f"contradicts the optimizer: {names} averages the weights itself", f"leave {path} out"
        raise RecipeError(Problem(path, rule, remedy=remedy, where=loaded.source.where(path)))
    use_training_weights(optimizer)
    return TrainState(parts.model, optimizer, ema=_build_average(parts, loaded, plan))


def _build_average(parts: Parts, loaded: Loaded, plan: Plan) -> WeightAverage | NoAverage:
    ask = loaded.recipe.model
    if ask.ema is not None:
        return Ema(parts.model, ask.ema)
    if ask.swa is None or plan.swa is None:
        return NoAverage()
    swa = Swa(parts.model, plan.swa.start, plan.swa.every)
    degrees = plan.degrees
    for wrong, what, remedy in (
        (degrees.pipeline > 1, "parallel.pipeline", "leave parallel.pipeline out"),
        (degrees.tensor > 1, "parallel.tensor", "leave parallel.tensor out"),
        (degrees.context > 1, "parallel.context", "leave parallel.context out"),
        (parts.custom.advance is not None, "a step function", "leave model.swa out and average in the step function"),
        (
            plan.steps_per_epoch is None and ask.swa.norm_batches is None,
            "training data without a length",
            "give model.swa.norm_batches",
        ),
    ):
        if wrong and swa.norms:
            rule = f"cannot measure the BatchNorm statistics of the average with {what}"
            raise RecipeError(Problem("model.swa", rule, remedy=remedy, where=loaded.source.where("model.swa")))
    return swa


def build_optimizer(parts: Parts, loaded: Loaded, plan: Plan) -> Optimizer:
    """Return the optimizer that was passed in Python, or that the recipe names."""
    ask, factory = loaded.recipe.optimizer, parts.custom.optimizer
    if factory is None:
        factory = ask.use if ask.use in OPTIMIZERS else find(ask.use, {}, "optimizer", loaded.source)
    with at_recipe(loaded.source, "optimizer"):
        if not isinstance(factory, str) and not callable(factory):
            return as_one(factory, parts.model, parts.loss, closures=parts.custom.advance is not None)
        return make_optimizer(
            factory,
            parts.model,
            lr=plan.lr,
            weight_decay=ask.weight_decay,
            decay_norms_and_biases=ask.decay_norms_and_biases,
            rules=[GroupRule(**group.model_dump()) for group in ask.groups],
            args=ask.args,
            offload=ask.offload is True,
        )


def build_schedule(parts: Parts, loaded: Loaded, plan: Plan, optimizer: Optimizer) -> ScheduleFn | SteppedSchedule:
    """Return the schedule that was passed in Python, or that the recipe names.

    The first parameter of the recipe's callable decides: ``optimizer``: the call returns a scheduler. ``step``: the
    callable is the schedule. Else it is a factory, and is called with ``total``, ``warmup`` and ``floor``.
    """
    ask, source = loaded.recipe.schedule, loaded.source
    shared: dict[str, Any] = {"total": plan.extent.steps, "warmup": plan.warmup, "floor": ask.floor}
    with at_recipe(loaded.source, "schedule"):
        if ask.use == "constant" and not plan.warmup:
            return unchanged
        if ask.use in SCHEDULES:
            return make_schedule(ask.use, **shared, args=ask.args)
        pace = Pace(plan.batch.size, plan.steps_per_epoch)
        every = interval(ask.every, plan.extent, pace, "schedule.every").steps or 1
        if parts.custom.schedule is not None:
            schedule = convert_schedule(parts.custom.schedule, optimizer, every)
            if isinstance(schedule, SteppedSchedule) and plan.extent.steps is not None:
                schedule.require_steps(plan.extent.steps)
            return schedule
        named = find_schedule(loaded)
        if takes_first(named, "optimizer") or takes_first(named, "step"):
            return convert_schedule(partial(named, **ask.args) if ask.args else named, optimizer, every)
        return function_of_step(make(ask.use, {**shared, **ask.args}, {}, "schedule", source))


def find_schedule(loaded: Loaded) -> Callable[..., Any]:
    """Return the callable that a recipe names as its schedule. Raises RecipeError for arguments that it rejects."""
    ask, source = loaded.recipe.schedule, loaded.source
    named = find(ask.use, {}, "schedule", source)
    if takes_first(named, "optimizer"):
        require_arguments(partial(named, None), ask.args, ask.use, "schedule", source)
    elif takes_first(named, "step"):
        wrong = unknown_args(ask.use, "schedule.args", ask.args, list(parameters_of(named))[1:])
        if wrong:
            raise RecipeError([replace(each, where=source.where(each.path)) for each in wrong])
    else:
        given = dict.fromkeys(("total", "warmup", "floor"))
        require_arguments(named, {**given, **ask.args}, ask.use, "schedule", source)
    return named


def draws_as_a_loop(parts: Parts, plan: Plan, *, exact: bool) -> bool:
    """Return True if the user's loader draws from the generators of the process, as in a loop, and not from a seed."""
    return parts.custom.generators is not None and plan.degrees.ranks == 1 and not exact


def build_loading(
    parts: Parts,
    recipe: Recipe,
    plan: Plan,
    device: torch.device,
    *,
    quarantine: Collection[int] = (),
    world: World = SOLO,
) -> Loading:
    """Return the settings of the training batches. ``quarantine`` contains the bad samples found by the run itself.

    A loader that was passed in Python has the same order as in a plain loop over it. But if a seed is requested, or on
    several ranks, which must all draw the same order, the order follows from (seed, epoch).
    """
    pin, own = recipe.data.pin_memory, parts.train.own_batches
    live = draws_as_a_loop(parts, plan, exact=recipe.parallel.exact)
    is_cut = own is None or isinstance(recipe.batch.micro, int)
    return Loading(
        batch_size=plan.batch.size,
        micro_size=plan.batch.micro if is_cut else sys.maxsize,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        drop_last=recipe.data.drop_last,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        timeout_s=recipe.data.timeout.value if recipe.data.timeout else None,
        worker_init=parts.train.worker_init,
        start_method=parts.train.start_method,
        pin_memory=device.type == "cuda" if pin == "auto" else pin,
        device=device,
        collate=parts.train.collate,
        quarantine=frozenset((*recipe.data.quarantine, *quarantine)),
        on_bad_sample=recipe.data.on_bad_sample,
        order=parts.train.order,
        live=live,
        loader=parts.train.loader if live else None,
        joined=1 if own is None else recipe.batch.accumulation or 1,
        rank=world.rank,
        ranks=world.size,
        exact=recipe.parallel.exact,
    )


def training_batches(parts: Parts, loading: Loading, cursor: Cursor, say: Say = silent) -> StepBatches:
    """Return the stream of global batches from ``cursor`` on. Raises DataError if no sample is left."""
    if (size := length_of(parts.train.dataset)) and sum(i < size for i in loading.quarantine) == size:
        remedy = "take those that can be trained on out of data.quarantine"
        raise DataError(f"all {size} samples of the training set are in quarantine", remedy=remedy)
    return StepBatches(parts.train.dataset, loading, cursor=cursor, say=say)


def validation_sets(parts: Parts, ask: Evaluation, loading: Loading) -> dict[str, EvaluationBatches]:
    """Return the batches of each validation set by name, read in this process."""
    return {name: _validation_batches(parts, val, ask, loading) for name, val in parts.val_sets.items()}


def _validation_batches(parts: Parts, val: Unwrapped, ask: Evaluation, loading: Loading) -> EvaluationBatches:
    size = _evaluation_size(parts, val, ask, loading)
    how = replace(
        loading,
        batch_size=size * loading.ranks,
        micro_size=size,
        workers=0,
        collate=val.collate,
        exact=False,
        order=val.order,
        live=False,
        loader=None,
        joined=1,
    )
    limit = ask.batches
    if limit is not None and val.own_batches is None:  # else ranks share each ready-made batch
        limit = -(-limit // loading.ranks)
    return EvaluationBatches(val.dataset, how, limit=limit)


def _evaluation_size(parts: Parts, val: Unwrapped, ask: Evaluation, loading: Loading) -> int:
    """Return the number of samples in a validation micro-batch. Ready-made batches are not cut."""
    if val.own_batches is not None:
        return sys.maxsize
    if loading.micro_size == sys.maxsize:  # the training set has ready-made batches
        return ask.batch or parts.train.batch_size or DEFAULT_BATCH_SIZE
    return ask.batch or loading.micro_size


def _resume_notes(train: Unwrapped) -> Iterator[Note]:
    """Yield notes on how exactly a run can be resumed, if the user's data determine the order."""
    if isinstance(train.dataset, ReadyBatches):
        kind = train.dataset.kind
        why = "a resume reads them again up to where it was, and compares"
        if train.dataset.keeps_state:
            why = "a resume loads the state of the loader, where a checkpoint can keep it; else it reads them again"
        yield Note("data", f"ready batches of a {kind}, ids are positions in an epoch", why)
    if train.order is not None:
        name = type(train.order.sampler).__name__
        why = "drawn again when the run is resumed, and compared with what was trained on"
        if not train.order.repeats:
            why = "it draws from more than the random generators: a resume may repeat or leave out samples, and says so"
        yield Note("order", f"that of the {name}", why)


def build_dataset(loaded: Loaded, which: str) -> Unwrapped:
    """Return the dataset that ``data.train`` or ``data.val`` of a recipe names."""
    return make_dataset(loaded, getattr(loaded.recipe.data, which), f"data.{which}")


def make_dataset(loaded: Loaded, part: Dataset, path: str) -> Unwrapped:
    """Return a dataset that a recipe names at ``path``."""
    args = _with_tokenizer(loaded, part, path)
    made = make(part.use, args, DATASETS, path, loaded.source)
    with at_recipe(loaded.source, path):
        found = unwrap(made)
    with at_recipe(loaded.source, "data.packing"):
        found = with_packing(found, loaded.recipe.data.packing)
    if isinstance(found.dataset, ReadyBatches) and found.dataset.once:  # created again for each epoch

        def create_again() -> object:
            return make(part.use, args, DATASETS, path, loaded.source)

        return Unwrapped(ReadyBatches(create_again, kind=part.use))
    return found


def _with_tokenizer(loaded: Loaded, part: Dataset, path: str) -> Mapping[str, object]:
    """Return the arguments of a dataset, with the tokenizer of a pretrained model if the dataset needs one."""
    model = loaded.recipe.model.args
    name = model.get("name", model.get("pretrained_model_name_or_path"))
    if "tokenizer" in part.args or not isinstance(name, str):
        return part.args
    accepted = parameters_of(find(part.use, DATASETS, path, loaded.source))
    if "tokenizer" not in accepted:
        return part.args
    same = {"tokenizer_revision": "revision", "trust_remote_code": "trust_remote_code"}
    found = {ours: model[theirs] for ours, theirs in same.items() if theirs in model and ours in accepted}
    return {**found, "tokenizer": name, **part.args}


def require_in_set(train: Unwrapped, loaded: Loaded) -> None:
    """Raise RecipeError for positions in quarantine beyond the training set."""
    size, quarantine = length_of(train.dataset), loaded.recipe.data.quarantine
    beyond = [] if size is None else [i for i in quarantine if i >= size]
    if beyond:
        path, rule = "data.quarantine", f"must be positions in the training set, 0 to {(size or 0) - 1}"
        remedy = "leave it out; positions count from 0, in the order of the dataset and not of training"
        got, where = ", ".join(map(str, beyond)), loaded.source.where(path)
        raise RecipeError(Problem(path, rule, got, remedy, where))


def _with_classes(loaded: Loaded, train: Unwrapped | None) -> tuple[dict[str, object], tuple[Note, ...]]:
    """Return the arguments of the model; if missing, the dataset's number of classes or token ids is added."""
    ask, args = loaded.recipe.model, dict(loaded.recipe.model.args)
    accepted = parameters_of(find(ask.use, MODELS, "model", loaded.source))
    name = next((n for n in ("vocab_size", "classes") if n in accepted), None)
    if ask.use == "hf":
        name = "num_labels" if "Classification" in str(args.get("architecture")) else "vocab_size"
        name = None if name == "vocab_size" and "name" in args else name  # pretrained weights define it
    if name is None or name in args:
        return args, ()
    classes = getattr((train or build_dataset(loaded, "train")).dataset, "classes", None)
    if not isinstance(classes, int):
        return args, ()
    return {**args, name: classes}, (Note(name, str(classes), "from the training set"),)


def _tokens_per_sample(data: Unwrapped, quarantine: Collection[int]) -> int:
    known = getattr(data.dataset, "sample_tokens", None)
    if known is not None:
        return int(known)
    if not hasattr(data.dataset, "__getitem__"):
        return 0  # reading a stream would consume its first samples
    for most in (1, MAX_SAMPLES_TRIED):
        for sample in first_samples(data.dataset, most, quarantine):
            try:
                return count_tokens(data.collate([sample]))
            except TrainwrightError:
                raise
            except Exception:
                continue  # reading it for training raises the same error
    return 0


def compile_in_place(model: nn.Module, backend: str = "inductor", mode: str = "default") -> None:
    """Compile like ``model.compile()``, but also a model whose ``forward`` torch defines, such as ``nn.Sequential``.

    torch.compile skips the frames of torch.nn: for such a model ``compile()`` silently compiles nothing, or each of its
    parts separately. Here the call comes from a frame outside torch. The mode ``auto`` is torch's default until another
    one is chosen.
    """
    mode_of_torch = None if mode in ("auto", "default") else mode
    if not type(model).forward.__module__.startswith("torch.nn"):
        model.compile(backend=backend, mode=mode_of_torch)
        return

    def call(*args: object, **kwargs: object) -> object:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, backend=backend, mode=mode_of_torch)


def require_ready(model: nn.Module) -> None:
    """Raise UsageError for weights without shape or memory, and for a model made by torch.jit."""
    require_python(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} of the model has no shape yet (a lazy module)",
                remedy="call the model once on one batch when it is made: model(x[:2])",
            )
        if tensor.is_meta:
            raise UsageError(
                f"{name} of the model is on the meta device and has no values",
                remedy="build the model outside torch.device('meta'), or model.to_empty(device='cpu') and fill it",
            )


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Disable gradients for every parameter whose name matches a glob pattern; return their names.

    Raises UsageError for a pattern that matches nothing, and if nothing is left to train.
    """
    for found in unmatched_patterns(model, patterns):
        raise UsageError(found.rule, remedy=found.remedy)
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names, both valid
    frozen = [name for pattern in patterns for name in named if fnmatchcase(name, pattern)]
    for name in frozen:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("nothing is left to train: every parameter is frozen", remedy="freeze fewer parameters")
    return list(dict.fromkeys(frozen))


def unmatched_patterns(model: nn.Module, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of patterns of ``model.freeze`` that match no parameter name."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for number, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            rule = f"freeze: no parameter is named like {pattern!r}"
            yield Problem(f"model.freeze.{number}", rule, remedy=remedy_for_glob(pattern, names))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters; tied weights count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
