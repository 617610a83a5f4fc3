"""Measurements of the weights: which change, learning rates, the effect of an update, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.wiring import WiringFacts

MAX_NAMES = 32  # Maximum number of names in each list


@dataclass(kw_only=True)
class WeightsFacts:
    """The weights at an examination, compared with the initial ones and with those at the previous examination."""

    experiment: ClassVar[str] = "weights"
    steps: int = 0  # Steps so far
    updates: int = 0  # Updates at a learning rate above 0
    tensors: int = 0  # Number of trainable tensors in optimizers whose learning rate was above 0
    moved: int = 0  # Number of these tensors that have changed
    zero_gradients: tuple[str, ...] = ()  # Matrices of ``tensors`` whose gradient was all zeros at every examination
    zero_weights: tuple[str, ...] = ()  # Matrices that began as zeros and never moved
    zeros: int = 0  # Number of matrices of ``tensors`` that began as zeros
    has_gradient: bool = False  # A tensor had a gradient other than 0
    stands_since: int = 0  # Step of the last examination that found a change
    updates_since: int = 0  # Updates since ``stands_since``
    worked_on: tuple[str, ...] = ()  # Weights that were trained before, as their version counters show
    since: int = 0  # Step of the previous examination
    unchanged: tuple[str, ...] = ()  # Tensors that have not changed since ``since``, or have a gradient of zeros
    at_0_since: int = 0  # The step since which the learning rates of all groups are 0; 0 if they are not
    rate_before_0: float = 0.0  # The highest learning rate in the step before ``at_0_since``
    highest_rate: float = 0.0  # The highest learning rate
    updates_before: int = 0  # Updates that the state of an optimizer counted before the first step
    frozen_by_name: tuple[str, ...] = ()  # Trained modules and parameters with an attribute that does not freeze them
    frozen_at_random: str = ""  # Path of the last linear layer if it is frozen with the values of an initialisation
    frozen_outputs: int = 0  # Number of its outputs
    idle_outputs: tuple[int, ...] = ()  # Outputs of the last layer that had no gradient in the first 32 steps
    idle_module: str = ""  # Path of that layer
    outputs: int = 0  # Number of its outputs


def unchanged_since(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Returns the names of weights that have not changed since ``step``; None if no examination has followed it yet.

    A weight without a gradient may still change: by a moving average, by code of the user, or by a loss that the replay
    does not contain.
    """
    every = [facts for _, facts in run.every(WeightsFacts)]
    if not every:
        return list(names)
    if not run.finished and not any(facts.since >= step for facts in every):
        return None
    examinations = [
        set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MAX_NAMES
    ]
    return [name for name in names if all(name in unchanged for unchanged in examinations)]


@dataclass(frozen=True, kw_only=True)
class PretrainedFacts:
    """The origin of the weights of a model."""

    experiment: ClassVar[str] = "pretrained"
    missing: tuple[str, ...] = ()  # Names of weights of the pretrained part that are not in its files
    is_random: bool = False  # The model was built without pretrained weights
    adapters: int = 0  # Number of layers with low-rank adapters
    frozen: int = 0  # Number of frozen linear layers, if at least half of their weights are those of ``fresh``
    fresh: tuple[str, ...] = ()  # Those of them with the values of an initialisation, unless all have them


def is_intentionally_untrained(run: RunContext, names: Sequence[str]) -> bool:
    """Returns True if weights without a gradient were trained before, or are outside of the path to the loss."""
    wiring, weights = run.latest(WiringFacts), run.latest(WeightsFacts)
    cuts = wiring.cuts if wiring is not None else ()
    beside = {name for each in cuts if each.aside for name in each.behind}
    beside -= {name for each in cuts if not each.aside for name in each.behind}
    return set(names) <= beside or (weights is not None and set(names) <= set(weights.worked_on))


