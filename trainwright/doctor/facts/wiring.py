"""Measurements of how a model is wired: which tensors the graph reaches, and which layers follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Two linear layers, of which the second is the only use of the first. Shapes: ``(outputs, inputs, *kernel)``."""

    first: str
    second: str
    first_shape: tuple[int, ...]
    second_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GraphCut:
    """Where the graph ends above parameters that no gradient reaches.

    ``aside``: no weight that a gradient reaches takes in what is above the cut, or makes what is below it.
    """

    how: str
    inside: str
    last: str | None
    behind: tuple[str, ...]
    aside: bool


@dataclass(frozen=True, kw_only=True)
class WiringFacts:
    """What is trained, what the graph reaches, and which linear layers have nothing between them."""

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
    """The loss after updates on one batch, unchanged and with an activation after each linear layer in a row."""

    experiment: ClassVar[str] = "activation_between"
    unchanged: float
    activated: float


@dataclass(frozen=True, kw_only=True)
class SavedFacts:
    """``modified``: modules whose saved tensors had other values in backward. ``differs``: the first module whose
    outputs under activation checkpointing differ from those of the forward pass, and its class.
    """

    experiment: ClassVar[str] = "integrity"
    modified: tuple[str, ...] = ()
    differs: str | None = None
    kind: str = ""
