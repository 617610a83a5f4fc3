"""Builds the objects of a run, and adds notes on custom optimizers, schedules and observers to the plan.

Also the limits of a run with a custom step, ``tw.fit(..., advance=step)``, and its plan without a dry run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from trainwright.assembly.assemble import Parts, at_recipe, build_schedule, build_state
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Batch, Loss
from trainwright.engine.metrics import NO_METRICS, MetricSet, metric_set
from trainwright.engine.named_metrics import LossPerplexity, metric_args_of_loss
from trainwright.engine.observer import Observer, as_observer
from trainwright.engine.spikes import NO_SPIKES, SpikeGuard, SpikeHandler
from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.optim.clip import ClipFn, make_clip
from trainwright.optim.schedule import SwaSchedule
from trainwright.optim.stepped_schedule import ScheduleFn, SteppedSchedule
from trainwright.optim.user_optimizers import not_trained
from trainwright.plan.make import Note, Plan
from trainwright.recipe import METRICS, OBSERVERS, OPTIMIZERS, Loaded, Part, Recipe, Row, require_unmasked
from trainwright.recipe.catalog import SPIKE_POLICIES
from trainwright.recipe.resolve import find, import_factory, make, parameters_of

FULL_PRECISIONS = (None, "auto", "fp32", "tf32")
"""Settings of ``precision`` that need no autocast."""


def no_loss(model: nn.Module, batch: Batch) -> Loss:  # noqa: ARG001 - see ``takes_model``
    """Placeholder for the loss of a run that has none. Raises UsageError when called."""
    raise UsageError(
        "the run has a custom step and no loss to evaluate with",
        remedy="pass both: tw.fit(model, data, loss, advance=step)",
    )


def require_loss(parts: Parts | None, verb: str) -> None:
    """Raise UsageError for a run with a custom step and no loss."""
    if parts is not None and parts.loss is no_loss:
        raise UsageError(
            f"{verb} needs a loss, and this run has only a custom step (advance=)",
            remedy="pass the loss that the step computes: loss=...",
        )


def require_custom_step_fits(loaded: Loaded, ranks: int) -> None:
    """Raise UsageError for settings that the engine cannot apply within a custom step."""
    recipe, clip = loaded.recipe, loaded.recipe.optimizer.clip
    asks_to_clip = any(path.startswith("optimizer.clip") for path in loaded.stated)
    for wrong, words, remedy in (
        (ranks > 1, f"it runs in {ranks} processes", "run it in one, or pass a loss instead"),
        (
            recipe.precision not in FULL_PRECISIONS,
            f"precision is {recipe.precision}",
            "leave it out and open torch.autocast inside of the step",
        ),
        (
            asks_to_clip and clip.by != "none",
            f"clipping by {clip.by} is set",
            "leave it out and clip in the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        (
            recipe.spikes.policy not in ("warn", "off"),
            f"spikes.policy is {recipe.spikes.policy}",
            "set it to warn: only the step itself knows which update it could leave out",
        ),
    ):
        if wrong:
            raise UsageError(f"a custom step (advance=) does not work if {words}", remedy=remedy)


def without_dry_run(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan of a custom step. It has no dry run, because the step updates the weights."""
    why = "a custom step updates the weights, so it has no dry run: no times, no memory, no first loss"
    notes = (Note("dry run", "none", why), Note("precision", "fp32", "a custom step opens torch.autocast itself"))
    return replace(plan, precision="tf32" if recipe.precision == "tf32" else "fp32", notes=(*plan.notes, *notes))


CROSS_ENTROPIES = ("cross_entropy", "language_model", "hf_causal_lm")
"""Built-in losses whose mean is the logarithm of the perplexity."""


class Live(NamedTuple):
    """The state, schedule, observers, metrics and clipping of a run, and its plan with notes on custom objects."""

    state: TrainState
    schedule: ScheduleFn | SteppedSchedule
    observers: tuple[Observer, ...]
    plan: Plan
    metrics: MetricSet
    train_metrics: MetricSet
    clip: ClipFn


