"""Measurements of modules in a few examined steps of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RepeatedModule:
    """A module that occurs ``times`` times in the container ``path``. ``is_chained``: each output is the next input."""

    path: str
    times: int
    is_chained: bool


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """An embedding in the examined steps."""

    path: str  # Path of the module
    padding: float = 0.0  # Fraction of the ids that are ``padding_idx``
    inside: float = 0.0  # Fraction of the padding that is between other tokens
    used: int = 0  # Number of rows that were used
    decayed: int = 0  # Number of rows that changed although their gradient was 0 whenever they were used


@dataclass(frozen=True, kw_only=True)
class OutputSpread:
    """Difference of the outputs of a model between samples, relative to the size of the outputs."""

    step: int
    spread: float


@dataclass(frozen=True, kw_only=True)
class ModulesFacts:
    """All modules in the examined steps."""

    experiment: ClassVar[str] = "modules"
    looks: int  # Number of examined steps
    last: int  # The last examined step
    same_inputs: bool = False  # The inputs were the same in all examined steps
    # The first module whose outputs are the same for every sample although its inputs are not; None without one
    constant: str | None = None
    is_whole: bool = False  # The outputs of the full model are the same for every sample
    constant_kind: str = ""  # Class of ``constant``
    spreads: tuple[OutputSpread, ...] = ()  # Spread of vector outputs in steps whose loss uses no data but the inputs
    # Frozen modules with dropout that are in train mode and were called only without gradients
    noisy: tuple[str, ...] = ()
    drifting: tuple[str, ...] = ()  # Frozen modules in train mode whose running statistics are updated
    repeated: tuple[RepeatedModule, ...] = ()  # Modules that one container holds several times
    flat: str = ""  # The operation with derivative 0 everywhere that the graph of the loss contains
    behind_flat: tuple[str, ...] = ()  # Parameters that the loss reaches only through such operations
    tables: tuple[TokenTable, ...] = ()  # The embeddings
