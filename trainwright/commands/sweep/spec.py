"""Reads and checks a sweep from a file, the command line or Python, and reports all its problems at once."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from trainwright.errors import Problem, Problems, RecipeError, UsageError, suggest
from trainwright.recipe import Loaded, load
from trainwright.recipe.catalog import mode_of
from trainwright.recipe.duration import Duration
from trainwright.recipe.formatting import format_value
from trainwright.recipe.load import ENV_PREFIX, RESERVED_ENV
from trainwright.recipe.schema import NAME_PATTERN
from trainwright.recipe.source import Place
from trainwright.recipe.yaml_core import Document, UnreadableError, read, write
from trainwright.runs.files import UnreadableFile, read_text

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


Scalar = None | bool | int | float | str
MAX_CHOICES = 1000
FORMS = "write log:1e-4..1e-1, 0.0..0.5, int:2..8, [a, b, c], or log:1e-4..1e-1:5 for five points"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"((?:log:|int:|float:)*)({_NUMBER})\.\.({_NUMBER})(?::(\d+))?")


@dataclass(frozen=True)
class Dimension:
    """One path of the recipe and its values: the ``choices``, or a range from ``low`` to ``high``, both included."""

    path: str
    written: object  # the value in the sweep file
    choices: tuple[object, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False
    is_int: bool = False

    @property
    def grid(self) -> tuple[object, ...] | None:
        """Return all values; None for a range of floats."""
        if self.choices:
            return self.choices
        return tuple(range(int(self.low), int(self.high) + 1)) if self.is_int else None

    @property
    def checked_values(self) -> tuple[object, ...]:
        """Return the values that the schema must accept: all choices, or both ends."""
        return self.choices or (self.low, self.high)

    def distribution(self) -> BaseDistribution:
        """Return the distribution for Optuna. A choice that is a list or a mapping is represented by its JSON text."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution([label_of(each) for each in self.choices])
        if self.is_int:
            return IntDistribution(int(self.low), int(self.high), log=self.is_log)
        return FloatDistribution(self.low, self.high, log=self.is_log)

    def value_of(self, label: Scalar) -> object:
        """Return the value that ``label`` represents in Optuna."""
        return next((each for each in self.choices if label_of(each) == label), label)

    def __str__(self) -> str:
        if self.choices:
            return f"{self.path}: {', '.join(str(label_of(each)) for each in self.choices)}"
        kind = "whole numbers" if self.is_int else "numbers"
        return f"{self.path}: {kind} from {self.low:g} to {self.high:g}{', log scale' if self.is_log else ''}"


