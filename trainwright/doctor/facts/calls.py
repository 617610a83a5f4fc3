"""Calls of a training loop, the parameters of each optimizer, loaded states, random states. Steps count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainwright.runs.json_values import Event
from trainwright.runs.records import Watched


@dataclass(frozen=True)
class GroupFacts:
    """A parameter group."""

    parameters: int  # Number of tensors
    with_grad: int  # Number of tensors with a gradient
    lr: float | None = None  # Learning rate; None if the optimizer has none
    initial_lr: float | None = None  # The ``initial_lr`` that a scheduler wrote; None without one


@dataclass(frozen=True)
class OptimizerFacts:
    """The parameters of an optimizer. ``stale`` tensors are not in the watched models and have no gradient."""

    parameters: int
    stale: int
    groups: tuple[GroupFacts, ...]
    module: str = ""  # Path of the module that holds all of its parameters; "" for the model itself


@dataclass(frozen=True)
class ScaledClip:
    """A call that clipped gradients to the norm ``at`` while they still contained the loss ``scale``."""

    at: float
    norm: float | None
    scale: float


@dataclass
class CallsFacts:
    """The calls so far."""

    experiment: ClassVar[str] = "calls"
    optimizers: tuple[OptimizerFacts, ...] = ()  # The optimizers and their parameter groups
    missing: tuple[str, ...] = ()  # Trainable parameters with a gradient that no optimizer holds and that do not change
    missing_share: float = 0.0  # Their fraction of the trainable elements
    missing_were_trained: bool = False  # They were trained before the watch began
    missing_outside: bool = False  # They belong to small modules outside of the models, such as a loss with weights
    doubles: int = 0  # Number of updates with gradients that another optimizer had already applied
    # (step, backward passes before the end of an epoch, all backward passes) for each step during which an epoch ended
    split_windows: tuple[tuple[int, int, int], ...] = ()
    accumulation: int | None = None  # Number of micro-batches that was passed to the watch
    carried: tuple[float, ...] = ()  # For each optimizer, the norm of gradients that existed when the last step began
    with_left: tuple[int, ...] = ()  # For each optimizer, updates with gradients left by another one's backward pass
    backwards: int = 0  # Number of backward passes
    moved: bool = False  # A weight has changed although no step has ended
    steps_seen: int = 0  # Number of optimizers that have stepped


@dataclass
class ScalerFacts:
    """Calls of gradient scalers."""

    experiment: ClassVar[str] = "scaler"
    scaled_updates: int = 0  # Updates with gradients that still contained the loss scale
    since: int = 0  # The first step with such an update
    steps: int = 0  # Calls of ``scaler.step``
    other: int = 0  # Calls of ``unscale_`` or ``step`` of a scaler that did not scale the loss
    scaled_clips: int = 0  # Number of clips of gradients that still contained a loss scale
    scaled_clip: ScaledClip | None = None  # One of them


@dataclass(frozen=True)
class KeptState:
    """A result of ``state_dict()`` whose tensors changed while the loop held it."""

    taken: int  # The step after which it was returned
    used_at: int  # The step after which it was used
    used: str  # "load", "save", or "" if the loop held it until the end
    source: str | None  # Line of the call of ``state_dict()``


@dataclass
class KeptFacts:
    """Results of ``state_dict()``: the number returned, and those whose tensors have changed since."""

    experiment: ClassVar[str] = "kept"
    taken: int = 0
    changed: tuple[KeptState, ...] = ()
    from_itself: tuple[int, ...] = ()  # The steps after which a module was loaded from its own live tensors
    loaded_module: str = ""  # Path of that module, or its class
    loaded_at: str | None = None  # Line of the load


def kinds(step: Watched, *wanted: str) -> list[Event]:
    """Returns the events of these kinds, in order."""
    return [each for each in step.events if each[0] in wanted]


def has_closure(step: Watched) -> bool:
    """Returns True if the optimizer called a closure and so determined the order of events itself."""
    return "closure" in str(step.values.get("blind", ""))


def optimizers_of(steps: Sequence[Watched]) -> list[int]:
    """Returns the indices of the optimizers that stepped."""
    return sorted({v["optimizer"] for each in steps for k, v in each.events if k == "step" and isinstance(v, dict)})


@dataclass(kw_only=True)
class SteadinessFacts:
    """Random states at the starts of sampled steps."""

    experiment: ClassVar[str] = "steadiness"
    draws: bool = False  # Random numbers are drawn during a step
    repeats: int = 0  # Number of steps that began in the random state of an earlier step
    since_repeat: int = 0  # The first such step
    repeated_step: int = 0  # The earlier step with the same state
    seeded_at: str | None = None  # The last line of the loop that seeded a default generator
    seeded_alike: int = 0  # Steps in a row that seeded it, drew, and ended in the state of the step before


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """A call of ``load_state_dict`` on a model."""

    step: int  # Number of updates before the call
    tensors: int  # Number of tensors of the model
    missing: tuple[str, ...] = ()  # Names that the model has and the state lacks
    unexpected: tuple[str, ...] = ()  # Names that the state has and the model lacks
    prefix: str | None = None  # Prefix by which the unexpected names and the missing ones differ


@dataclass(frozen=True, kw_only=True)
class OverwrittenFacts:
    """Weights that were loaded before the first forward call."""

    weights: int  # Number of loaded weights
    gone: int  # Number of weights that have other values at the first forward call
    fraction: float  # Fraction of the loaded elements in these weights


@dataclass(frozen=True, kw_only=True)
class ResumeFacts:
    """Loads of the models."""

    experiment: ClassVar[str] = "resume"
    loads: tuple[LoadFacts, ...] = ()
    overwritten: OverwrittenFacts | None = None
