"""Which calls a loop makes, in what order, and which optimizer holds which parameters. Steps count from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class GroupFacts:
    """A parameter group. ``lr`` is None where the optimizer has no learning rate; ``with_grad`` counts tensors."""

    parameters: int
    with_grad: int
    lr: float | None = None
    initial_lr: float | None = None


@dataclass(frozen=True)
class OptimizerFacts:
    """``stale`` tensors are not in the watched models and have no gradient."""

    kind: str
    parameters: int
    stale: int
    groups: tuple[GroupFacts, ...]


@dataclass(frozen=True)
class ScaledClip:
    """A clip at the norm ``at`` of gradients that still contained the loss ``scale``."""

    at: float
    norm: float | None
    scale: float


@dataclass(frozen=True)
class CallsFacts:
    """The calls so far.

    Attributes:
        missing: Trainable parameters with a gradient that no optimizer holds and that do not change.
        missing_share: Their fraction of the trainable elements.
        missing_were_trained: They were trained before the watch began.
        doubles: Updates with gradients that another optimizer had applied.
        again: Updates without a backward pass since the update before.
        split_windows: (step, backward passes before the end of an epoch, backward passes in all) of steps during which
            an epoch ended.
        idle_scalers: Enabled GradScalers that the watch was given and that have scaled no loss.
        accumulation: The number of micro-batches that the watch was told.
        carried: By optimizer, the norm of the gradients that existed when the last step began.
        moved, steps_seen: Before the first step only: whether a weight changed, and optimizers that stepped.
    """

    experiment: ClassVar[str] = "calls"
    optimizers: tuple[OptimizerFacts, ...] = ()
    missing: tuple[str, ...] = ()
    missing_share: float = 0.0
    missing_were_trained: bool = False
    doubles: int = 0
    again: int = 0
    scaled_clips: int = 0
    scaled_clip: ScaledClip | None = None
    split_windows: tuple[tuple[int, int, int], ...] = ()
    idle_scalers: int = 0
    accumulation: int | None = None
    carried: tuple[float, ...] = ()
    backwards: int = 0
    moved: bool = False
    steps_seen: int = 0


@dataclass(frozen=True)
class ScalerFacts:
    """How a loss scale was used. ``scaled_updates`` were made while it was in the gradients, first at ``since``.

    Of ``steps`` calls of ``scaler.step``, ``other`` were made through another scaler than the one of the loss.
    """

    experiment: ClassVar[str] = "scaler"
    scaled_updates: int = 0
    since: int = 0
    steps: int = 0
    updates: int = 0
    other: int = 0


@dataclass(frozen=True)
class IdleAttribute:
    """The attribute ``name`` of ``owner`` that nothing reads. ``known`` is what ``count`` parameters lack."""

    owner: str
    name: str
    known: str
    count: int


@dataclass(frozen=True)
class AttributesFacts:
    """Attributes of parameters, modules and optimizers that nothing reads."""

    experiment: ClassVar[str] = "attributes"
    idle: tuple[IdleAttribute, ...] = ()


@dataclass(frozen=True)
class KeptState:
    """A dictionary of ``state_dict()`` whose tensors changed while it was kept. ``source`` is the line of the call.

    ``used``: by ``load``, by ``save``, or "" where it was kept until the end.
    """

    taken: int
    used_at: int
    used: str
    source: str | None


@dataclass(frozen=True)
class KeptFacts:
    """``taken`` dictionaries were returned; ``changed`` no longer hold what they held then."""

    experiment: ClassVar[str] = "kept"
    taken: int
    changed: tuple[KeptState, ...] = ()