def label_of(value: object) -> Scalar:
    """Return a choice in a form that Optuna can store."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def setting_of(path: str, value: object) -> str:
    """Return the override that sets a value. JSON is valid YAML."""
    return f"{path}={json.dumps(value)}"


def grid_points(space: Sequence[Dimension]) -> list[tuple[object, ...]]:
    """Return all combinations; the last dimension varies fastest. Raises UsageError for a dimension without a finite
    grid.
    """
    grids = [each.grid for each in space]
    if any(grid is None for grid in grids):
        endless = next(each for each, grid in zip(space, grids, strict=True) if grid is None)
        raise UsageError(
            f"a grid needs the points of {endless.path}, which is a range of floats",
            remedy=f"write a list, or give a number of points: {endless.written}:5",
        )
    return list(itertools.product(*(grid for grid in grids if grid is not None)))


def parse_dimension(path: str, written: object, is_whole: Callable[[float], bool]) -> Dimension:
    """Read the range or the list of values of one path. Raises UsageError.

    For a range without ``int:`` or ``float:``, ``is_whole(n)`` returns True if the path accepts n, but not n + 0.5.
    """
    if isinstance(written, str):
        text = written.strip()
        if found := _RANGE.fullmatch(text):
            return _range(path, text, found, is_whole)
        if ".." in text:
            raise UsageError(f"{text!r} is not a range of numbers", remedy=FORMS)
        if "," in text and text[:1] not in ("{", "["):
            text = f"[{text}]"
        if text[:1] + text[-1:] in ("{}", "[]"):
            try:
                written = read(f"[{text[1:-1]}]", path).value
            except UnreadableError as error:
                raise UsageError(f"{text!r} is not a list: {error.problem.rule}", remedy=FORMS) from None
    elif isinstance(written, Mapping) and written and all(value is None for value in written.values()):
        written = list(written)  # {a, b, c} in YAML
    if not isinstance(written, list | tuple):
        raise UsageError("is neither a range nor a list of values", remedy=FORMS)
    return _choices(path, written)


def _choices(path: str, values: Sequence[object]) -> Dimension:
    if not 0 < len(values) <= MAX_CHOICES:
        raise UsageError(f"has {len(values)} values", remedy=f"give between 1 and {MAX_CHOICES}")
    labels = [label_of(each) for each in values]
    twice = [each for n, each in enumerate(labels) if each in labels[:n]]
    if twice:
        raise UsageError(f"lists {twice[0]!r} twice", remedy="keep one of the two")
    return Dimension(path, list(values), tuple(values))


def _range(path: str, text: str, found: re.Match[str], is_whole: Callable[[float], bool]) -> Dimension:
    kinds, low, high, points = found[1], float(found[2]), float(found[3]), found[4]
    is_log, are_whole = "log:" in kinds, low == int(low) and high == int(high)
    if "int:" in kinds and ("float:" in kinds or not are_whole):
        raise UsageError(f"{text} is not a range of whole numbers", remedy="write for example int:2..8")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"{text} is an empty range", remedy="write the smaller number first: 1e-4..1e-1")
    if is_log and low <= 0:
        raise UsageError(f"{text} has no logarithm at {low:g}", remedy="begin above 0: log:1e-6..1e-1")
    is_int = "int:" in kinds or ("float:" not in kinds and are_whole and (is_whole(low) or is_whole(high)))
    if points is None:
        return Dimension(path, text, low=low, high=high, is_log=is_log, is_int=is_int)
    if not 2 <= int(points) <= MAX_CHOICES:
        raise UsageError(f"{text} has {points} points", remedy=f"give between 2 and {MAX_CHOICES}")
    return Dimension(path, text, tuple(dict.fromkeys(_points(low, high, int(points), is_log=is_log, is_int=is_int))))


def _points(low: float, high: float, count: int, *, is_log: bool, is_int: bool) -> list[float]:
    """Return ``count`` numbers, evenly spaced on a linear or log scale. All but the ends are rounded to six digits."""
    if is_log:
        inside = [low * (high / low) ** (n / (count - 1)) for n in range(1, count - 1)]
    else:
        inside = [low + (high - low) * n / (count - 1) for n in range(1, count - 1)]
    values = [low, *(float(f"{each:.6g}") for each in inside), high]
    return [round(each) for each in values] if is_int else values


SPEC = "sweep.yaml"
"""The copy of the sweep file in the folder of a sweep."""
DEFAULT_TRIALS = 20
MAX_CHECKED_COMBINATIONS = 200
NOT_SWEPT = ("name", "folder")
VALIDATION_LOSS, TRAIN_LOSS = "loss", "train_loss"


class SweepFile(BaseModel):
    """The keys of a sweep file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    recipe: str
    over: dict[str, JsonValue]
    set: dict[str, JsonValue] = {}
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    sampler: Literal["grid", "random", "tpe"] | None = None
    pruner: Literal["none", "median", "hyperband"] = "none"
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    trials: int | None = Field(default=None, ge=1, le=100_000)
    seed: int = Field(default=0, ge=0, lt=2**32)
    threads: int = Field(default=1, ge=1)
    jobs: int | None = Field(default=None, ge=1)
    budget: str | None = None
    usd_per_hour: float | None = Field(default=None, gt=0)
    folder: str = "runs"
    recipe_sha256: str | None = None