def build_live(parts: Parts, loaded: Loaded, plan: Plan) -> Live:
    """Build state, schedule, observers and metrics. Raises RecipeError or UsageError for unusable objects."""
    _require_restorable(loaded.recipe, plan)
    state = build_state(parts, loaded, plan)
    schedule = build_schedule(parts, loaded, plan, state.optimizer)
    plan = _with_custom_objects(plan, loaded.recipe, state, schedule)
    made = {**named_metrics(loaded, parts.loss), **parts.custom.metrics}
    _require_named_best(loaded.recipe, made)
    metrics = metric_set(made)
    if metrics and plan.degrees.ranks > 1:
        _require_whole_outputs(plan)
        metrics.require_ranked()
    metrics.to(next(parts.model.parameters()).device)
    train_metrics = metrics.copied() if loaded.recipe.log.metrics else NO_METRICS
    swa = loaded.recipe.model.swa
    if plan.swa is not None and swa is not None and swa.lr is not None:
        schedule = state.stateful["swa"] = SwaSchedule(schedule, state.optimizer, plan.swa, swa.lr, swa.anneal_by)
    clip = make_clip(loaded.recipe.optimizer.clip.by, loaded.recipe.optimizer.clip.at)
    return Live(state, schedule, _make_observers(parts, loaded, state), plan, metrics, train_metrics, clip)


def named_metrics(loaded: Loaded, loss: object) -> dict[str, object]:
    """Return the metrics of a recipe by name. Built-in metrics get the arguments that ``loss`` implies."""
    found: dict[str, object] = {}
    for number, part in enumerate(loaded.recipe.metrics):
        path = f"metrics.{number}"
        if part.shown_name in found:
            what, remedy = f"two metrics are named {part.shown_name!r}", "give one of them another name"
            raise RecipeError(Problem(path, what, remedy=remedy, where=loaded.source.where(path)))
        if part.use == "perplexity" and not part.args and loaded.recipe.loss.use in CROSS_ENTROPIES:
            found[part.shown_name] = LossPerplexity()
        elif part.use in METRICS:
            accepted = parameters_of(import_factory(METRICS[part.use].factory))
            from_loss = {name: value for name, value in metric_args_of_loss(loss).items() if name in accepted}
            found[part.shown_name] = make(part.use, {**from_loss, **part.args}, METRICS, path, loaded.source)
        else:
            found[part.shown_name] = _find_part(part, {}, path, loaded)
    return found


def _require_whole_outputs(plan: Plan) -> None:
    """Raise UsageError for a parallel layout in which no rank has the outputs of full samples."""
    for axis in ("pipeline", "context"):
        if getattr(plan.degrees, axis) > 1:
            raise UsageError(
                f"metrics need the outputs and targets of full samples, which no rank has with parallel.{axis}",
                remedy=f"leave metrics out and evaluate later: trainwright evaluate RUN; or leave parallel.{axis} out",
            )


def _find_part(part: Part, names: Mapping[str, Row], path: str, loaded: Loaded) -> object:
    """Return an instance of the class, or the function with its arguments, that a recipe names."""
    found = find(part.use, names, path, loaded.source)
    if isinstance(found, type):
        return make(part.use, part.args, names, path, loaded.source)
    require_unmasked(part.args, f"{path}.args", loaded.source)
    return partial(found, **part.args) if part.args else found


def _with_custom_objects(plan: Plan, recipe: Recipe, state: TrainState, schedule: ScheduleFn | SteppedSchedule) -> Plan:
    """Return the plan with the learning rate of a custom optimizer, and with notes on custom objects.

    Adds a schedule that has a state to the state of the run.
    """
    notes = [*_optimizer_notes(recipe, state), *_schedule_notes(plan, recipe, schedule)]
    if isinstance(schedule, SteppedSchedule):
        _require_validation(schedule, recipe, schedule.name)
        state.stateful["schedule"] = schedule
    if recipe.optimizer.use in OPTIMIZERS:
        return replace(plan, notes=(*plan.notes, *notes))
    group = state.optimizer.param_groups[0]
    return replace(plan, lr=float(group.get("initial_lr", group["lr"])), notes=(*plan.notes, *notes))


