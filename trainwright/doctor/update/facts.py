"""What is measured of an update. Norms and sums are of one tensor each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trainwright.runlog.records import Where


@dataclass(frozen=True)
class Differing:
    """A tensor whose sums were others in the loop than in the replay of the same step."""

    name: str
    live_norm: float
    replayed_norm: float
    live_sum: float
    replayed_sum: float

    @property
    def ratio(self) -> float | None:
        """Live over replayed norm; None where there is nothing to divide by, or only one of both has a value."""
        if not self.replayed_norm > 0.0 or self.live_norm != self.live_norm:
            return None
        return self.live_norm / self.replayed_norm

    @property
    def is_turned(self) -> bool:
        """Whether both sums have a sign, and it is another."""
        return self.live_sum * self.replayed_sum < 0.0


@dataclass(frozen=True)
class FirstSums:
    """Of a tensor as the first update that is looked at found it."""

    norm: float
    sum: float
    elements: int


@dataclass(frozen=True)
class RuleFacts:
    """The update of an optimizer beside that of its own class in float64, from the same weights, gradients and state.

    ``off`` are tensors further away than rounding puts them, with the distance as a share of the update. ``kept`` is
    the share of the update, along itself, that the weights have taken on; ``least_kept`` that of the worst tensor.
    ``is_hooked``: functions of the user's are called after each update.
    """

    optimizer: str
    tensors: int
    off: dict[str, float]
    kept: float
    least_kept: float
    lost_in: tuple[str, ...]
    dtype: str
    is_hooked: bool


@dataclass(frozen=True)
class UpdateFacts:
    """One step as the loop made it and as its replay makes it. ``slopes``: of each update the cosine to the gradient.

    ``is_compared``: the step has live sums. ``has_same_loss``: nothing that the loss depends on was another in the
    replay; where weights were, ``loss`` and ``replayed_loss`` tell what they have changed. ``is_grafted``: a part of
    the loss is made of what a model computes and does not return; the replay does not have its graph. ``begin``: the
    sums of the weights, at the first step alone.
    """

    experiment: ClassVar[str] = "update_made"
    is_compared: bool
    edited: bool
    tensors: int
    written: tuple[Differing, ...]
    regraded: tuple[Differing, ...]
    left: tuple[Differing, ...]
    has_same_loss: bool
    loss: float
    replayed_loss: float
    rules: tuple[RuleFacts, ...]
    slopes: tuple[float, ...]
    optimizers: tuple[str, ...]
    maximises: bool
    is_grafted: bool = False
    begin: dict[str, FirstSums] = field(default_factory=dict)

    @property
    def is_all_turned(self) -> bool:
        """Whether the sign of the gradient of every tensor is another: no player of a game alone goes up."""
        return len(self.regraded) == self.tensors and all(each.is_turned for each in self.regraded)


@dataclass(frozen=True)
class WritesFacts:
    """Begins of steps at which a sample of the weights was compared with what the update before left.

    ``steps`` are the last 32 at which it was another. ``restarts`` are those of them at which the loop has begun again,
    or gone back: with the weights the state of their optimizer was another, too, or there is none and the weights were
    those of the begin. ``evaluated`` are those before which the model was called without gradients.
    """

    experiment: ClassVar[str] = "weights_between_steps"
    compared: int
    steps: tuple[int, ...]
    restarts: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShrunkFacts:
    """The losses of the last recorded steps, made again from a state before them: with every weight that something else
    shrinks made ``factor`` times as large after each update, and without that. ``share`` of the elements are such."""

    experiment: ClassVar[str] = "weights_shrunk"
    factor: float
    share: float
    shrunk: tuple[float, ...]
    without: tuple[float, ...]


@dataclass(frozen=True)
class RestoredFacts:
    """The losses of the last recorded steps, made again from a state before them with the gradients as the backward
    passes make them. The last one is that of the step that was looked at."""

    experiment: ClassVar[str] = "gradients_restored"
    losses: tuple[float, ...]


NEAR = 1e-4
"""Relative: two ratios of norms in float32, which are one."""
BY_HAND = 2e-3
"""Of its size that a weight loses in a step: what a decay of 0.2 takes off it at a rate of 0.01, which is strong."""


def module_of(names: Sequence[str]) -> Where:
    """The module that all of these parameters are in, where they are in one."""
    modules = {name.rpartition(".")[0] for name in names}
    return Where(module=modules.pop() if len(modules) == 1 else None)


def common_factor(tensors: Sequence[Differing]) -> float | None:
    """By what all of these, two at least, were multiplied; None where they were not all by one number below 1."""
    ratios = [(each.ratio, each) for each in tensors]
    known = [(ratio, each) for ratio, each in ratios if ratio is not None]
    if len(known) < max(2, len(tensors)):
        return None
    factor = known[0][0]
    is_one = all(
        abs(ratio - factor) < NEAR * factor and abs(each.live_sum - factor * each.replayed_sum) < NEAR * each.live_norm
        for ratio, each in known
    )
    return factor if is_one and 0.0 < factor < 1.0 - BY_HAND else None
