"""Resolves the arguments of ``tw.evaluate``, ``tw.predict`` and ``tw.bad_cases`` to a model, its loss and a dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trainwright.assembly.assemble import Parts, build_dataset, build_loss
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import read_best
from trainwright.checkpoint.weights import load_plain_state_dict, read_weights
from trainwright.commands.export import chosen_checkpoint, rebuilt
from trainwright.data.loading import EvaluationBatches, Loading
from trainwright.data.unwrap import Unwrapped, unwrap
from trainwright.engine.loss import Loss, ModelLoss
from trainwright.errors import UsageError, text_of
from trainwright.recipe import DATASETS, Loaded, load
from trainwright.recipe.resolve import LIVE, is_live, make
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.training.result import Result
from trainwright.training.subject import parts_of_run

RUN_SETS = ("train", "val")


@dataclass(frozen=True)
class ChosenModel:
    """A model and its origin.

    Attributes:
        model: The model.
        loaded: The recipe, if the model is that of a run folder.
        step: The step of its checkpoint.
        result: The result of ``tw.fit``, if the model is from it.
        parts: The objects of a run that its recorded function built.
    """

    model: nn.Module
    loaded: Loaded | None = None
    step: int | None = None
    result: Result | None = None
    parts: Parts | None = None

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def chosen_model(of: object, model: nn.Module | None, which: str, *, average: bool) -> ChosenModel:
    """Return the model of ``of``: a model, the result of ``tw.fit``, or a run folder with a checkpoint. Raises
    UsageError for other values.

    ``which`` "": the best checkpoint, or the last if there is no best.
    """
    result = of if isinstance(of, Result) else None
    if result is not None and result.state is not None:
        of = result.state.model
    if isinstance(of, nn.Module):
        if model is not None or which or average:
            raise UsageError(
                "model=, which= and average= need a run folder, and a model was passed",
                remedy="leave them out, or pass the run folder: tw.evaluate('runs/run', data)",
            )
        return ChosenModel(of, result=result)
    if not isinstance(of, str | Path):
        raise UsageError(
            f"a {type(of).__name__} cannot be evaluated", remedy="pass a model, the result of tw.fit, or a run folder"
        )
    folder = RunFolder.open(of)
    loaded = load(folder.recipe, environ={})
    if not which:
        which = "last" if read_best(folder.checkpoints, identity_of(folder)) is None else "best"
    checkpoint, _ = chosen_checkpoint(folder, which)
    weights = read_weights(checkpoint, average=average)
    parts = None
    if model is not None:
        with _fitting(folder):
            load_plain_state_dict(model, weights)
    elif is_live(loaded.recipe.model.use):
        parts = parts_of_run(
            folder, remedy=f"in Python: tw.evaluate({str(folder.path)!r}, data, loss, model=your_model)"
        )
        model = rebuilt(folder, loaded, weights, parts.model)
    else:
        model = rebuilt(folder, loaded, weights)
    return ChosenModel(model, loaded, step_of(checkpoint), parts=parts)


@contextmanager
def _fitting(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"the weights of {folder.path} do not fit the model: {text_of(error)[:300]}",
            remedy="pass a model with the architecture of the trained one",
        ) from None


def loss_of(chosen: ChosenModel, given: Callable[..., Loss | Tensor] | None) -> Callable[..., Loss | Tensor]:
    """Return the passed loss, the loss of the result or of the run's recipe, or the loss that the model returns."""
    if given is not None:
        return given
    if chosen.loaded is None:
        return ModelLoss() if chosen.result is None or chosen.result.loss_fn is None else chosen.result.loss_fn
    if chosen.parts is not None:
        return chosen.parts.loss
    use = chosen.loaded.recipe.loss.use
    if is_live(use):
        raise UsageError(
            f"the loss {use.removeprefix(f'{LIVE}:')} of the run was passed in Python", remedy="pass it: loss=..."
        )
    return build_loss(chosen.loaded)


def batches_of(chosen: ChosenModel, data: object, batch: int | None) -> EvaluationBatches:
    """Return the batches of a dataset in order. A string names a set of the run, or a dataset as in a recipe."""
    if isinstance(data, str):
        unwrapped = _named(chosen, data)
    else:
        unwrapped = unwrap(data)
    size = batch or unwrapped.batch_size or DEFAULT_BATCH_SIZE
    if unwrapped.own_batches is not None:
        size = sys.maxsize
    how = Loading(size, size, device=chosen.device, collate=unwrapped.collate, order=unwrapped.order)
    return EvaluationBatches(unwrapped.dataset, how)


def _named(chosen: ChosenModel, name: str) -> Unwrapped:
    loaded, parts = chosen.loaded, chosen.parts
    if loaded is None:
        raise UsageError(
            f"the data is the text {name!r}", remedy="pass the dataset itself: only a run folder has names"
        )
    if name not in RUN_SETS:
        return unwrap(make(name, {}, DATASETS, "DATA", loaded.source))
    if parts is not None and (made := parts.train if name == "train" else parts.val) is not None:
        return made
    part = getattr(loaded.recipe.data, name)
    if part is None or is_live(part.use):
        why = "has none" if part is None else "received it from Python"
        raise UsageError(
            f"the {name} set of the run is not in its recipe, which {why}",
            remedy="name another: package.module:callable, or pass the dataset itself in Python",
        )
    return build_dataset(loaded, name)
