"""Measurements of the weights: movement of each tensor, scale, learning rates, gradients of exactly 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.wiring import WiringFacts

MAX_NAMES = 32
"""Maximum number of tensors that are listed for each property."""


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The weights at an examination, compared with the initial ones and with those at the previous examination.

    Attributes:
        steps: Steps so far.
        updates: Updates at a learning rate above 0.
        tensors: Number of trainable tensors in optimizers with such a learning rate.
        moved: Number of these that have changed.
        zero_gradients: Matrices among these whose gradient was all zeros at every examination.
        zero_weights: Matrices that began as zeros and never moved.
        has_gradient: A tensor had a gradient other than 0.
        stands_since: The last step after which anything had changed.
        updates_since: Updates since then.
        frozen: Number of tensors in an optimizer that do not require a gradient.
        frozen_moved: Names of these that changed.
        worked_on: Weights that were written to so often before the first step that they must have been trained.
        since: Step of the previous examination.
        unchanged: Tensors that have not changed since then, or have a gradient of zeros.
        lowest_rate: The lowest learning rate of an update if it is below 0, else 0.
        lowest_at: Step of that update.
        at_0_since: The step since which the learning rates of all groups are 0; 0 if they are not.
        rate_before_0: The highest learning rate in the step before that.
        highest_rate: The highest learning rate.
    """

    experiment: ClassVar[str] = "weights"
    steps: int
    updates: int
    tensors: int = 0
    moved: int = 0
    zero_gradients: tuple[str, ...] = ()
    zero_weights: tuple[str, ...] = ()
    has_gradient: bool = False
    stands_since: int = 0
    updates_since: int = 0
    frozen: int = 0
    frozen_moved: tuple[str, ...] = ()
    worked_on: tuple[str, ...] = ()
    since: int = 0
    unchanged: tuple[str, ...] = ()
    lowest_rate: float = 0.0
    lowest_at: int = 0
    at_0_since: int = 0
    rate_before_0: float = 0.0
    highest_rate: float = 0.0


def standing(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Returns the weights that have not changed since ``step``; None if only the next examination will show it.

    A weight without a gradient that changes follows a moving average, is changed by hand, or has a gradient from a loss
    outside of the replay.
    """
    every = [facts for _, facts in run.every(WeightsFacts)]
    if not every:
        return list(names)
    if not run.finished and not any(facts.since >= step for facts in every):
        return None
    looks = [set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MAX_NAMES]
    return [name for name in names if all(name in look for look in looks)]


@dataclass(frozen=True, kw_only=True)
class PretrainedFacts:
    """The origin of the weights of a model that Trainwright has built.

    Attributes:
        missing: Names of weights of the pretrained part that are not in its files.
        is_random: The model was built without pretrained weights.
        adapters: Number of layers with low-rank adapters.
    """

    experiment: ClassVar[str] = "pretrained"
    missing: tuple[str, ...] = ()
    is_random: bool = False
    adapters: int = 0


def is_left_as_it_is(run: RunContext, names: Sequence[str]) -> bool:
    """Returns True if weights without a gradient are used unchanged on purpose: outside of the trained path, or
    pretrained.
    """
    wiring, weights = run.latest(WiringFacts), run.latest(WeightsFacts)
    cuts = wiring.cuts if wiring is not None else ()
    beside = {name for each in cuts if each.aside for name in each.behind}
    beside -= {name for each in cuts if not each.aside for name in each.behind}
    return set(names) <= beside or (weights is not None and set(names) <= set(weights.worked_on))
