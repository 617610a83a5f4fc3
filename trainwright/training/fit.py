"""The Python face: train a module of one's own in three lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.build.assemble import LIVE, Parts
from trainwright.build.data import Unwrapped, unwrap
from trainwright.build.model import require_ready
from trainwright.engine.loss import require_callable
from trainwright.errors import UsageError
from trainwright.recipe import from_mapping
from trainwright.runlog.folder import RunFolder
from trainwright.training.run import Result, train

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

    ``data`` and ``val`` are datasets, DataLoaders, or tuples of tensors (or NumPy arrays) of one length; a
    DataLoader's batch size, shuffling, workers and collate function are taken over; that of ``val`` says
    ``evaluation.batch``. ``loss`` is ``loss(output, target)``, such as ``nn.CrossEntropyLoss()``, or
    ``loss(model, batch)`` (its first parameter is named ``model``) that returns a mean, or a
    ``tw.Loss(total, weight)`` for exact weighting.

    ``short`` are the settings most asked for: ``until`` ("5ep", "1000steps", "60s"), ``lr``, ``batch``,
    ``accumulation``, ``optimizer``, ``schedule``, ``warmup``, ``precision``, ``seed``, ``name``, ``quiet``.
    ``settings`` takes any path of a recipe: ``{"optimizer.clip.at": 0.5}``, or nested mappings of them.
    ``resume`` is the folder of an earlier run of the same call, ``accept`` the differences to it that are wanted
    (a path or several: ``accept="optimizer.lr"``).

    Raises UsageError or RecipeError for what cannot be, each with its remedy.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"fit: the model is a {type(model).__name__}", remedy="give an nn.Module")
    require_ready(model)
    require_callable(loss)
    quiet = bool(short.pop("quiet", False))
    accept = _several(short.pop("accept", ()))
    train_data, val_data = unwrap(data), None if val is None else unwrap(val)
    mapping = _described(model, train_data, val_data, loss)
    loaded = from_mapping(mapping, overrides=_asked({} if settings is None else settings, _paths(short)), name="tw.fit")
    folder = None if resume is None else RunFolder.open(resume)
    return train(
        loaded,
        parts=Parts(model, train_data, val_data, loss),
        resume=folder,
        accept=accept,
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


def _several(accept: Any) -> tuple[str, ...]:
    return (accept,) if isinstance(accept, str) else tuple(accept)


def _paths(short: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in short if name not in _SHORT]
    if unknown:
        raise UsageError(
            f"fit has no argument {unknown[0]!r}",
            remedy=f"it has {', '.join(_SHORT)}; anything else goes into settings={{'optimizer.clip.at': 0.5}}",
        )
    return {_SHORT[name]: value for name, value in short.items()}


_LIVE = (("model",), ("loss",), ("data", "train"), ("data", "val"))


def _asked(settings: Mapping[str, Any], short: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Paths and values, a whole section before its keys; raises UsageError for what fit was handed already."""
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"settings is a {type(settings).__name__}", remedy="give a mapping: settings={'optimizer.clip.at': 0.5}"
        )
    asked = sorted(_flat(settings), key=lambda each: str(each[0]).count("."))
    for path, _ in asked:
        keys = tuple(str(path).split("."))
        for twice in short:
            if keys[: len(under := twice.split("."))] == tuple(under):
                name = next(name for name, known in _SHORT.items() if known == twice)
                raise UsageError(f"{twice} is given twice: as {name}= and in settings", remedy="keep one of them")
        for root in _LIVE:
            if keys[: len(root)] == root and (keys == root or keys[len(root)] in ("use", "args")):
                raise UsageError(
                    f"settings has {path}, but fit was handed the {root[-1]} itself",
                    remedy=f"leave {path} out and make the object that you hand over with what it needs",
                )
    return [*asked, *short.items()]


def _flat(settings: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Nested mappings as dotted paths, down to ``args``, which is a value of its own."""
    for path, value in settings.items():
        inner = isinstance(path, str) and path.rpartition(".")[2] != "args" and isinstance(value, Mapping)
        yield from _flat({f"{path}.{key}": each for key, each in value.items()}) if inner else [(path, value)]


def _described(model: nn.Module, data: Unwrapped, val: Unwrapped | None, loss: Callable[..., Any]) -> dict[str, Any]:
    """A recipe for what was handed over, and what a DataLoader says; such a run resumes from Python only."""
    said = {"shuffle": data.shuffle, "drop_last": data.drop_last, "workers": data.workers}
    named: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    named["train"] = {"use": _name(data.dataset)}
    if val is not None:
        named["val"] = {"use": _name(val.dataset)}
    batch = {} if data.batch_size is None else {"size": data.batch_size}
    evaluation = {} if val is None or val.batch_size is None else {"batch": val.batch_size}
    return {
        "model": {"use": _name(model)},
        "data": named,
        "loss": {"use": _name(loss)},
        "batch": batch,
        "evaluation": evaluation,
    }


def _name(thing: Any) -> str:
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{LIVE}:{name if name.isidentifier() else type(thing).__name__}"
