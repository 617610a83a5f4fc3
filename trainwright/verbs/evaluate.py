"""``tw.evaluate``, ``tw.predict`` and their verbs: what a model gives on a dataset, and how good that is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.build.assemble import LIVE, build_dataset, build_loss
from trainwright.build.data import EvaluationBatches, Loading
from trainwright.build.resolve import make
from trainwright.build.unwrap import Unwrapped, unwrap
from trainwright.engine.evaluate import EvaluationResult, evaluating
from trainwright.engine.evaluate import evaluate as evaluate_batches
from trainwright.engine.loss import Batch, Loss, OfModel, called_with
from trainwright.engine.metrics import Metric, joined, metric_set, on_host
from trainwright.errors import UsageError, text_of
from trainwright.recipe import DATASETS, Loaded, load
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.storage import storage_error
from trainwright.state.manifest import step_of
from trainwright.state.store import read_best
from trainwright.state.weights import load_plain_state_dict, read_weights
from trainwright.training.own_objects import named_metrics
from trainwright.training.result import Result
from trainwright.verbs.export import chosen_checkpoint, rebuilt

OWN_SETS = ("train", "val")


def evaluate(
    of: nn.Module | Result | str | Path,
    data: object,
    loss: Callable[..., Loss | Tensor] | None = None,
    *,
    metrics: Mapping[str, Metric | Callable[..., object]] | None = None,
    model: nn.Module | None = None,
    which: str | int = "",
    batch: int | None = None,
    average: bool = False,
) -> EvaluationResult:
    """Returns loss and metrics over the whole of ``data``; the model stays as it is, and in its mode.

    Args:
        of: A model, the result of ``tw.fit``, or a run folder, whose recipe says how its model is built.
        data: Any form that ``tw.fit`` takes; of a run folder also ``"val"``, ``"train"``, a dataset in the box or
            ``"package.module:callable"``.
        loss: As in ``tw.fit``. None: that of the run's recipe; of a model, the loss that it returns itself.
        metrics: As in ``tw.fit``. None: those of the run's recipe.
        model: Of a run folder that ``tw.fit`` wrote: a model such as it was given, which gets the weights.
        which: The checkpoint of a run folder: last, best or a step; else the best if there is one.
        batch: Samples per forward pass.
        average: The moving average of the weights of a run folder.

    Raises UsageError for what is not there.
    """
    taken = _taken(of, model, str(which), average=average)
    found = metric_set(dict(named_metrics(taken.loaded)) if metrics is None and taken.loaded else metrics or {})
    found.to(taken.device)
    batches = _batches(taken, data, batch)
    return evaluate_batches(taken.model, _loss(taken, loss), batches, metrics=found)


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

    The last of a tuple of two or more is taken for the target, and left out; of a mapping, what ``forward`` does not
    take, and ``labels``. The other arguments are those of ``tw.evaluate``.
    """
    taken = _taken(of, model, str(which), average=average)
    outputs = []
    with evaluating(taken.model):
        for micro in _batches(taken, data, batch):
            outputs.append(
                tree_map_only(Tensor, on_host, _logits(called_with(taken.model, _inputs(taken.model, micro.data))))
            )
    return joined(outputs)


@dataclass(frozen=True)
class _Taken:
    """A model, and the recipe and step that it is of, where it is that of a run folder."""

    model: nn.Module
    loaded: Loaded | None = None
    step: int | None = None

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def _taken(of: object, model: nn.Module | None, which: str, *, average: bool) -> _Taken:
    if isinstance(of, Result) and of.state is not None:
        of = of.state.model
    if isinstance(of, nn.Module):
        if model is not None or which or average:
            raise UsageError(
                "model, which and average are of a run folder, and a model was given",
                remedy="leave them out, or give the run folder: tw.evaluate('runs/run', data)",
            )
        return _Taken(of)
    if not isinstance(of, str | Path):
        raise UsageError(
            f"a {type(of).__name__} cannot be evaluated", remedy="give a model, the result of tw.fit, or a run folder"
        )
    folder = RunFolder.open(of)
    loaded = load(folder.recipe, environ={})
    if not which:
        which = "last" if read_best(folder.checkpoints) is None else "best"
    checkpoint, _ = chosen_checkpoint(folder, which)
    weights = read_weights(checkpoint, average=average)
    if model is None:
        if loaded.recipe.model.use.startswith(f"{LIVE}:"):
            raise UsageError(
                f"the model {loaded.recipe.model.use.removeprefix(f'{LIVE}:')} of {folder.path} was passed in Python, "
                "and no file says how it is built",
                remedy=f"in Python: tw.evaluate({str(folder.path)!r}, data, loss, model=your_model), or tw.predict",
            )
        model = rebuilt(loaded, weights)
    else:
        with _fitting(folder):
            load_plain_state_dict(model, weights)
    return _Taken(model, loaded, step_of(checkpoint))


@contextmanager
def _fitting(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"the weights of {folder.path} do not fit the model: {text_of(error)[:300]}",
            remedy="give a model such as it was trained",
        ) from None


def _loss(taken: _Taken, given: Callable[..., Loss | Tensor] | None) -> Callable[..., Loss | Tensor]:
    if given is not None:
        return given
    if taken.loaded is None:
        return OfModel()
    use = taken.loaded.recipe.loss.use
    if use.startswith(f"{LIVE}:"):
        raise UsageError(
            f"the loss {use.removeprefix(f'{LIVE}:')} of the run was passed in Python", remedy="give it: loss=..."
        )
    return build_loss(taken.loaded)


def _batches(taken: _Taken, data: object, batch: int | None) -> EvaluationBatches:
    if isinstance(data, str):
        unwrapped = _named(taken.loaded, data)
    else:
        unwrapped = unwrap(data)
    size = batch or unwrapped.batch_size or DEFAULT_BATCH_SIZE
    if unwrapped.own_batches is not None:
        size = sys.maxsize
    how = Loading(size, size, device=taken.device, collate=unwrapped.collate, order=unwrapped.order)
    return EvaluationBatches(unwrapped.dataset, how)


def _named(loaded: Loaded | None, name: str) -> Unwrapped:
    if loaded is None:
        raise UsageError(
            f"the data is the text {name!r}", remedy="give the dataset itself: only a run folder has names"
        )
    if name not in OWN_SETS:
        return unwrap(make(name, {}, DATASETS, "DATA", loaded.source))
    part = getattr(loaded.recipe.data, name)
    if part is None or part.use.startswith(f"{LIVE}:"):
        why = "has none" if part is None else "got it in Python"
        raise UsageError(
            f"the {name} set of the run is not in its recipe, which {why}",
            remedy="name another: package.module:callable, or give the dataset itself in Python",
        )
    return build_dataset(loaded, name)


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
    taken = _taken(run, None, which, average=average)
    assert taken.loaded is not None
    metrics = metric_set(dict(named_metrics(taken.loaded)))
    found = evaluate_batches(taken.model, _loss(taken, None), _batches(taken, data, batch), metrics=metrics)
    return EvaluationReport(run, taken.step, found)


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
    if out.exists():
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
