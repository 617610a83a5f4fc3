"""The Python face: train a module of one's own in three lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.build.assemble import LIVE, Parts, prepare
from trainwright.build.data import Unwrapped, unwrap
from trainwright.errors import UsageError
from trainwright.recipe import from_mapping
from trainwright.run import Result, train
from trainwright.runlog.folder import RunFolder
from trainwright.world import choose_device

if TYPE_CHECKING:
    from trainwright.engine.loop import Observer


def fit(
    model: nn.Module,
    data: Any,
    loss: Callable[..., Any],
    *,
    val: Any = None,
    settings: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    **short: Any,
) -> Result:
    """Trains ``model`` in place and writes a run folder.

    ``data`` and ``val`` are datasets, DataLoaders, or tuples of tensors of one length; a DataLoader's batch
    size, shuffling, workers and collate function are taken over. ``loss`` is ``loss(output, target)``, such as
    ``nn.CrossEntropyLoss()``, or ``loss(model, batch)`` (its first parameter is named ``model``) that returns a
    mean, or a ``tw.Loss(total, weight)`` for exact weighting.

    ``short`` are the settings most asked for: ``until`` ("5ep", "1000steps", "60s"), ``lr``, ``batch``,
    ``accumulation``, ``optimizer``, ``schedule``, ``warmup``, ``precision``, ``seed``, ``name``, ``quiet``.
    ``settings`` takes any path of a recipe: ``{"optimizer.clip.at": 0.5}``. ``resume`` is the folder of an
    earlier run of the same call.

    Raises UsageError or RecipeError for what cannot be, each with its remedy.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"fit: the model is a {type(model).__name__}", remedy="give an nn.Module")
    quiet = bool(short.pop("quiet", False))
    train_data, val_data = unwrap(data), None if val is None else unwrap(val)
    mapping = _described(model, train_data, val_data, loss)
    for path, value in {**_paths(short), **(settings or {})}.items():
        _put(mapping, path, value)
    loaded = from_mapping(mapping, name="tw.fit")
    device = choose_device(loaded.recipe.device)
    parts = prepare(Parts(model, train_data, val_data, loss), loaded, device)
    folder = None if resume is None else RunFolder.open(resume)
    return train(
        loaded,
        parts=parts,
        resume=folder,
        quiet=quiet,
        extras=[lambda *_, each=each: each for each in observers],
    )


_SHORT = {
    "until": "until",
    "lr": "optimizer.lr",
    "batch": "batch.size",
    "accumulation": "batch.accumulation",
    "optimizer": "optimizer.use",
    "schedule": "schedule.use",
    "warmup": "schedule.warmup",
    "precision": "precision",
    "seed": "seed",
    "name": "name",
}


def _paths(short: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in short if name not in _SHORT]
    if unknown:
        raise UsageError(
            f"fit has no argument {unknown[0]!r}",
            remedy=f"it has {', '.join(_SHORT)}; anything else goes into settings={{'optimizer.clip.at': 0.5}}",
        )
    return {_SHORT[name]: value for name, value in short.items()}


def _described(model: nn.Module, data: Unwrapped, val: Unwrapped | None, loss: Callable[..., Any]) -> dict[str, Any]:
    """A recipe for what was handed over, and what a DataLoader says; such a run resumes from Python only."""
    said = {"shuffle": data.shuffle, "drop_last": data.drop_last, "workers": data.workers}
    named: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    named["train"] = {"use": _name(data.dataset)}
    if val is not None:
        named["val"] = {"use": _name(val.dataset)}
    batch = {} if data.batch_size is None else {"size": data.batch_size}
    return {"model": {"use": _name(model)}, "data": named, "loss": {"use": _name(loss)}, "batch": batch}


def _name(thing: Any) -> str:
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{LIVE}:{name if name.isidentifier() else type(thing).__name__}"


def _put(mapping: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        mapping = mapping.setdefault(parent, {})
    mapping[last] = value
