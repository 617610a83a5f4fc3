"""Memory and hooks of a run in some of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class HeldResources:
    """Resources of the process after a step."""

    step: int
    memory_bytes: int  # Host memory
    device_bytes: int = 0  # Live tensors on a GPU
    hooks: int = 0  # Hooks on the modules and parameters of the model


@dataclass(frozen=True, kw_only=True)
class GrowthFacts:
    """Resources after some steps, oldest first. ``most_hooks`` is the module with the most hooks."""

    experiment: ClassVar[str] = "growth"
    held: tuple[HeldResources, ...] = ()
    most_hooks: str = ""


@dataclass(frozen=True)
class GraphSize:
    """Size of the autograd graph of a loss."""

    step: int
    nodes: int  # Number of nodes
    retained: bool  # The backward pass retains the graph
    goes_back: bool  # Some nodes are from earlier steps


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Tensors and graphs that the loop still holds, among the last 64 losses and outputs older than three steps."""

    experiment: ClassVar[str] = "memory"
    old_losses: int = 0  # Number of observed losses
    graphs_alive: int = 0  # Number of their graphs that are alive
    losses_alive: int = 0  # Number of losses that are alive
    old_outputs: int = 0  # Number of observed outputs
    outputs_alive: int = 0  # Number of outputs with a graph that are alive
    output_bytes: int = 0  # Size of these outputs
    graphs: tuple[GraphSize, ...] = ()  # Sizes in up to 32 steps, at growing intervals
    private_bytes: tuple[float, ...] = ()  # Mean unshared memory of the loader workers, first and last reading
    objects: int = 0  # Number of Python objects in lists and dicts of the dataset


@dataclass(frozen=True)
class CompiledFunction:
    """A function that torch.compile compiled again after the first steps."""

    name: str
    source: str  # file.py:line of its definition
    times: int  # How often it was compiled again
    seconds: float  # The time that this took
    reasons: tuple[str, ...]  # The guards that failed, as torch reports them, newest last
    gave_up: bool  # It reached torch's limit, so that new inputs run uncompiled


@dataclass(frozen=True, kw_only=True)
class CompilationFacts:
    """Functions that were compiled again after the first steps, the most frequent first."""

    experiment: ClassVar[str] = "compilations"
    again: tuple[CompiledFunction, ...] = ()


MIN_RISING_READINGS = 4
"""Number of consecutive readings that must rise. A pool that fills up, or noise, does not do that."""


def rises(values: Sequence[float]) -> bool:
    """Returns True if each value is above the previous one."""
    return all(b > a for a, b in pairwise(values))


def has_grown(counts: Sequence[int], least: int) -> bool:
    """Returns True if the last readings rise by at least ``least`` in total, and the last is above all earlier ones."""
    last = counts[-MIN_RISING_READINGS:]
    was_there = max(counts[:-MIN_RISING_READINGS], default=0)
    return len(last) == MIN_RISING_READINGS and rises(last) and last[-1] > was_there and last[-1] - last[0] >= least
