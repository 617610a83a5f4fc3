"""The errors that Trainwright raises on purpose. Each has a remedy and an exit code.

    TrainwrightError                  exit 1   a failure that is not a bug in Trainwright
    ├── UsageError      (ValueError)  exit 2   the call or command line is wrong
    │   ├── RecipeError               exit 2   the recipe is wrong: every problem at once, each with file:line
    │   └── MissingExtra              exit 2   a required optional package is not installed
    ├── DataError                     exit 1   a sample or a batch is wrong: has the sample ids
    ├── StorageError                  exit 1   disk full, no permission, folder missing
    ├── OutOfMemoryError              exit 1   a step does not fit, even one sample at a time: reports the memory in use
    ├── CheckpointError               exit 1   a checkpoint is missing, incomplete or does not fit
    ├── RankError                     exit 1   another process of the run has ended or does not respond
    └── StoppedError                  exit 75  a signal stopped a run before it began to train

A user's mistake raises one of these, without a traceback. An ``AssertionError`` is a bug in Trainwright. ``suggest``
and ``require_choice`` make every "did you mean" for unknown names.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

OPTIONAL = (
    "scikit-learn>=1.5",
    "tensorboard>=2.18",
    "wandb>=0.19",
    "mlflow>=3.0",
    "trackio>=0.30",
    "prometheus_client>=0.20",
    "transformers>=5.0",
    "huggingface_hub>=1.0",
    "pyarrow>=15.0",
    "pillow>=10.0",
    "peft>=0.18",
    "tokenizers>=0.22",
    "datasets>=4.0",
    "liger-kernel>=0.5",
    "torchmetrics>=1.4",
    "ipython>=8.20",
    "lightning>=2.5",
    "accelerate>=1.2",
    "pytorch_optimizer>=3.5",
    "optuna>=5.0",
    "torchao>=0.15",
    "gymnasium>=1.0",
    "fsspec>=2025.3",
    "mcp>=2.3",
    "apprise>=1.9",
    "ray[train]>=2.51",
)
"""The packages of the extras in pyproject.toml, with their required versions."""
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
"""Modules whose package has a different name."""


class TrainwrightError(Exception):
    """The base class of all errors.

    Attributes:
        message: What is wrong.
        remedy: How to fix it.
        exit_code: The exit code of a command that ends with this error.
    """

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
    """One problem of a recipe.

    Attributes:
        path: The dotted recipe path, such as ``optimizer.lr``.
        rule: The requirement.
        got: The value in the recipe.
        remedy: How to fix it, with "did you mean".
        where: ``file:line``, or the source of an override.
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
    """Collects the problems from several checks of a recipe, so that all are reported at once."""

    def __init__(self, found: Iterable[Problem] = ()) -> None:
        self.found = list(found)

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Collect errors that are raised inside. ``path`` is the key at fault if the error has none."""
        try:
            yield
        except RecipeError as error:
            self.found += error.problems
        except UsageError as error:
            self.found.append(Problem(path, error.message, remedy=error.remedy))

    def raise_if_any(self) -> None:
        """Raise a RecipeError with each problem once."""
        if self.found:
            raise RecipeError(list({(each.path, each.rule): each for each in self.found}.values()))


class MissingExtra(UsageError):
    """A required optional package is not installed."""

    def __init__(self, package: str, *, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed", remedy=install_remedy(package)
        )


NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers that report deprecations and kernels that cannot be loaded when transformers or peft import torchao."""


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence ``NOISY_LOGGERS``. Suspend the garbage collector: it takes 0.3 s of the 1.7 s to import transformers."""
    with ExitStack() as restored:
        for logger in map(logging.getLogger, NOISY_LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if gc.isenabled():
            restored.callback(gc.enable)
            gc.disable()
        yield


def import_optional(module: str, *, needed_for: str, package: str = "") -> Any:
    """Import a module of an optional package. If it is not installed, raises MissingExtra, which names ``package``.

    A package that is installed but broken raises its own error, which is more helpful.
    """
    if (found := sys.modules.get(module)) is not None:
        return found
    name = module.partition(".")[0]
    try:
        with _quiet_import():
            return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise MissingExtra(package or name, needed_for=needed_for) from None


class DataError(TrainwrightError):
    """A sample or a batch is wrong. ``sample_ids`` are positions in the dataset."""

    def __init__(self, message: str, *, sample_ids: Iterable[int] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.sample_ids: tuple[int, ...] = tuple(int(i) for i in sample_ids)


class StorageError(TrainwrightError):
    """The disk is full, or a folder is missing or not writable."""


class DiskFullError(StorageError):
    """A file that is about to be written is larger than the free space of its disk."""


@dataclass(frozen=True)
class OomReport:
    """One attempt at ``step`` that ran out of memory. The log has a record with the same fields.

    Attributes:
        step: The step.
        phase: The phase of the step.
        module: The path of the innermost module in the forward pass; "" outside of it.
        error: The message of the error.
        micro: Samples per micro-batch of this attempt.
        next_micro: Samples per micro-batch of the next attempt; None if there is none.
        asked_bytes: Bytes of the failed allocation; None if unknown.
        in_use_bytes: Bytes in use by this process (on a GPU by tensors).
        given_back_bytes: Bytes of activations and temporaries that were freed after the attempt.
        capacity_bytes: Bytes of the device.
        reserved_bytes: Bytes that torch's allocator holds; None if unknown.
        held: Bytes in use by kind.
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

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        if self.next_micro is None:
            then = "given up"
        elif self.next_micro == self.micro:
            then = "trying again after freeing memory"
        else:
            then = f"trying again with {self.next_micro} and the same global batch"
        return f"out of memory ({self.phase}{where}) with {self.micro} samples at a time: {then}"


