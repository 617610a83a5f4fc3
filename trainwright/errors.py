"""Every error that Trainwright raises on purpose. Each names its remedy and knows its exit code.

    TrainwrightError                  exit 1   something went wrong that is not a bug of ours
    ├── UsageError      (ValueError)  exit 2   the call or command line is wrong
    │   ├── RecipeError               exit 2   the recipe is wrong: every problem at once, each with file:line
    │   └── MissingExtra              exit 2   an optional package is needed and not installed
    ├── DataError                     exit 1   a sample or a batch is wrong: names the sample ids
    ├── StorageError                  exit 1   disk full, no permission, folder gone
    ├── OutOfMemoryError              exit 1   a step does not fit, even one sample at a time: says what held the memory
    ├── CheckpointError               exit 1   a checkpoint is missing, torn or does not fit
    ├── RankError                     exit 1   another process of the run is gone or does not answer
    └── StoppedError                  exit 75  a signal asked a run to stop before it began to train

A user's mistake ends in one of these, without a traceback; an ``AssertionError`` is a bug of ours. ``suggest`` and
``require_choice`` make every "did you mean" for unknown names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

OPTIONAL = (
    "scikit-learn>=1.5",
    "tensorboard>=2.18",
    "wandb>=0.19",
    "mlflow>=3.0",
    "trackio>=0.30",
    "prometheus_client>=0.20",
    "transformers>=5.0",
    "pyarrow>=15.0",
    "pillow>=10.0",
    "peft>=0.18",
    "liger-kernel>=0.5",
    "torchmetrics>=1.4",
    "ipython>=8.20",
    "lightning>=2.5",
    "accelerate>=1.2",
    "pytorch_optimizer>=3.5",
    "optuna>=5.0",
    "torchao>=0.15",
    "gymnasium>=1.0",
)
"""The packages of the extras in pyproject.toml, with the versions that they need."""
_DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "yaml": "PyYAML",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "liger_kernel": "liger-kernel",
    "google.protobuf": "protobuf",
}
"""Modules whose package has another name."""


class TrainwrightError(Exception):
    """Base of the tree. ``message`` says what is wrong, ``remedy`` what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class UsageError(TrainwrightError, ValueError):
    """The call or the command line is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe.

    ``path`` is dotted (``optimizer.lr``), ``where`` is ``file:line`` or where an override came from,
    ``got`` is what was written, ``rule`` what is required, ``remedy`` what to do (with "did you mean").
    """

    path: str
    rule: str
    got: str = ""
    remedy: str = ""
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        got = f" (got {self.got})" if self.got else ""
        remedy = f"\n    remedy: {self.remedy}" if self.remedy else ""
        return f"{head}{self.path or 'recipe'}: {self.rule}{got}{remedy}"


class RecipeError(UsageError):
    """One or more problems with a recipe, all reported at once."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        count = len(self.problems)
        title = f"the recipe has {count} problem{'' if count == 1 else 's'}:"
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))


class Problems:
    """Collects the problems that several checks of a recipe find, so that all are reported at once."""

    def __init__(self, found: Iterable[Problem] = ()) -> None:
        self.found = list(found)

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Collects what is raised inside; ``path`` is the key at fault where the error does not name one."""
        try:
            yield
        except RecipeError as error:
            self.found += error.problems
        except UsageError as error:
            self.found.append(Problem(path, error.message, remedy=error.remedy))

    def raise_if_any(self) -> None:
        """Raises a RecipeError with each problem once."""
        if self.found:
            raise RecipeError(list({(each.path, each.rule): each for each in self.found}.values()))


class MissingExtra(UsageError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, *, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed", remedy=install_remedy(package)
        )


