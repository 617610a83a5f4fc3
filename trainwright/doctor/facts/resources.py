"""What a run holds of the machine, at some of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class HeldResources:
    """What the process held after a step: bytes not freed, open files, threads; and the hooks of the model.

    ``device_bytes``: of live tensors on a GPU.
    """

    step: int
    memory_bytes: int
    device_bytes: int = 0
    files: int = 0
    threads: int = 0
    hooks: int = 0


@dataclass(frozen=True, kw_only=True)
class GrowthFacts:
    """What was held after some steps, oldest first; ``most_hooks`` is the module that has most of them."""

    experiment: ClassVar[str] = "growth"
    held: tuple[HeldResources, ...] = ()
    most_hooks: str = ""


@dataclass(frozen=True)
class GraphSize:
    """The nodes of the graph behind the loss of a step. ``goes_back``: some are of earlier steps."""

    step: int
    nodes: int
    retained: bool
    goes_back: bool


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Tensors and graphs that the loop still holds.

    ``old_losses`` and ``old_outputs`` are those of the last 64 steps but three, ``graphs_alive``, ``losses_alive`` and
    ``outputs_alive`` (with a graph) what is alive of them. ``private_bytes`` is the memory that a worker of the loader
    shares with nobody, at the first and the last reading; the lists and dicts of the dataset hold ``objects`` Python
    objects.
    """

    experiment: ClassVar[str] = "memory"
    old_losses: int = 0
    graphs_alive: int = 0
    losses_alive: int = 0
    old_outputs: int = 0
    outputs_alive: int = 0
    output_bytes: int = 0
    graphs: tuple[GraphSize, ...] = ()
    private_bytes: tuple[float, ...] = ()
    objects: int = 0
