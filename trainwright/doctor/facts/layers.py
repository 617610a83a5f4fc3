"""Measurements of the layers in one replay of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ReluFacts:
    """Outputs of a ReLU."""

    dead: float  # Fraction of units that are 0 for every sample
    varies: float  # Fraction of units whose input varies between samples
    rows: int  # Number of samples
    furthest: float  # Lowest mean input of a unit


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    """Load of the experts of a router."""

    experts: int  # Number of experts
    effective: float  # Effective number of experts: the exponential of the entropy of the load
    most: float  # Largest fraction of the load on one expert


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """A BatchNorm in one step: values per channel, samples, calls, and updates of its running statistics."""

    values: int = 0
    samples: int = 0
    calls: int = 0
    updates: int = 0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """The root mean square gradient of a weight matrix of a module."""

    module: str
    size: float


@dataclass(frozen=True, kw_only=True)
class WrongAxes:
    """Calls at one place that treat axes wrongly."""

    # "reordered": a view permutes equal sizes where a transpose was meant. "inverted": an attention mask hides all keys
    # but the padding.
    kind: str
    module: str
    line: str | None
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayersFacts:
    """Measurements by path of the layer. ``depth`` is in forward order. ``is_fp16``: measured in float16."""

    experiment: ClassVar[str] = "layer_outputs"
    relus: dict[str, ReluFacts] = field(default_factory=dict)
    routers: dict[str, RouterFacts] = field(default_factory=dict)
    norms: dict[str, NormFacts] = field(default_factory=dict)
    depth: tuple[LayerGradient, ...] = ()
    is_fp16: bool = False
    dropout: dict[str, float] = field(default_factory=dict)
    axes: tuple[WrongAxes, ...] = ()

    def wrong_axes(self, kind: str) -> list[WrongAxes]:
        return [each for each in self.axes if each.kind == kind]


@dataclass(frozen=True, kw_only=True)
class DropoutFacts:
    """The loss of one batch: the mean over eight dropout masks, and the value without strong dropout."""

    experiment: ClassVar[str] = "dropout_gap"
    with_dropout: float
    without: float


@dataclass(frozen=True, kw_only=True)
class SymmetryFacts:
    """For each weight, the fraction of rows that equal the first row both in the weight and in its gradient."""

    experiment: ClassVar[str] = "symmetry"
    alike: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FirstLossFacts:
    """The loss of the first step, as it was and with weights of the usual scale."""

    experiment: ClassVar[str] = "first_loss_rescaled"
    loss: float  # The recorded loss
    classes: int  # Number of classes
    input_size: float  # Largest root mean square of an input
    large: dict[str, float]  # For each weight that is too large, the factor by which it is divided
    rescaled: float  # The loss with these weights divided
