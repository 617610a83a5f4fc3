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
