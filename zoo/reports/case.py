"""The declaration of a case, the outcome of one run of it, and the discovery of all cases."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

Half = Literal["open", "held_out"]
HALVES: tuple[Half, ...] = ("open", "held_out")

STAGES = (
    "data",
    "model",
    "loss",
    "gradient",
    "optim",
    "schedule",
    "precision",
    "evaluation",
    "checkpoint",
    "ranks",
    "loop",
)


class Watch(Protocol):
    """A context manager around a training loop, called as `tw.watch`."""

    def __call__(self, model: Any, optimizer: Any, **options: Any) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Place:
    """A correct location. Each field is a regular expression that the finding's field must match, or None: any value.

    Attributes:
        module: Name of a module or parameter.
        op: Name of an operation.
        line: Text of the source line.
        rank: Number of the rank.
    """

    module: str | None = None
    op: str | None = None
    line: str | None = None
    rank: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        losses: Training losses in order. The losses of a repaired twin must be finite and must fall.
        symptom: The fault shows its symptom; in a healthy program: it trains, and is unusual as its title says.
        numbers: The measured values from which ``symptom`` was computed.
        learned: Whether the program learned, if its losses need not fall. None: learned if they fall.
        shows: The optimizer step at which the symptom could first be seen in this run. None: ``Case.shows``.
    """

    losses: Sequence[float]
    symptom: bool
    numbers: Mapping[str, Any]
    learned: bool | None = None
    shows: int | None = None

    @property
    def is_healthy(self) -> bool:
        learned = fell(self.losses) if self.learned is None else self.learned
        return learned and not self.symptom


@dataclass(frozen=True)
class Case:
    """A program and its expected diagnosis. Steps are completed optimizer steps, summed over all watches of a program.

    Attributes:
        id: Unique name in lower case.
        title: The fault, or the unusual trait, in one line.
        sources: Public reports: ``owner/repository#number`` or a URL.
        stage: The stage of training at fault; None for a healthy program.
        program: ``program(watch, seed, faulty)`` of a fault, ``program(watch, seed)`` of a healthy program.
        diagnosis: Patterns for a correct diagnosis, see `zoo.reports.judge.is_named`.
        where: The correct locations; a finding has to name one of them. Empty if the fault has no location.
        onset: Step at which the fault becomes active. An earlier alarm is a false one.
        shows: Step at which the symptom can first be seen.
        ranks: Number of processes, which form a gloo group. 1: no group.
    """

    id: str
    title: str
    sources: tuple[str, ...]
    stage: str | None
    program: Callable[..., Outcome]
    diagnosis: tuple[str, ...] = ()
    where: tuple[Place, ...] = ()
    onset: int = 0
    shows: int = 0
    ranks: int = 1

    @property
    def half(self) -> str:
        """The package that holds the program."""
        return self.program.__module__.split(".")[-2]

    @property
    def is_fault(self) -> bool:
        return self.stage is not None

    @property
    def file(self) -> Path:
        return Path(self.program.__code__.co_filename)

    def run(self, watch: Watch, seed: int, *, faulty: bool) -> Outcome:
        return self.program(watch, seed, faulty) if self.is_fault else self.program(watch, seed)


def fault(
    id: str,  # noqa: A002
    title: str,
    *,
    sources: Sequence[str],
    stage: str,
    diagnosis: Sequence[str],
    where: Sequence[Place] = (),
    onset: int = 0,
    shows: int | None = None,
    ranks: int = 1,
) -> Callable[[Callable[[Watch, int, bool], Outcome]], Case]:
    r"""Make a case of a faulty program. ``shows`` is the onset if not given.

    Example::

        @fault(
            "missing_zero_grad",
            "gradients of all earlier steps add up",
            sources=["owner/repository#12", "https://discuss.pytorch.org/t/34"],
            stage="gradient",
            diagnosis=["zero grad & !after backward", "gradients? & (accumulate|add up|earlier steps)"],
            where=[Place(line=r"\.backward\(\)"), Place(line=r"\.step\(\)")],
        )
        def missing_zero_grad(watch: Watch, seed: int, faulty: bool) -> Outcome:
            model, optimizer, loader = ...
            losses = []
            with watch(model, optimizer, loader=loader):
                for x, y in loader:
                    if not faulty:
                        optimizer.zero_grad()
                    ...
            return Outcome(losses, symptom=losses[-1] > 1, numbers={"last_loss": losses[-1]})
    """
    assert stage in STAGES, stage
    shows = onset if shows is None else shows

    def declare(program: Callable[[Watch, int, bool], Outcome]) -> Case:
        return Case(id, title, tuple(sources), stage, program, tuple(diagnosis), tuple(where), onset, shows, ranks)

    return declare


def healthy(
    id: str,  # noqa: A002
    title: str,
    *,
    sources: Sequence[str],
    ranks: int = 1,
) -> Callable[[Callable[[Watch, int], Outcome]], Case]:
    """Make a case of a healthy, unusual program."""

    def declare(program: Callable[[Watch, int], Outcome]) -> Case:
        return Case(id, title, tuple(sources), None, program, ranks=ranks)

    return declare


@cache
def load(half: Half) -> tuple[Case, ...]:
    """All cases of one half, in the order of their modules."""
    package = importlib.import_module(f"zoo.reports.{half}")
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    cases = (value for module in modules for value in vars(module).values() if isinstance(value, Case))
    return tuple(case for case in cases if case.half == half)


# Helpers to measure symptoms.


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def fell(losses: Sequence[float], to: float = 0.97) -> bool:
    """The losses are finite and the mean of the last tenth is below ``to`` times the mean of the first tenth."""
    window = max(5, len(losses) // 10)
    return all(math.isfinite(loss) for loss in losses) and mean(losses[-window:]) < to * mean(losses[:window])


def matches(pattern: str | None, text: object) -> bool:
    """Return True if the pattern is None or occurs in the text. Case is ignored."""
    return pattern is None or re.search(pattern, "" if text is None else str(text), re.IGNORECASE) is not None