class DataError(TrainwrightError):
    """A sample or a batch is wrong. ``sample_ids`` are positions in the dataset."""

    def __init__(self, message: str, *, sample_ids: Iterable[int] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.sample_ids: tuple[int, ...] = tuple(int(i) for i in sample_ids)


class StorageError(TrainwrightError):
    """The disk is full, a folder is gone or may not be written."""


@dataclass(frozen=True)
class OomReport:
    """One attempt at ``step`` that ran out of memory. The log writes it as a record of the same fields.

    ``micro`` samples were computed at a time, and ``next_micro`` will be (None: it is given up). ``module`` is the path
    of the innermost module in the forward pass, "" outside of it. ``held`` are bytes by kind at that time,
    ``in_use_bytes`` all of this process (a GPU: of tensors); ``given_back_bytes`` were freed when the attempt was given
    up: activations and temporaries. ``notes`` say what the attempt changed that could not be undone.
    """

    step: int
    phase: str
    module: str
    error: str
    micro: int
    next_micro: int | None
    asked_bytes: int | None
    in_use_bytes: int
    given_back_bytes: int
    capacity_bytes: int
    reserved_bytes: int | None
    held: dict[str, int]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        if self.next_micro is None:
            then = "given up"
        elif self.next_micro == self.micro:
            then = "once more, with what could be given back"
        else:
            then = f"again with {self.next_micro}, the global batch as it was"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"out of memory ({self.phase}{where}) with {self.micro} samples at a time: {then}{notes}"


class OutOfMemoryError(TrainwrightError):
    """A step does not fit into memory, in however small micro-batches. ``reports``: one for each attempt.

    ``whole``: the state is that of the last good step and may be saved.
    """

    def __init__(
        self, message: str, *, reports: Sequence[OomReport] = (), whole: bool = True, remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.reports, self.whole = tuple(reports), whole


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, torn or does not fit what it is loaded into."""


class RankError(TrainwrightError):
    """Another process of the run is gone or does not answer."""


class StoppedError(TrainwrightError):
    """A signal asked a run to stop before it began to train, so there is nothing to save. Start it again."""

    exit_code = 75


def text_of(error: BaseException, *, lines: int | None = None) -> str:
    """The type of an error and what it says, at most its first ``lines``. That of a user may raise when it is asked."""
    try:
        shown = str(error).strip().splitlines()[:lines]
    except Exception as another:
        shown = [f"(its text cannot be shown: {type(another).__name__})"]
    return ": ".join([type(error).__name__, *filter(None, ["\n".join(shown)])])


def suggest_file(path: Path, what: str) -> str:
    """A remedy for a file or folder that is not there: the one with the nearest name, or where relative paths start."""
    try:
        beside = [each.name for each in path.parent.iterdir()]
    except OSError:
        beside = []
    near = get_close_matches(path.name[:100], beside, n=1)
    if near:
        return f"did you mean {path.with_name(near[0])}?"
    return f"give the path of {what}; relative ones start at {Path.cwd()}"


def install_remedy(module: str) -> str:
    """The command that installs the package of a module, with the version that is needed where one is known.

    It names the package itself: an extra of Trainwright could be installed only from where Trainwright came from.
    """
    name = _DISTRIBUTIONS.get(module) or _DISTRIBUTIONS.get(module.partition(".")[0]) or module.partition(".")[0]
    for requirement in OPTIONAL:
        package = requirement.partition(">=")[0]
        if _plain(package) == _plain(name):
            return f'pip install "{requirement}"'
    return f"pip install {name}"


def _plain(package: str) -> str:
    return package.lower().replace("_", "-")


def unknown_args(what: str, path: str, args: Iterable[str], accepted: Sequence[str]) -> list[Problem]:
    """The problems of arguments that ``what`` does not accept, each with the nearest name; ``path`` is that of args."""
    accepts = f"it accepts: {', '.join(accepted)}" if accepted else "it accepts no arguments"
    found = []
    for arg in args:
        if arg not in accepted:
            near = get_close_matches(arg[:100], accepted, n=1)
            remedy = f"did you mean {near[0]!r}? {accepts}" if near else accepts
            found.append(Problem(f"{path}.{arg}", f"{what} has no argument {arg!r}", remedy=remedy))
    return found


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or all of them when none is near."""
    names = list(known)
    near = nearest(name, names)
    return f"known are: {', '.join(names)}" if near is None else f"did you mean {near!r}?"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is written most alike; one that is less alike (fp16, float16) has the same first letter."""
    near = get_close_matches(name[:100], known, n=1)
    near = near or get_close_matches(name[:100], [each for each in known if each[:1] == name[:1]], n=1, cutoff=0.5)
    return near[0] if near else None


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises UsageError unless ``value`` is one of ``choices``."""
    if value not in (names := list(choices)):
        near = nearest(str(value), names)
        remedy = "choose one of them" if near is None else f"did you mean {near!r}?"
        raise UsageError(f"{name} must be one of {', '.join(names)}; got {value!r}", remedy=remedy)