@dataclass(frozen=True)
class UpdateFacts:
    """One replayed update."""

    experiment: ClassVar[str] = "update"
    loss: float  # Loss of the batch before the update
    after: float  # Loss of the batch after the update
    optimizers: int  # Number of optimizers that step
    lr: tuple[float, ...]  # Learning rate of each group in each update
    weight_decay: tuple[float, ...]  # Weight decay of each group in each update
    decoupled: bool  # Weight decay acts on the weights, as in AdamW
    grad_norm: float  # Norm of the gradients
    norm_at_clip: float | None  # Norm of the gradients before clipping; None without a clip
    weight_norm: float  # Norm of the weights with a gradient
    ratio: float  # Norm of the update / ``weight_norm``
    input_rms: float | None  # Largest root mean square of an input; None without a floating-point input
    gradient_times_weight: float = 0.0  # Sum over the tensors: norm of the gradient x norm of the weights


@dataclass(frozen=True)
class BatchStepsFacts:
    """Repeated updates on one batch."""

    experiment: ClassVar[str] = "batch_steps"
    losses: tuple[float, ...]  # The loss after each update
    falls_at: float | None  # The first factor of the learning rate at which the loss falls steadily; None without one
    falls_to: float | None = None  # The loss after eight updates at this factor


@dataclass(frozen=True)
class AgainFacts:
    """A replay compared with the recorded step and with a second replay."""

    experiment: ClassVar[str] = "again"
    same_losses: bool  # The replayed losses equal the recorded ones
    tolerance: float  # Relative difference that is allowed for a compiled model
    same_twice: bool  # Both replays have equal losses
    norm_then: float | None  # Norm of the recorded gradients
    norm_now: float | None  # Norm of the replayed gradients
    error: str | None  # Error of the replay; None without one


@dataclass(frozen=True)
class LoadedMomentsFacts:
    """Second moments of an optimizer before its first watched update, compared with the squared gradients there."""

    experiment: ClassVar[str] = "moments"
    kind: str  # Class of the optimizer
    names: tuple[str, ...]  # Names of the tensors
    gaps: tuple[float, ...]  # For each tensor, ``abs(log10(moment / squared gradient))``, largest first
    matched: float  # Mean of the gaps if moments and gradients of tensors with equal shape are matched by size instead


@dataclass(frozen=True)
class Move:
    """One step in which a copy of the weights moved: ``copy += share * (weights - copy) + growth * copy``."""

    step: int
    share: float  # The coefficient of the difference
    growth: float  # The coefficient of the copy
    rest: float  # Fraction of the move that both coefficients leave unexplained
    rest_alone: float  # Fraction of the move that ``share`` alone leaves unexplained
    still: float = 0.0  # Fraction of the elements that did not change


@dataclass(frozen=True)
class StaleStatistics:
    """A normalization of a copy in eval mode. Its running mean has not changed since the copy was found."""

    module: str  # Path of the normalization
    step: int  # The step after which the copy was called
    distance: float  # Largest distance from the mean of the trained module, in standard deviations of the latter
    source: str | None  # Line of the call


@dataclass
class CopyFacts:
    """A copy of a trained module: tensors of the same shapes that no optimizer holds."""

    kind: str  # Class of the object that holds the copy
    of: str  # Path of the trained module
    moves: tuple[Move, ...] = ()  # The steps in which the copy moved
    gap: float = 0.0  # Distance between copy and weights when the copy was found, relative to the norm of the weights
    stale: StaleStatistics | None = None  # Statistics of a normalization that stay behind; None without any
    dtype: str = ""  # Dtype of the copy if it has 16 bits, else ""


@dataclass(frozen=True)
class AveragesFacts:
    """Copies of the weights and their movement."""

    experiment: ClassVar[str] = "averages"
    steps: int  # Steps in which the copies were compared
    is_resumed: bool  # The optimizer had a state when the watch began
    copies: tuple[CopyFacts, ...]


MAX_UNEXPLAINED = 0.05  # Maximum fraction of a move that may stay unexplained, because a float32 copy is rounded
MIN_MOVES = 3  # Minimum number of moves. Fewer may be a copy that is made from time to time.


def averages_of(facts: AveragesFacts) -> list[CopyFacts]:
    """Returns the copies that follow the weights gradually instead of copying them."""
    return [
        each
        for each in facts.copies
        if len(each.moves) >= MIN_MOVES
        and all(abs(move.share - 1) > 1e-3 or move.rest_alone > MAX_UNEXPLAINED for move in each.moves)
    ]