@dataclass(frozen=True)
class SweepBudget:
    """The limits of a sweep; infinity for no limit."""

    seconds: float = math.inf
    trials: float = math.inf
    usd: float = math.inf

    @classmethod
    def parse(cls, text: str | None) -> SweepBudget:
        """Read ``20min``, ``24`` or ``24trials``, and ``5USD``. Raises UsageError."""
        if text is None:
            return cls()
        if found := re.fullmatch(r"(\d+)\s*(?:trials?)?", text):
            return cls(trials=int(found[1]))
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*USD", text, re.IGNORECASE):
            return cls(usd=float(found[1]))
        try:
            duration = Duration.parse(text)
        except UsageError:
            duration = None
        if duration is None or duration.unit != "s":
            raise UsageError(
                f"{text!r} is not a budget", remedy="write a time (20min), a number of trials (24) or 5USD"
            ) from None
        return cls(seconds=duration.value)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    ``settings`` are the overrides of all trials, and ``folder`` is the folder of the sweep. A sweep cannot be resumed
    with another number of ``threads`` per trial, which changes the last bits of sums. The number of ``jobs``
    (concurrent trials) may change.
    """

    recipe: Path
    recipe_sha256: str
    settings: tuple[str, ...]
    space: tuple[Dimension, ...]
    sampler: Literal["grid", "random", "tpe"]
    pruner: Literal["none", "median", "hyperband"]
    metric: str
    mode: Literal["min", "max"]
    trials: int
    seed: int
    threads: int
    folder: Path
    jobs: int | None = None
    budget: SweepBudget = SweepBudget()
    usd_per_hour: float | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    def settings_of(self, params: Mapping[str, object]) -> list[str]:
        """Return the overrides of a trial."""
        return [*self.settings, *(setting_of(path, value) for path, value in params.items())]

    def to_yaml(self) -> str:
        """Return the file for the sweep folder: a valid sweep file with the recipe's absolute path and its hash."""
        return write(
            {
                "recipe": str(self.recipe),
                "recipe_sha256": self.recipe_sha256,
                "name": self.name,
                "folder": str(self.folder.parent),
                "set": {each.partition("=")[0]: read(each.partition("=")[2], "").value for each in self.settings},
                "over": {each.path: each.written for each in self.space},
                "sampler": self.sampler,
                "pruner": self.pruner,
                "metric": self.metric,
                "mode": self.mode,
                "trials": self.trials,
                "seed": self.seed,
                "threads": self.threads,
            }
        )


def is_sweep_file(path: Path) -> bool:
    """Return True for a sweep file: a YAML file with the key ``over``."""
    try:
        value = read(read_text(path, follow_links=True), str(path)).value if path.is_file() else None
    except (UnreadableError, UnreadableFile, OSError):  # reported by the caller that loads it as a recipe
        return False
    return isinstance(value, dict) and "over" in value


def read_sweep(
    what: Path,
    *,
    over: Mapping[str, object] | None = None,
    settings: Sequence[str] = (),
    environ: Mapping[str, str],
    **options: object,
) -> Sweep:
    """Read a sweep file, the folder of a sweep, or the recipe ``what`` with the paths ``over``.

    ``options`` override further keys of the sweep file; an option that is None is ignored. Raises RecipeError with
    every problem of the keys at once.
    """
    replaced = {key: value for key, value in options.items() if value is not None}
    if (what / SPEC).is_file():
        what = what / SPEC
    elif what.is_dir():
        raise UsageError(
            f"{what} does not contain a sweep", remedy="give a sweep file, a recipe, or the folder of a sweep"
        )
    if what.name == SPEC or is_sweep_file(what):
        document = _document(what)
    else:
        where = {f"over.{path}": Place(f"--over {path}") for path in over or {}}
        recipe = str(what.absolute() if what.is_file() else what)  # else the name of a built-in one
        document = Document(str(what), {"recipe": recipe, "over": {}}, where)
        replaced.setdefault("name", f"{what.stem}-sweep")
    assert isinstance(document.value, dict)
    value: dict[str, object] = {**document.value, **replaced}
    if over:
        written = value.get("over")
        value["over"] = {**(written if isinstance(written, dict) else {}), **over}
    file = _checked_keys(value, document)
    return _checked(file, document, what, [*_settings_in(environ), *settings])


def _document(path: Path) -> Document:
    try:
        document = read(read_text(path, follow_links=True), str(path))
    except UnreadableError as error:
        raise RecipeError(error.problem) from None
    if document.problems:
        raise RecipeError(document.problems)
    if not isinstance(document.value, dict):
        raise UsageError(f"{path} is not a sweep file", remedy="write at least recipe: and over:")
    return document


