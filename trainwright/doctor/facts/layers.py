"""Measurements of the layers in one replay of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ReluFacts:
    """``dead``: fraction of units that are 0 for every sample. ``varies``: fraction whose input varies."""

    dead: float
    varies: float
    rows: int
    furthest: float


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """``highest``: largest score. ``off``: distance of the sum of weights from 1. ``evenness``: 0 to 1."""

    highest: float
    spread: float
    evenness: float
    off: float


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    """``effective``: experts that carry the load; ``most``: fraction of the load on one of them."""

    experts: int
    effective: float
    most: float


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """A BatchNorm: values for each channel, samples, calls, and updates of its statistics in a step."""

    values: int = 0
    samples: int = 0
    calls: int = 0
    updates: int = 0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StandingNorm:
    """A trained normalization by the batch whose running statistics are the same at every look since step ``since``.

    Attributes:
        op: The function that normalises.
        others: Looks at an input with another mean than that of the first.
        shift: How far these means are from it at most, in deviations of the input.
        momentum: That of its last call.
        is_given: Its own statistics are passed to the function that normalises.
    """

    op: str
    since: int
    others: int
    shift: float
    momentum: float
    is_given: bool


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """The root mean square gradient of a weight matrix of a module."""

    module: str
    size: float


@dataclass(frozen=True, kw_only=True)
class Reordered:
    """A place that treats axes wrongly, with the shapes of the tensors there."""

    module: str
    line: str | None
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class AxisFacts:
    """``reordered``: views of the same sizes in another order. ``numbered``: rows of a table, one for each sample, are
    added to sequences. ``inverted``: attention hides all keys but the padding. ``over_samples``: a softmax over the
    samples of the batch. ``batch_as_steps``: a layer without ``batch_first`` gets the samples as its first axis.
    """

    reordered: tuple[Reordered, ...] = ()
    numbered: tuple[Reordered, ...] = ()
    inverted: tuple[Reordered, ...] = ()
    over_samples: tuple[Reordered, ...] = ()
    batch_as_steps: tuple[Reordered, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayersFacts:
    """What each layer did, by path. ``depth`` is in the order of use. ``narrow``: the step computes in 16 bits."""

    experiment: ClassVar[str] = "layer_outputs"
    relus: dict[str, ReluFacts] = field(default_factory=dict)
    attention: dict[str, AttentionFacts] = field(default_factory=dict)
    routers: dict[str, RouterFacts] = field(default_factory=dict)
    norms: dict[str, NormFacts] = field(default_factory=dict)
    standing: dict[str, StandingNorm] = field(default_factory=dict)
    depth: tuple[LayerGradient, ...] = ()
    narrow: bool = False
    dropout: dict[str, float] = field(default_factory=dict)
    axes: AxisFacts = AxisFacts()


@dataclass(frozen=True, kw_only=True)
class DepthFacts:
    """The gradients over depth once more, with everything in float32."""

    experiment: ClassVar[str] = "depth_in_fp32"
    depth: tuple[LayerGradient, ...]


@dataclass(frozen=True, kw_only=True)
class DropoutFacts:
    """The loss of a batch, mean over eight dropout masks, and without strong dropout."""

    experiment: ClassVar[str] = "dropout_gap"
    with_dropout: float
    without: float


@dataclass(frozen=True, kw_only=True)
class SymmetryFacts:
    """By weight: the fraction of rows that equal the first one both in the weight and in its gradient."""

    experiment: ClassVar[str] = "symmetry"
    alike: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FirstLossFacts:
    """The first loss, and the loss with weights of the usual size: ``large`` ones are divided by these factors."""

    experiment: ClassVar[str] = "first_loss_rescaled"
    loss: float
    classes: int
    input_size: float
    large: dict[str, float]
    rescaled: float
