"""Measurements of modules in a few examined steps of the live loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RepeatedModule:
    """One module that the container ``path`` holds ``times`` times. ``is_chained``: its output is its next input."""

    path: str
    times: int
    is_chained: bool


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """An embedding in the examined steps.

    Attributes:
        path: Path of the module.
        padding: Fraction of the ids that are ``padding_idx``.
        inside: Fraction of these that are between other tokens.
        used: Number of rows that were used.
        decayed: Number of rows that changed although their gradient was 0 whenever they were used.
    """

    path: str
    padding: float = 0.0
    inside: float = 0.0
    used: int = 0
    decayed: int = 0


@dataclass(frozen=True, kw_only=True)
class OutputSpread:
    """Difference of the outputs of a model between samples, relative to the size of the outputs."""

    step: int
    spread: float


@dataclass(frozen=True, kw_only=True)
class ModulesFacts:
    """All modules in the examined steps.

    Attributes:
        looks: Number of examined steps.
        last: The last examined step.
        same_inputs: The inputs were the same in all of them.
        constant: The first module whose outputs are the same for every sample although its inputs are not; None
            without one.
        is_whole: The outputs of the full model are the same.
        constant_kind: Class of ``constant``.
        spreads: Spread of vector outputs in steps whose loss uses no data but the inputs.
        noisy: Frozen modules with dropout that are in train mode and were called only without gradients.
        drifting: Frozen modules in train mode whose running statistics are updated.
        repeated: Modules that one container holds several times.
        flat: The operation with derivative 0 everywhere that the graph of the loss contains.
        behind_flat: Parameters that the loss reaches only through such operations.
        tables: The embeddings.
    """

    experiment: ClassVar[str] = "modules"
    looks: int
    last: int
    same_inputs: bool = False
    constant: str | None = None
    is_whole: bool = False
    constant_kind: str = ""
    spreads: tuple[OutputSpread, ...] = ()
    noisy: tuple[str, ...] = ()
    drifting: tuple[str, ...] = ()
    repeated: tuple[RepeatedModule, ...] = ()
    flat: str = ""
    behind_flat: tuple[str, ...] = ()
    tables: tuple[TokenTable, ...] = ()
