"""Finds all problems of a recipe beyond its schema at once.

A run stops at the first object that it cannot build. If the recipe is at fault, the rest of the recipe is then checked
with the functions that a run builds with, so that one message lists all problems.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn

from trainwright.assembly.adapters import add_adapters
from trainwright.assembly.assemble import (
    Parts,
    build_dataset,
    build_loss,
    find_schedule,
    freeze,
    gather_facts,
    make_dataset,
    require_in_set,
    require_ready,
    unmatched_patterns,
)
from trainwright.assembly.checkpointing import find_blocks
from trainwright.assembly.retain_grad import retain_grad_problems
from trainwright.checkpoint.rng import preserved_rng, seed_all
from trainwright.data.unwrap import Unwrapped
from trainwright.errors import MissingExtra, Problem, Problems, RecipeError, TrainwrightError, UsageError
from trainwright.monitoring.alerts import require_channels
from trainwright.monitoring.sinks import sink_factories
from trainwright.optim import schedule as schedules
from trainwright.optim.choose import make_optimizer, wrong_args
from trainwright.optim.groups import GroupRule, unmatched_rules
from trainwright.optim.user_optimizers import wrong_arguments
from trainwright.plan.machine import read_machine
from trainwright.plan.make import arrange, make_plan
from trainwright.plan.trace.blueprint import Blueprint
from trainwright.plan.trace.fake_tensors import fake_tensors
from trainwright.recipe import DATASETS, LOSSES, METRICS, MODELS, OBSERVERS, OPTIMIZERS, SCHEDULES, Loaded, Part, Row
from trainwright.recipe.catalog import SPIKE_POLICIES
from trainwright.recipe.resolve import find, is_live, parameters_of, require_arguments, search_beside
from trainwright.training.custom_objects import no_loss
from trainwright.training.layout import require_layout

CPU = torch.device("cpu")


@contextmanager
def all_problems_reported(loaded: Loaded, parts: Parts | None = None, ranks: int = 1) -> Iterator[None]:
    """Add all other problems of the recipe to a RecipeError that is raised inside.

    ``parts`` are live objects that replace the objects named by the recipe.
    """
    try:
        yield
    except (RecipeError, MissingExtra) as error:
        found = problems_of(loaded, parts, ranks)
        if not found:
            raise
        known = {each.rule for each in found}
        first = error.problems if isinstance(error, RecipeError) else ()
        raise RecipeError(_in_order([*(each for each in first if each.rule not in known), *found], loaded)) from None


def problems_of(
    loaded: Loaded, parts: Parts | None = None, ranks: int = 1, *, elsewhere: bool = False
) -> list[Problem]:
    """Return all problems of a recipe that can be found without training, each with its place in the file.

    The datasets are built, and the model without memory for its weights. Random generators are unchanged. With
    ``elsewhere`` the recipe is for another machine, so no data are read, and modules that are missing here are skipped.
    """
    with preserved_rng():
        found = _Examination(loaded, parts, ranks, elsewhere).run()
    return _in_order(found, loaded)


def _in_order(problems: Sequence[Problem], loaded: Loaded) -> list[Problem]:
    """Return the problems with their places, in the order of the file, without duplicates."""
    where, place = loaded.source.where, loaded.source.place
    once = {(each.path, each.rule): replace(each, where=each.where or where(each.path)) for each in problems}
    return sorted(once.values(), key=lambda each: place(each.path))


class _Examination:
    """Builds one part of a recipe after the other and collects the errors."""

    def __init__(self, loaded: Loaded, parts: Parts | None, ranks: int, elsewhere: bool) -> None:
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.parts = parts
        self.ranks = ranks
        self.elsewhere, self.problems = elsewhere, Problems()

    def run(self) -> list[Problem]:
        search_beside(self.loaded.source)
        train, val = self._datasets()
        model = self._model(train)
        if model is not None:
            self._model_settings(model)
        self._loss()
        self._optimizer_and_schedule()
        self._rest()
        with self._at("parallel"):
            arrange(self.recipe, self.ranks)
        with self._at("parallel"):
            require_layout(self.loaded, self.parts, self.ranks)
        if train is not None:
            self._plan(train, val)
        return self.problems.found

    @contextmanager
    def _at(self, path: str) -> Iterator[None]:
        """Collect problems. Other exceptions of user code are left to the run, which shows their origin."""
        with suppress(Exception), self.problems.at(path):
            yield

    def _is_here(self, use: str, names: Mapping[str, Row]) -> bool:
        """Return True if ``use`` must be checked; False for live objects and, with ``elsewhere``, missing modules."""
        if is_live(use):
            return False
        if not self.elsewhere or use in names:
            return True
        return importlib.util.find_spec(use.partition(":")[0].partition(".")[0]) is not None

    def _datasets(self) -> tuple[Unwrapped | None, Unwrapped | None]:
        if self.parts is not None:
            return self.parts.train, self.parts.val
        train = val = None
        if self.elsewhere:
            named = {"data.train": self.recipe.data.train, "data.val": self.recipe.data.val}
            named |= {f"data.more_val.{number}": each for number, each in enumerate(self.recipe.data.more_val)}
            for path, part in named.items():
                if part is not None:
                    self._part(part, DATASETS, path, of_class=False)
            return None, None
        seed_all(self.recipe.seed)
        with self._at("data.train.use"):
            train = build_dataset(self.loaded, "train")
            require_in_set(train, self.loaded)
        if self.recipe.data.val is not None:
            with self._at("data.val.use"):
                val = build_dataset(self.loaded, "val")
        for number, each in enumerate(self.recipe.data.more_val):
            with self._at(f"data.more_val.{number}.use"):
                make_dataset(self.loaded, each, f"data.more_val.{number}")
        return train, val

    def _model(self, train: Unwrapped | None) -> nn.Module | None:
        """Return the model, or a copy of a live one, without memory; None if that is not possible."""
        ask, live = self.recipe.model, self.parts.model if self.parts else None
        if live is None and not self._is_here(ask.use, MODELS):
            return None
        with self._at("model.use"):
            if train is not None:
                return _without_memory(Blueprint(self.loaded, train, no_loss, None, live))
            factory = find(ask.use, MODELS, "model", self.loaded.source)
            of_data = {name: 0 for name in ("vocab_size", "classes") if name in parameters_of(factory)}
            require_arguments(factory, {**of_data, **ask.args}, ask.use, "model", self.loaded.source)
        return None

    def _model_settings(self, model: nn.Module) -> None:
        ask = self.recipe.model
        if ask.lora is not None:
            with self._at("model.lora"), fake_tensors():
                model, _ = add_adapters(model, ask.lora, is_simulated=True)
        wrong = list(unmatched_patterns(model, ask.freeze))
        self.problems.found += wrong
        if ask.freeze and not wrong:
            with self._at("model.freeze"):
                freeze(model, ask.freeze)
        if ask.activation_checkpointing in ("block", "selective"):
            with self._at("model.activation_checkpointing"):
                find_blocks(model)
        if ask.compile == "blocks":
            with self._at("model.compile"):
                find_blocks(model)
        self.problems.found += retain_grad_problems(model, self.recipe)
        rules = [GroupRule(**group.model_dump()) for group in self.recipe.optimizer.groups]
        self.problems.found += unmatched_rules(model, rules)

    def _loss(self) -> None:
        if self.parts is None and self._is_here(self.recipe.loss.use, LOSSES):
            with self._at("loss.use"):
                build_loss(self.loaded)

    def _optimizer_and_schedule(self) -> None:
        optimizer, schedule = self.recipe.optimizer, self.recipe.schedule
        if optimizer.use in OPTIMIZERS:
            wrong = list(wrong_args(optimizer.use, optimizer.args))
            self.problems.found += wrong
            if not wrong:
                with self._at("optimizer"):  # finds invalid values; any model will do
                    make_optimizer(
                        optimizer.use,
                        nn.Linear(2, 2),
                        lr=optimizer.lr,
                        weight_decay=optimizer.weight_decay,
                        args=optimizer.args,
                    )
        elif self._is_here(optimizer.use, {}):
            with self._at("optimizer.use"):
                found = find(optimizer.use, {}, "optimizer", self.loaded.source)
                self.problems.found += wrong_arguments(found, optimizer.args)
        if schedule.use in SCHEDULES:
            self.problems.found += schedules.wrong_args(schedule.use, schedule.args)
        elif self._is_here(schedule.use, {}):
            with self._at("schedule.use"):
                find_schedule(self.loaded)

    def _rest(self) -> None:
        recipe = self.recipe
        for number, metric in enumerate(recipe.metrics):
            self._part(metric, METRICS, f"metrics.{number}", of_class=metric.use not in METRICS)
        for number, observer in enumerate(recipe.observers):
            self._part(observer, OBSERVERS, f"observers.{number}")
        if recipe.spikes.policy not in SPIKE_POLICIES and self._is_here(recipe.spikes.policy, {}):
            with self._at("spikes.policy"):
                find(recipe.spikes.policy, {}, "spikes.policy", self.loaded.source)
        if self.elsewhere:
            return
        with self._at("alerts"):
            require_channels(recipe.alerts)
        with self._at("log.sinks"):
            sink_factories(recipe.log.sinks)

    def _part(self, part: Part, names: Mapping[str, Row], path: str, *, of_class: bool = True) -> None:
        """Check a callable and its arguments.

        With ``of_class``, arguments are checked for a class only, because a function gets further arguments.
        """
        if not self._is_here(part.use, names):
            return
        with self._at(f"{path}.use"):
            found = find(part.use, names, path, self.loaded.source)
            if inspect.isclass(found) or not of_class:
                require_arguments(found, part.args, part.use, path, self.loaded.source)

    def _plan(self, train: Unwrapped, val: Unwrapped | None) -> None:
        """Check durations and batch size against the size of the data. A stream is skipped, because its epoch has to be
        counted.
        """
        if train.samples is None:
            return
        facts = None
        with suppress(TrainwrightError):
            left_out = frozenset(self.recipe.data.quarantine)
            parts = Parts(nn.Module(), train, {} if val is None else {"val": val}, no_loss)
            facts = gather_facts(parts, CPU, read_machine(), (1,), left_out)
        if facts is not None:
            with self._at(""):
                make_plan(self.recipe, facts, ranks=self.ranks)


def _without_memory(blueprint: Blueprint) -> nn.Module | None:
    """Return the model without memory for its weights; None if its code needs real memory."""
    try:
        with fake_tensors():
            model = blueprint.bare_model(CPU)
    except RecipeError:
        raise
    except UsageError:
        return None
    require_ready(model)
    return model
