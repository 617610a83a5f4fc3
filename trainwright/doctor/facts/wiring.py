"""Measurements of the structure of a model: tensors that the autograd graph reaches, and consecutive layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Two linear layers; only the second uses the output of the first. Shapes: ``(outputs, inputs, *kernel)``."""

    first: str
    second: str
    first_shape: tuple[int, ...]
    second_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GraphCut:
    """A place at which the graph ends, so that no gradient reaches the parameters behind it.

    Attributes:
        how: The operation that cuts the graph.
        inside: Path of the module with the cut.
        last: The last module before the cut; None if unknown.
        behind: Parameters that no gradient reaches.
        aside: No trained weight uses the value above the cut or produces the value below it.
    """

    how: str
    inside: str
    last: str | None
    behind: tuple[str, ...]
    aside: bool


@dataclass(frozen=True, kw_only=True)
class WiringFacts:
    """Structure of the models.

    Attributes:
        trained: Number of trained parameters.
        trained_beside_norms: Number of these outside of normalizations.
        frozen_beside_norms: Number of frozen parameters outside of normalizations.
        cuts: Places at which the graph ends.
        unregistered: Trained tensors that are not parameters of a module.
        unregistered_values: Number of their elements.
        chains: Linear layers without an activation between them.
        custom: Custom autograd Functions in the graph.
    """

    experiment: ClassVar[str] = "structure"
    trained: int
    trained_beside_norms: int
    frozen_beside_norms: int
    cuts: tuple[GraphCut, ...] = ()
    unregistered: tuple[str, ...] = ()
    unregistered_values: int = 0
    chains: tuple[Chain, ...] = ()
    custom: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ActivatedFacts:
    """The loss after updates on one batch: unchanged, and with an activation between consecutive linear layers."""

    experiment: ClassVar[str] = "activation_between"
    unchanged: float
    activated: float


@dataclass(frozen=True, kw_only=True)
class SavedFacts:
    """Tensors saved for the backward pass.

    Attributes:
        modified: Modules whose saved tensors had changed before the backward pass.
        differs: The first module whose recomputed outputs under activation checkpointing differ from those of the
            forward pass; None without one.
        kind: Class of that module.
    """

    experiment: ClassVar[str] = "integrity"
    modified: tuple[str, ...] = ()
    differs: str | None = None
    kind: str = ""
