"""Measurements of the weights: which tensors change, learning rates, and gradients of exactly 0."""

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
    has_gradient: bool = False  # A tensor had a gradient other than 0
    stands_since: int = 0  # The last step after which anything had changed
    updates_since: int = 0  # Updates since ``stands_since``
    # Weights whose version counter before the first step shows that they were trained
    worked_on: tuple[str, ...] = ()
    since: int = 0  # Step of the previous examination
    unchanged: tuple[str, ...] = ()  # Tensors that have not changed since ``since``, or have a gradient of zeros
    at_0_since: int = 0  # The step since which the learning rates of all groups are 0; 0 if they are not
    rate_before_0: float = 0.0  # The highest learning rate in the step before ``at_0_since``
    highest_rate: float = 0.0  # The highest learning rate


def standing(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Returns the names of weights that have not changed since ``step``; None before an examination after ``step``.

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
    return [name for name in names if all(name in look for look in examinations)]


@dataclass(frozen=True, kw_only=True)
class PretrainedFacts:
    """The origin of the weights of a model that Trainwright has built."""

    experiment: ClassVar[str] = "pretrained"
    missing: tuple[str, ...] = ()  # Names of weights of the pretrained part that are not in its files
    is_random: bool = False  # The model was built without pretrained weights
    adapters: int = 0  # Number of layers with low-rank adapters


def is_left_as_it_is(run: RunContext, names: Sequence[str]) -> bool:
    """Returns True if weights without a gradient were trained before, or are outside of the path to the loss."""
    wiring, weights = run.latest(WiringFacts), run.latest(WeightsFacts)
    cuts = wiring.cuts if wiring is not None else ()
    beside = {name for each in cuts if each.aside for name in each.behind}
    beside -= {name for each in cuts if not each.aside for name in each.behind}
    return set(names) <= beside or (weights is not None and set(names) <= set(weights.worked_on))