class OutOfMemoryError(TrainwrightError):
    """A step does not fit into memory with any micro-batch size.

    Attributes:
        reports: One report for each attempt.
        whole: True if the state is that of the last good step and may be saved.
    """

    def __init__(
        self, message: str, *, reports: Sequence[OomReport] = (), whole: bool = True, remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.reports, self.whole = tuple(reports), whole


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, incomplete, or does not fit the object that it is loaded into."""


class RankError(TrainwrightError):
    """Another process of the run has ended or does not respond."""


class StoppedError(TrainwrightError):
    """A signal stopped a run before it began to train, so there is nothing to save. Start it again."""

    exit_code = 75


def text_of(error: BaseException, *, lines: int | None = None) -> str:
    """Return the type of an error and at most the first ``lines`` of its message.

    The error may be of a user's class whose ``__str__`` raises.
    """
    try:
        shown = str(error).strip().splitlines()[:lines]
    except Exception as another:
        shown = [f"(its text cannot be shown: {type(another).__name__})"]
    return ": ".join([type(error).__name__, *filter(None, ["\n".join(shown)])])


def suggest_file(path: Path, what: str) -> str:
    """Return a remedy for a missing file or folder: the nearest name, or the folder that relative paths start at.

    The names are compared without their suffix, because short names with the same suffix look similar.
    """
    try:
        beside = [each.name for each in path.parent.iterdir()]
    except OSError:
        beside = []
    stems = get_close_matches(path.stem[:100], {Path(each).stem for each in beside}, n=len(beside) or 1)
    similar = sorted(each for each in beside if Path(each).stem in stems)
    near = get_close_matches(path.name[:100], similar, n=1)
    if near:
        return f"did you mean {path.with_name(near[0])}?"
    return f"give the path of {what}; relative ones start at {Path.cwd()}"


def install_remedy(module: str) -> str:
    """Return the command that installs the package of a module, with the required version if one is known.

    It names the package itself, because an extra can be installed only from the original source of Trainwright.
    """
    name = _DISTRIBUTIONS.get(module) or _DISTRIBUTIONS.get(module.partition(".")[0]) or module.partition(".")[0]
    for requirement in OPTIONAL:
        package = requirement.partition(">=")[0].partition("[")[0]
        if _plain(package) == _plain(name):
            return f'pip install "{requirement}"'
    return f"pip install {name}"


def _plain(package: str) -> str:
    return package.lower().replace("_", "-")


def unknown_args(what: str, path: str, args: Iterable[str], accepted: Sequence[str]) -> list[Problem]:
    """Return the problems of arguments that ``what`` does not accept, each with the nearest name.

    ``path`` is the recipe path of ``args``.
    """
    accepts = f"it accepts: {', '.join(accepted)}" if accepted else "it accepts no arguments"
    found = []
    for arg in args:
        if arg not in accepted:
            near = get_close_matches(arg[:100], accepted, n=1)
            remedy = f"did you mean {near[0]!r}? {accepts}" if near else accepts
            found.append(Problem(f"{path}.{arg}", f"{what} has no argument {arg!r}", remedy=remedy))
    return found


def listed(names: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Return the first ``limit`` names as text, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the nearest known one, or all of them if none is near."""
    names = list(known)
    near = nearest(name, names)
    return f"known are: {', '.join(names)}" if near is None else f"did you mean {near!r}?"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the most similar known name. A less similar one (fp16, float16) must have the same first letter."""
    near = get_close_matches(name[:100], known, n=1)
    near = near or get_close_matches(name[:100], [each for each in known if each[:1] == name[:1]], n=1, cutoff=0.5)
    return near[0] if near else None


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    if value not in (names := list(choices)):
        near = nearest(str(value), names)
        remedy = "choose one of them" if near is None else f"did you mean {near!r}?"
        raise UsageError(f"{name} must be one of {', '.join(names)}; got {value!r}", remedy=remedy)
