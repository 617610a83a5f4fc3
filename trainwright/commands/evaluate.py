"""``tw.evaluate``, ``tw.predict`` and their commands: loss, metrics and predictions of a model on a dataset.

``chosen_model``, ``loss_of`` and ``batches_of`` resolve their arguments, and the arguments of ``tw.bad_cases``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.assembly.assemble import Parts, build_dataset, build_loss, loss_by_name
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import read_best
from trainwright.checkpoint.weights import load_plain_state_dict, read_weights
from trainwright.commands.export import chosen_checkpoint, rebuilt
from trainwright.data.loading import EvaluationBatches, Loading
from trainwright.data.unwrap import Unwrapped, unwrap
from trainwright.engine.evaluate import EvaluationResult, evaluating
from trainwright.engine.evaluate import evaluate as evaluate_batches
from trainwright.engine.input_errors import explaining
from trainwright.engine.loss import Batch, Loss, ModelLoss, called_with
from trainwright.engine.metrics import NO_METRICS, MetricSet, joined, metric_set, on_host
from trainwright.errors import UsageError, text_of
from trainwright.recipe import DATASETS, Loaded, load
from trainwright.recipe.resolve import LIVE, is_live, make
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.recipe.source import Source
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.storage import storage_error
from trainwright.training.arguments import resolve_metrics
from trainwright.training.custom_objects import named_metrics
from trainwright.training.options import MetricsLike
from trainwright.training.result import Result
from trainwright.training.subject import parts_of_run

RUN_SETS = ("train", "val")


@dataclass(frozen=True)
class ChosenModel:
    """A model and its origin: a run folder (``loaded`` and ``step``), a result of ``tw.fit``, or neither.

    ``parts`` are the objects that the recorded function of a run built.
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
        try:
            load_plain_state_dict(model, weights)
        except RuntimeError as error:
            raise UsageError(
                f"the weights of {folder.path} do not fit the model: {text_of(error)[:300]}",
                remedy="pass a model with the architecture of the trained one",
            ) from None
    elif is_live(loaded.recipe.model.use):
        parts = parts_of_run(
            folder, remedy=f"in Python: tw.evaluate({str(folder.path)!r}, data, loss, model=your_model)"
        )
        model = rebuilt(folder, loaded, weights, parts.model)
    else:
        model = rebuilt(folder, loaded, weights)
    return ChosenModel(model, loaded, step_of(checkpoint), parts=parts)


def loss_of(chosen: ChosenModel, loss: str | Callable[..., Loss | Tensor] | None) -> Callable[..., Loss | Tensor]:
    """Return ``loss``; for a name the loss with that name; for None the loss of the run or of the result, or for a
    model the loss that it returns.
    """
    if isinstance(loss, str):
        return loss_by_name(loss, {}, Source("loss"))
    if loss is not None:
        return loss
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
    unwrapped = _named(chosen, data) if isinstance(data, str) else unwrap(data)
    size = batch or unwrapped.batch_size or DEFAULT_BATCH_SIZE
    if unwrapped.own_batches is not None:
        size = sys.maxsize  # the user's batches are not divided
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


def evaluate(
    of: nn.Module | Result | str | Path,
    data: object,
    loss: str | Callable[..., Loss | Tensor] | None = None,
    *,
    metrics: MetricsLike | None = None,
    model: nn.Module | None = None,
    which: str | int = "",
    batch: int | None = None,
    average: bool = False,
) -> EvaluationResult:
    """Return loss and metrics over all of ``data``. The model and its mode are unchanged.

    Args:
        of: A model, the result of ``tw.fit``, or a run folder, whose recipe or recorded function builds the model.
        data: Any form that ``tw.fit`` accepts. For a run folder also ``"val"``, ``"train"``, the name of a built-in
            dataset, or ``"package.module:callable"``.
        loss: As in ``tw.fit``. None: the loss of the result or of the run's recipe, or for a model the loss that it
            returns itself.
        metrics: As in ``tw.fit``. None: the metrics of the result or of the run's recipe.
        model: For a run folder of ``tw.fit`` with objects: a model of the same architecture, which receives the
            weights.
        which: The checkpoint of a run folder: last, best or a step. Default: the best if there is one, else the last.
        batch: Samples per forward pass.
        average: Use the moving average of the weights of a run folder.

    Returns:
        The loss, the metrics by name, and the number of samples or tokens that they count.

    Raises:
        UsageError: The model, checkpoint, data or loss does not exist or cannot be used.
    """
    chosen = chosen_model(of, model, str(which), average=average)
    loss_fn = loss_of(chosen, loss)
    found = _metrics_of(chosen, loss_fn) if metrics is None else resolve_metrics(metrics, loss_fn)
    found.to(chosen.device)
    batches = batches_of(chosen, data, batch)
    return _evaluated(chosen, loss_fn, batches, found)