def _make_observers(parts: Parts, loaded: Loaded, state: TrainState) -> tuple[Observer, ...]:
    """Return the observers passed in Python, then the recipe's. Adds observers with a state to the run's state."""
    observers = [as_observer(each) for each in parts.custom.observers]
    for number, part in enumerate(loaded.recipe.observers):
        path = f"observers.{number}"
        found = _find_part(part, OBSERVERS, path, loaded)
        with at_recipe(loaded.source, f"{path}.use"):
            observers.append(as_observer(found))
    for number, each in enumerate(observers):
        _require_validation(each, loaded.recipe, type(each).__name__)
        if callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None)):
            state.stateful[f"observer {number}: {type(each).__name__}"] = each  # type: ignore[assignment]
    return tuple(observers)


def _require_validation(needs: object, recipe: Recipe, name: str) -> None:
    if getattr(needs, "needs_evaluation", False) and recipe.data.val is None:
        raise UsageError(
            f"{name} needs validation results, and there is no validation set",
            remedy="pass val=, or set data.val in a recipe",
        )


def _require_restorable(recipe: Recipe, plan: Plan) -> None:
    """Raise UsageError if ``restore_best`` is set without a best checkpoint, or with several ranks."""
    if not recipe.checkpoint.restore_best:
        return
    if recipe.data.val is None or recipe.checkpoint.best is None:
        raise UsageError(
            "restore_best needs a validation set and checkpoint.best",
            remedy="pass a validation set, and leave checkpoint.best at its default",
        )
    if plan.degrees.ranks > 1:
        raise UsageError(
            "restore_best works on one rank only", remedy="leave it out and run: trainwright export RUN --which best"
        )


def _require_named_best(recipe: Recipe, metrics: Mapping[str, object]) -> None:
    """Raise UsageError if ``checkpoint.best`` has the prefix that other trainers add to the names of metrics."""
    best = recipe.checkpoint.best or "loss"
    plain = best.removeprefix("val_").removeprefix("eval_")
    if plain != best and best not in metrics and plain in ("loss", *metrics):
        raise UsageError(f"checkpoint.best: the validation has no metric {best!r}", remedy=f"did you mean {plain!r}?")


def _optimizer_notes(recipe: Recipe, state: TrainState) -> Iterator[Note]:
    if recipe.optimizer.use in OPTIMIZERS:
        return
    parts = parts_of(state.optimizer)
    if len(parts) > 1:
        yield Note("optimizer", " + ".join(map(_size_text, parts)), "stepped together")
    if left := not_trained(state.optimizer, state.model):
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        yield Note("not trained", f"{len(left)} parameters", f"no optimizer holds {shown}")


def _size_text(optimizer: Optimizer) -> str:
    size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return f"{type(optimizer).__name__} of {size:,} weights"


def _schedule_notes(plan: Plan, recipe: Recipe, schedule: ScheduleFn | SteppedSchedule) -> Iterator[Note]:
    if isinstance(schedule, SteppedSchedule) and not schedule.needs_evaluation:
        epoch = f" (an epoch has {plan.steps_per_epoch:,})" if plan.steps_per_epoch else ""
        why = f"its state is saved; schedule.every: 1ep steps it after each epoch{epoch}"
        yield Note("schedule", f"{schedule.name}, stepped every {recipe.schedule.every}", why)
    elif isinstance(schedule, SteppedSchedule):
        metric = recipe.checkpoint.best or "loss"
        yield Note("schedule", f"{schedule.name}, by {metric} of the validation", "stepped after each evaluation")


def memory_note(optimizer: str, measured: int | None) -> Iterator[Note]:
    """Yield a note if the memory of a custom optimizer was not measured."""
    if optimizer not in OPTIMIZERS and measured is None:
        why = "its state was not measured: the weights are too large or sharded, or the optimizer cannot be copied"
        yield Note("memory", "the optimizer counts as AdamW", why)


def spike_handler(loaded: Loaded) -> SpikeHandler:
    """Return the handler of gradient spikes. For the policy ``warn`` the doctor reports them, not the step."""
    policy = loaded.recipe.spikes.policy
    if policy in ("warn", "off"):
        return NO_SPIKES
    return SpikeGuard(policy if policy in SPIKE_POLICIES else find(policy, {}, "spikes.policy", loaded.source))  # type: ignore[arg-type]
