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
    """A place at which the graph ends, so that no gradient reaches the parameters behind it."""

    how: str  # The operation that cuts the graph
    inside: str  # Path of the module with the cut
    last: str | None  # The last module before the cut; None if unknown
    behind: tuple[str, ...]  # Parameters that no gradient reaches
    line: str | None = None  # Line of the operation, if it is in a module
    aside: bool  # No weight behind the cut, and no weight applied to values computed from the cut, has a gradient


@dataclass(frozen=True, kw_only=True)
class WiringFacts:
    """Structure of the models."""

    experiment: ClassVar[str] = "structure"
    trained: int  # Number of trained parameters
    trained_beside_norms: int  # Number of these outside of normalizations
    frozen_beside_norms: int  # Number of frozen parameters outside of normalizations
    cuts: tuple[GraphCut, ...] = ()  # Places at which the graph ends
    idle: tuple[str, ...] = ()  # Trained parameters without a gradient, although no place cuts them off
    unregistered: tuple[str, ...] = ()  # Trained tensors that are not parameters of a module
    unregistered_values: int = 0  # Number of their elements
    chains: tuple[Chain, ...] = ()  # Linear layers without an activation between them


@dataclass(frozen=True, kw_only=True)
class ActivatedFacts:
    """The loss after updates on one batch: unchanged, and with an activation between consecutive linear layers."""

    experiment: ClassVar[str] = "activation_between"
    unchanged: float
    activated: float


@dataclass(frozen=True, kw_only=True)
class SavedFacts:
    """Tensors saved for the backward pass."""

    experiment: ClassVar[str] = "integrity"
    modified: tuple[str, ...] = ()  # Modules whose saved tensors had changed before the backward pass
    differs: str | None = None  # The first module whose recomputed outputs differ from those of the forward pass
    kind: str = ""  # Class of that module
