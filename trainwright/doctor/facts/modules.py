"""Measurements of modules while the loop calls them, in a few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RepeatedModule:
    """One module that stands ``times`` times in the container ``path``. ``is_chained``: it gets its own output."""

    path: str
    times: int
    is_chained: bool


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """An embedding: rows that were used in the examined steps.

    ``padding`` is the fraction of ids that are ``padding_idx``; ``inside`` of these stand between other tokens.
    ``zeroed`` rows had a gradient of 0 whenever they were used, of ``used``; ``decayed`` of these changed.
    """

    path: str
    padding: float = 0.0
    inside: float = 0.0
    used: int = 0
    zeroed: int = 0
    decayed: int = 0


@dataclass(frozen=True, kw_only=True)
class OutputSpread:
    """How far the outputs of a model differ from sample to sample, relative to their size."""

    step: int
    spread: float


@dataclass(frozen=True, kw_only=True)
class ModulesFacts:
    """Over the examined steps, the last of which is ``last``.

    Attributes:
        looks: Examined steps.
        same_inputs: The inputs were the same in all of them.
        constant: The first module whose outputs are the same for every sample though its inputs are not; None where
            there is none. ``is_whole``: the outputs of the model are the same.
        constant_kind: Its class.
        spreads: Of outputs that are vectors, in steps whose loss has no data but the inputs.
        noisy: Frozen modules in train mode that were called only without gradients, and contain dropout.
        drifting: Frozen modules in train mode whose running statistics are updated.
        repeated: Modules that stand several times in one container.
        flat: The operation with a derivative of 0 everywhere that the graph of the loss contains.
        behind_flat: Parameters that the loss reaches through such operations only.
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
