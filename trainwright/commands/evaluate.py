"""``tw.evaluate``, ``tw.predict`` and their verbs: what a model gives on a dataset, and how good that is."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.commands.chosen_model import ChosenModel, batches_of, chosen_model, loss_of
from trainwright.engine.evaluate import EvaluationResult, evaluating
from trainwright.engine.evaluate import evaluate as evaluate_batches
from trainwright.engine.loss import Batch, Loss, called_with
from trainwright.engine.metrics import NO_METRICS, MetricSet, joined, metric_set, on_host
from trainwright.engine.refusals import explaining
from trainwright.errors import UsageError
from trainwright.runs.storage import storage_error
from trainwright.training.custom_objects import named_metrics
from trainwright.training.metrics_argument import MetricsLike, resolve_metrics
from trainwright.training.result import Result


def evaluate(
    of: nn.Module | Result | str | Path,
    data: object,
    loss: Callable[..., Loss | Tensor] | None = None,
    *,
    metrics: MetricsLike | None = None,
    model: nn.Module | None = None,
    which: str | int = "",
    batch: int | None = None,
    average: bool = False,
) -> EvaluationResult:
    """Returns loss and metrics over the whole of ``data``; the model stays as it is, and in its mode.

    Args:
        of: A model, the result of ``tw.fit``, or a run folder, whose recipe or recorded function builds its model.
        data: Any form that ``tw.fit`` takes; of a run folder also ``"val"``, ``"train"``, a dataset in the box or
            ``"package.module:callable"``.
        loss: As in ``tw.fit``. None: that of the result or of the run's recipe; of a model, the loss that it returns
            itself.
        metrics: As in ``tw.fit``. None: those of the result or of the run's recipe.
        model: Of a run folder of ``tw.fit`` with objects: a model such as it was given, which gets the weights.
        which: The checkpoint of a run folder: last, best or a step; else the best if there is one.
        batch: Samples per forward pass.
        average: The moving average of the weights of a run folder.

    Raises UsageError for what is not there.
    """
    chosen = chosen_model(of, model, str(which), average=average)
    loss = loss_of(chosen, loss)
    found = _metrics_of(chosen, loss) if metrics is None else resolve_metrics(metrics, loss)
    found.to(chosen.device)
    batches = batches_of(chosen, data, batch)
    return evaluate_batches(chosen.model, loss, batches, metrics=found)


def _metrics_of(chosen: ChosenModel, loss: Callable[..., Loss | Tensor]) -> MetricSet:
    if chosen.loaded is not None:
        own = {} if chosen.parts is None else chosen.parts.metrics
        return metric_set({**own, **named_metrics(chosen.loaded, loss)})
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
    """Returns what the model gives for every sample of ``data``, in its order, on the CPU; the logits where it names
    some.

    The last of a tuple of two or more is chosen for the target, and left out; of a mapping, what ``forward`` does not
    take, and ``labels``. The other arguments are those of ``tw.evaluate``.
    """
    chosen = chosen_model(of, model, str(which), average=average)
    outputs = []
    with evaluating(chosen.model), explaining(chosen.model):
        for micro in batches_of(chosen, data, batch):
            outputs.append(
                tree_map_only(Tensor, on_host, _logits(called_with(chosen.model, _inputs(chosen.model, micro.data))))
            )
    return joined(outputs)


def _inputs(model: nn.Module, batch: Batch) -> Batch:
    """What the model is called with: a batch without its target."""
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
    """What ``trainwright evaluate`` prints."""

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
    """``trainwright evaluate``."""
    chosen = chosen_model(run, None, which, average=average)
    batches, loss = batches_of(chosen, data, batch), loss_of(chosen, None)
    found = evaluate_batches(chosen.model, loss, batches, metrics=_metrics_of(chosen, loss))
    return EvaluationReport(run, chosen.step, found)


@dataclass(frozen=True)
class Predictions:
    """What ``trainwright predict`` prints."""

    path: Path
    shapes: tuple[tuple[int, ...], ...]
    exit_code: int = 0

    def lines(self) -> list[str]:
        return [f"{self.path}: {', '.join(map(str, self.shapes))}"]

    def to_json(self) -> dict[str, object]:
        return {"path": str(self.path), "shapes": [list(shape) for shape in self.shapes]}


def predict_run(run: Path, data: str, *, out: Path | None, which: str, batch: int | None, average: bool) -> Predictions:
    """``trainwright predict``: one tensor as .npy, anything as .pt."""
    out = out or run / "predictions.npy"
    if out.suffix not in (".npy", ".pt"):
        raise UsageError(f"{out} is neither .npy nor .pt", remedy="give --out predictions.npy")
    if os.path.lexists(out):
        raise UsageError(f"{out} is there already", remedy="give another file with --out, or remove it")
    found = predict(run, data, which=which, batch=batch, average=average)
    tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
    if out.suffix == ".npy" and not isinstance(found, Tensor):
        raise UsageError(f"the model gives {len(tensors)} tensors, and .npy holds one", remedy="give --out file.pt")
    try:
        if isinstance(found, Tensor) and out.suffix == ".npy":
            with out.open("wb") as file:
                np.save(file, found.numpy())
        else:
            torch.save(found, out)
    except OSError as error:
        raise storage_error(error, out.parent, "write") from None
    return Predictions(out, tuple(tuple(each.shape) for each in tensors))