def _checked_keys(value: Mapping[str, object], document: Document) -> SweepFile:
    try:
        return SweepFile.model_validate(value)
    except ValidationError as error:
        raise RecipeError([_problem(each, document) for each in error.errors(include_url=False)]) from None


def _problem(detail: Any, document: Document) -> Problem:
    path = ".".join(map(str, detail["loc"]))
    where = str(_place(document, path))
    if detail["type"] == "extra_forbidden":
        return Problem(path, "is not a key of a sweep", remedy=suggest(path, SweepFile.model_fields), where=where)
    remedy = "write recipe: and over:" if detail["type"] == "missing" else "see docs/how-to/sweep.md"
    return Problem(path, str(detail["msg"]), got=format_value(detail.get("input")), remedy=remedy, where=where)


def _place(document: Document, path: str) -> Place:
    while path and path not in document.places:
        path = path.rpartition(".")[0]
    return document.places.get(path, Place(document.name))


def _settings_in(environ: Mapping[str, str]) -> list[str]:
    """Return the overrides in the environment as settings. A sweep stores them, so a resume elsewhere uses them."""
    names = [name for name in sorted(environ) if name.startswith(ENV_PREFIX)]
    pairs = [(name.removeprefix(ENV_PREFIX), environ[name]) for name in names]
    return [f"{rest.lower().replace('__', '.')}={text}" for rest, text in pairs if rest not in RESERVED_ENV]