def _evaluated(
    chosen: ChosenModel, loss: Callable[..., Loss | Tensor], batches: Iterable[MicroBatch], metrics: MetricSet
) -> EvaluationResult:
    seen = evaluate_batches(chosen.model, loss, batches, metrics=metrics)
    with evaluating(chosen.model):
        return replace(seen, metrics={**seen.metrics, **metrics.measure(chosen.model)})


def _metrics_of(chosen: ChosenModel, loss: Callable[..., Loss | Tensor]) -> MetricSet:
    if chosen.loaded is not None:
        custom = {} if chosen.parts is None else chosen.parts.custom.metrics
        return metric_set({**custom, **named_metrics(chosen.loaded, loss)})
    return NO_METRICS if chosen.result is None else chosen.result.metric_set


def predict(
    of: nn.Module | Result | str | Path,
    data: object,
    *,
    model: nn.Module | None = None,
    which: str | int = "",
    batch: int | None = None,
    average: bool = False,
) -> object:
    """Return the outputs of the model for every sample of ``data``, in order, on the CPU; the logits if outputs have
    any.

    Targets are left out: the last item of a tuple of two or more, or ``labels`` of a mapping. Keys of a mapping that
    ``forward`` does not accept are left out, too. The other arguments are those of ``tw.evaluate``.
    """
    chosen = chosen_model(of, model, str(which), average=average)
    found = chosen.model
    with evaluating(found), explaining(found):
        outputs = [
            tree_map_only(Tensor, on_host, _logits(called_with(found, _inputs(found, micro.data))))
            for micro in batches_of(chosen, data, batch)
        ]
    return joined(outputs)


def _inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch without its target, as the model is called with it."""
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return {name: each for name, each in batch.items() if name != "labels" and (takes_any or name in parameters)}
    return batch[:-1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch


def _logits(output: object) -> object:
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


@dataclass(frozen=True)
class EvaluationReport:
    """The output of ``trainwright evaluate``."""

    run: Path
    step: int | None
    result: EvaluationResult
    exit_code: int = 0

    def lines(self) -> list[str]:
        figures = [f"  {name:<12} {value:.6g}" for name, value in self.result.figures.items()]
        return [f"{self.run}, step {self.step}, over {self.result.weight:,.6g}", *figures]

    def to_json(self) -> dict[str, object]:
        return {"run": str(self.run), "step": self.step, "weight": self.result.weight, **self.result.figures}


def evaluate_run(run: Path, data: str, *, which: str, batch: int | None, average: bool) -> EvaluationReport:
    """Evaluate the checkpoint ``which`` of a run on ``data``, with the loss and the metrics of its recipe."""
    chosen = chosen_model(run, None, which, average=average)
    batches, loss = batches_of(chosen, data, batch), loss_of(chosen, None)
    found = _evaluated(chosen, loss, batches, _metrics_of(chosen, loss))
    return EvaluationReport(run, chosen.step, found)


@dataclass(frozen=True)
class Predictions:
    """The output of ``trainwright predict``."""

    path: Path
    shapes: tuple[tuple[int, ...], ...]
    exit_code: int = 0

    def lines(self) -> list[str]:
        return [f"{self.path}: {', '.join(map(str, self.shapes))}"]

    def to_json(self) -> dict[str, object]:
        return {"path": str(self.path), "shapes": [list(shape) for shape in self.shapes]}


def predict_run(run: Path, data: str, *, out: Path | None, which: str, batch: int | None, average: bool) -> Predictions:
    """Write the predictions for ``trainwright predict``: one tensor as .npy, any object as .pt."""
    out = out or run / "predictions.npy"
    if out.suffix not in (".npy", ".pt"):
        raise UsageError(f"{out} is neither .npy nor .pt", remedy="give --out predictions.npy")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already", remedy="give another file with --out, or remove it")
    found = predict(run, data, which=which, batch=batch, average=average)
    tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
    if out.suffix == ".npy" and not isinstance(found, Tensor):
        kind = type(found).__name__
        raise UsageError(f"the model returns a {kind}, and .npy holds one tensor", remedy="give --out file.pt")
    try:
        if isinstance(found, Tensor) and out.suffix == ".npy":
            with out.open("wb") as file:
                np.save(file, found.numpy())
        else:
            torch.save(found, out)
    except OSError as error:
        raise storage_error(error, out.parent, "write") from None
    return Predictions(out, tuple(tuple(each.shape) for each in tensors))
