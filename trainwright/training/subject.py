"""The subject of a command: a recipe, a run, a function that returns objects, or the arguments of ``tw.fit``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.rng import RngBag
from trainwright.errors import UsageError, text_of
from trainwright.recipe import Loaded, load
from trainwright.recipe.resolve import is_live
from trainwright.runs.files import UnreadableFile
from trainwright.runs.folder import RunFolder
from trainwright.runs.shapes import ProvenanceFile, read_as
from trainwright.training.arguments import LET_A_FUNCTION, Rebuild
from trainwright.training.fit import fit_objects
from trainwright.training.options import FitOptions, ModelLike, RunOptions


class Built(NamedTuple):
    """A recipe and its live objects; ``parts`` is None if the recipe names them."""

    loaded: Loaded
    parts: Parts | None


Build = Callable[[Sequence[str]], Built]
"""Builds the subject with further settings (``path=value``). Each call makes new objects from the same random state."""


@dataclass(frozen=True)
class Subject:
    """The object of a command. ``name`` (a recipe or function) lets another process build it; None for live objects."""

    build: Build
    name: str | None = None


def named(what: str | Path, settings: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Subject:
    """Return the subject of a name: a recipe, the recipe of a run, or ``module:function``."""
    text = str(what)
    if ":" in text and not Path(what).exists():
        function: Build = lambda more: Built(*fit_objects(text, None, None, {}, more=more))  # noqa: E731
        return Subject(_with_fixed_random_state(function, settings), text)

    def build(more: Sequence[str]) -> Built:
        loaded = load(what, overrides=[*settings, *more], environ=environ)
        return Built(loaded, parts_of_run(RunFolder(Path(what).parent)) if is_live(loaded.recipe.model.use) else None)

    return Subject(build, text)


def subject(model: ModelLike, data: object, loss: Any, options: RunOptions) -> Subject:
    """Return the subject of the arguments of ``tw.fit``, or of a name if there is only one string."""
    if isinstance(model, str) and data is None and loss is None and not options:
        return named(model)

    def build(more: Sequence[str]) -> Built:
        return Built(*fit_objects(*copied(model, data, loss, options, val=options.get("val")), more=more))

    return Subject(_with_fixed_random_state(build))


def _with_fixed_random_state(build: Build, settings: Sequence[str] = ()) -> Build:
    """Run every build from the current random state, so that a function makes the same weights and orders each time."""
    start = RngBag.capture()

    def again(more: Sequence[str]) -> Built:
        start.restore()
        return build([*settings, *more])

    return again


def copied(*objects: Any, val: object = None) -> tuple[Any, ...]:
    """Return copies of ``model, data, ...``, except for the datasets. Raises UsageError if they cannot be copied."""
    kept = {id(samples): samples for each in (objects[1], val) for samples in _samples(each)}
    try:
        return copy.deepcopy(objects, kept)
    except Exception as error:
        raise UsageError(
            f"model, data, loss and optimizer cannot be copied: {text_of(error, lines=1)}",
            remedy="let a function in a module make them, and pass its name: tw.check('mymodule:function'), "
            "trainwright verify plain mymodule:function",
        ) from error


def _samples(value: object) -> list[object]:
    if isinstance(value, DataLoader):
        return [value.dataset]
    if isinstance(value, Mapping):
        return [samples for each in value.values() for samples in _samples(each)]
    return [value] if hasattr(value, "__getitem__") else []


def parts_of_run(
    folder: RunFolder,
    model: ModelLike | None = None,
    data: object = None,
    loss: Any = None,
    options: RunOptions | None = None,
    *,
    remedy: str | None = None,
) -> Parts:
    """Build the objects of a run of ``tw.fit`` again: copies of the passed objects, or by its recorded function.

    Raises UsageError, with ``remedy``, if nothing is passed and the run records no function.
    """
    made, seed = _recorded_objects(folder)
    more: FitOptions = {**(options or {}), **({} if seed is None else {"seed": seed})}
    if model is not None:
        return fit_objects(*copied(model, data, loss, more, val=more.get("val"))).parts
    if made.function is None:
        path = str(folder.path)
        again = f"pass the objects again, tw.fit(..., resume={path!r}) or tw.replay({path!r}, step, model, data, loss)"
        raise UsageError(
            f"the objects of {path} cannot be built from its folder: {made.reason}",
            remedy=f"{remedy or again}; or, from the next run on, {LET_A_FUNCTION}",
        )
    return fit_objects(made.function, None, None, more).parts


def resumed_parts(folder: RunFolder, loaded: Loaded, allowed: Sequence[str] | None) -> Parts | None:
    """Return the objects of a run of ``tw.fit`` for a resume from the command line; None for a run of a recipe.

    ``allowed`` lists the packages whose functions may be called; None allows all. Raises UsageError for another
    package.
    """
    if not is_live(loaded.recipe.model.use):
        return None
    module = (_recorded_objects(folder)[0].function or "").partition(":")[0]
    if module and allowed is not None and not any(f"{module}.".startswith(f"{each}.") for each in allowed):
        raise UsageError(f"{module}, which builds the objects of the run, is not allowed", remedy=f"--allow {module}")
    return parts_of_run(folder)


def _recorded_objects(folder: RunFolder) -> tuple[Rebuild, int | None]:
    """Return how the objects were built, from provenance.json, and the seed of a run that seeds the generators."""
    try:
        provenance = read_as(folder.provenance, ProvenanceFile)
    except UnreadableFile as error:
        return Rebuild(None, error.message), None
    objects, seeds = provenance.objects, provenance.seeds
    if objects is None:
        return Rebuild(None, "its provenance.json does not record how its objects are built"), None
    seed = seeds.seed if seeds and objects.is_seeded else None
    return Rebuild(objects.function, objects.reason, objects.is_seeded), seed