def without_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a trial, whose settings are on its command line."""
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(ENV_PREFIX) or name.removeprefix(ENV_PREFIX) in RESERVED_ENV
    }


def _checked(file: SweepFile, document: Document, what: Path, settings: Sequence[str]) -> Sweep:
    beside = what.parent / file.recipe
    path = beside if beside.is_file() else Path(file.recipe)  # else the name of a built-in recipe
    settings = [*(setting_of(path, value) for path, value in file.set.items()), *settings]
    loaded = load(path, overrides=settings, environ={})
    problems = Problems()
    if not file.over:
        remedy = "give for example --over optimizer.lr=log:1e-4..1e-1"
        problems.found.append(Problem("over", "is empty: nothing is varied", remedy=remedy, where=document.name))
    space = list[Dimension]()
    for name, written in file.over.items():
        place = str(_place(document, f"over.{name}"))
        found = Problems()
        with found.at(name):
            space.append(_dimension(name, written, file, path, settings))
        problems.found += [replace(each, where=place) for each in found.found]
    with problems.at("budget"):
        budget = SweepBudget.parse(file.budget)
        if math.isfinite(budget.usd) and file.usd_per_hour is None:
            raise UsageError("a budget in USD needs the price", remedy="write usd_per_hour: 2.5, or --usd-per-hour 2.5")
    with problems.at("metric"):
        metric, mode = _metric(file, loaded)
    with problems.at("sampler"):
        sampler, points = _sampler(file, space)
    problems.raise_if_any()
    _check_combinations(space, points, path, settings)
    trials = min(file.trials or points or DEFAULT_TRIALS, points or math.inf, budget.trials)
    sha256 = hashlib.sha256(Path(loaded.source.name).read_bytes()).hexdigest()
    if file.recipe_sha256 not in (None, sha256):
        raise UsageError(
            f"{path} has changed since the sweep began: its trials would not be comparable",
            remedy="restore the recipe, or begin another sweep with --name",
        )
    return Sweep(
        Path(loaded.source.name).absolute(),
        sha256,
        tuple(settings),
        tuple(space),
        sampler,
        file.pruner,
        metric,
        mode,
        int(trials),
        file.seed,
        file.threads,
        (Path(file.folder) / (file.name or what.stem)).absolute(),
        file.jobs,
        budget,
        file.usd_per_hour,
    )


def _dimension(name: str, written: object, file: SweepFile, path: Path, settings: Sequence[str]) -> Dimension:
    """Read one dimension and check its values against the schema. Raises UsageError."""
    if name.partition(".")[0] in NOT_SWEPT:
        raise UsageError("names the folder of a trial, and cannot be varied", remedy="vary another path")
    if outer := [each for each in file.over if name.startswith(f"{each}.")]:
        raise UsageError(f"is a part of {outer[0]}, which is varied too", remedy="keep one of the two")
    if isinstance(written, dict) and any(value is not None for value in written.values()):
        raise UsageError("is a section", remedy=f"write the path in one line: {name}.{next(iter(written))}: ...")

    def is_accepted(value: float) -> bool:
        try:
            load(path, overrides=[*settings, setting_of(name, value)], environ={})
        except RecipeError:
            return False
        return True

    def is_whole(number: float) -> bool:
        return is_accepted(int(number)) and not is_accepted(number + 0.5)

    dimension = parse_dimension(name, written, is_whole)
    refused = list[Problem]()
    for value in dimension.checked_values:
        value = int(value) if dimension.is_int and isinstance(value, float) else value
        try:
            load(path, overrides=[*settings, setting_of(name, value)], environ={})
        except RecipeError as error:
            refused += error.problems
    if refused:
        raise RecipeError(list({(each.path, each.rule, each.got): each for each in refused}.values()))
    return dimension


def _metric(file: SweepFile, loaded: Loaded) -> tuple[str, Literal["min", "max"]]:
    has_validation = loaded.recipe.data.val is not None
    metric = file.metric or (VALIDATION_LOSS if has_validation else TRAIN_LOSS)
    if metric != TRAIN_LOSS and not has_validation:
        raise UsageError(
            f"{metric} is measured on a validation set, and the recipe has none",
            remedy=f"add data.val, or write metric: {TRAIN_LOSS}",
        )
    if (mode := file.mode or mode_of(metric)) is None:
        raise UsageError(f"it is unknown if a larger {metric} is better", remedy="write mode: max, or --mode max")
    return metric, mode


def _sampler(file: SweepFile, space: Sequence[Dimension]) -> tuple[Literal["grid", "random", "tpe"], int | None]:
    """Return the sampler, and the number of points of a grid. Default: a grid if it has at most ``trials`` points."""
    if file.sampler == "grid":
        return "grid", len(grid_points(space))
    grids = [each.grid for each in space]
    if file.sampler is None and space and None not in grids:
        points = math.prod(len(grid) for grid in grids if grid is not None)
        if points <= (file.trials or DEFAULT_TRIALS):
            return "grid", points
    return file.sampler or "tpe", None


def _check_combinations(space: Sequence[Dimension], points: int | None, path: Path, settings: Sequence[str]) -> None:
    """Check the combinations of a grid against the schema, unless it is large. Raises RecipeError with each problem."""
    if points is None or points > MAX_CHECKED_COMBINATIONS or len(space) < 2:
        return
    found = list[Problem]()
    for point in grid_points(space):
        words = [setting_of(each.path, value) for each, value in zip(space, point, strict=True)]
        try:
            load(path, overrides=[*settings, *words], environ={})
        except RecipeError as error:
            found += [replace(each, where=f"trial with {', '.join(words)}") for each in error.problems]
    if found:
        raise RecipeError(found)


def differences(before: SweepFile, now: SweepFile) -> list[str]:
    """Return the keys in which two sweeps of one folder differ, except keys that a resume may change (``free``)."""
    free = {"trials", "jobs", "budget", "usd_per_hour", "folder", "name"}
    return [key for key in SweepFile.model_fields if key not in free and getattr(before, key) != getattr(now, key)]


def spec_of(text: str) -> SweepFile:
    """Return the keys of the file that ``Sweep.to_yaml`` wrote."""
    document = read(text, SPEC)
    assert isinstance(document.value, dict)
    return _checked_keys(document.value, document)


def over_of(words: Iterable[str]) -> dict[str, object]:
    """Read ``--over PATH=VALUES`` of the command line. Raises UsageError."""
    found = dict[str, object]()
    for word in words:
        path, equals, values = word.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--over {word} is not PATH=VALUES", remedy="--over optimizer.lr=log:1e-4..1e-1")
        found[path.strip()] = values.strip()
    return found
