"""Slopes of one loss of a recorded step along a direction in the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from trainwright.doctor.gradient.facts import Slopes
from trainwright.recorder.program import Backward, Call, Instruction, Operation, RecordedStep, Slot, mapped
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.functions import OpHandler
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.session import ReplaySession

Direction = dict[str, Tensor]
Dtype = Literal["fp64", "fp32"]
LENGTHS: dict[str, tuple[float, ...]] = {"fp64": (1e-5, 1e-4, 1e-3), "fp32": (3e-3, 1e-2, 3e-2)}
"""Of the steps, in units of a weight's usual size: two of them tell how far the quotient may be trusted."""
GOOD = 1e-4
"""Of the quotient: where two lengths are so near each other, no third one is tried."""
BENT = 0.1
"""Of what curvature makes, as a part of the error: where it makes as much as the slope, the step is far too long."""
LONG = 0.01
"""A step that crosses stairs of a quantised weight, and is not yet far away."""
MOST = 30.0
"""Tensors with a small part in the slope are moved so many times further, at most: each shall count."""


@dataclass
class LossAlongWeights:
    """One of the losses that backward was called on, as a function of the weights."""

    session: ReplaySession
    recorded: RecordedStep
    backward: Backward
    dtype: Dtype
    grads: dict[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan

    def differentiate(self, ops: OpHandler | None = None) -> dict[str, Tensor]:
        """The gradients of this loss alone, without its scale. Raises what the user's code raises."""
        result = self._run("backward", Intervention(dtype=self.dtype, ops=ops))
        self.loss = result.loss
        scale = self.backward.scale
        return {name: g.to_dense() / scale for name, g in result.grads.items() if g is not None}

    def at(self, direction: Direction, length: float) -> float:
        """The loss after a step along ``direction``."""
        named = self.session.parameters

        def nudge(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            if number == 0:
                with torch.no_grad():
                    for name, change in direction.items():
                        named[name].data.add_(change.to(named[name].dtype), alpha=length)
            return args, kwargs

        return float(self._run("forward", Intervention(dtype=self.dtype, inputs=nudge)).losses[0].double())

    def _run(self, upto: Literal["forward", "backward"], intervention: Intervention) -> ReplayResult:
        with self.session.live():
            result = self.session.replayer.run(self.recorded, intervention, upto=upto)
        if result.error is not None:
            raise result.error
        if not result.losses:
            raise NotReplayable("the loss is not a single number")
        return result

    def slope(self, direction: Direction, length: float) -> tuple[float, float]:
        """The central difference quotient, and how much of it curvature makes on one side: large beyond the linear."""
        ahead, behind = self.at(direction, length), self.at(direction, -length)
        return (ahead - behind) / (2 * length), abs(ahead + behind - 2 * self.loss) / (2 * length)

    def _quotient(self, direction: Direction) -> tuple[float, float]:
        """The difference quotient, and how far that of another step size is away.

        Where a part of the loss is rounded to fewer digits, longer steps are the better ones.
        """
        short, middle, long = LENGTHS[self.dtype]
        (narrow, bent), (usual, more_bent) = self.slope(direction, short), self.slope(direction, middle)
        error = abs(narrow - usual) + BENT * bent
        if error <= GOOD * abs(narrow):
            return narrow, error
        wide, _ = self.slope(direction, long)
        other = abs(wide - usual) + BENT * more_bent
        return (usual, other) if other < error else (narrow, error)

    def slopes(self, direction: Direction, *, coarse: bool = False) -> Slopes:
        """Both slopes along ``direction``."""
        narrow, error = self._quotient(direction)
        of_gradient = along(self.grads, direction)
        far = self.slope(direction, LONG)[0] if coarse else narrow
        return Slopes(tuple(direction), of_gradient, narrow, error, far)


def losses_of(session: ReplaySession, dtype: Dtype, most: int) -> list[LossAlongWeights]:
    """The losses of the step, one of each kind of backward pass, at most so many."""
    program = session.recorded_step.program
    found: dict[tuple[object, ...], LossAlongWeights] = {}
    for backward in program:
        if not isinstance(backward, Backward) or backward.slot is None or backward.inputs is not None:
            continue
        recorded = replace(session.recorded_step, program=_for(backward, program), values={})
        kind = tuple(getattr(each, "name", getattr(each, "root", "")) for each in recorded.program)
        if kind not in found and len(found) < most:
            found[kind] = LossAlongWeights(session, recorded, backward, dtype)
    return list(found.values())


def _for(backward: Backward, program: Sequence[Instruction]) -> list[Instruction]:
    """What of the program this loss is made of. Without other backward passes no gradient is but its own."""
    needed: set[int] = set()
    kept: list[Instruction] = [backward]

    def need(value: object) -> None:
        mapped(value, lambda leaf: needed.add(leaf.number) if isinstance(leaf, Slot) else None)

    need([Slot(backward.slot) if backward.slot is not None else None, backward.gradient])
    for each in reversed(program[: next(n for n, b in enumerate(program) if b is backward)]):
        if isinstance(each, Call | Operation):
            writes = isinstance(each, Operation) and each.in_place and isinstance(each.args[0], Slot)
            if needed.intersection(each.outputs) or (writes and each.args[0].number in needed):
                need((each.args, each.kwargs))
                kept.append(each)
    return kept[::-1]


def along(grads: dict[str, Tensor], direction: Direction) -> float:
    """The slope that these gradients give along ``direction``."""
    return sum(float((grads[n] * d.to(grads[n])).sum()) for n, d in direction.items() if n in grads)


def padding_rows(session: ReplaySession) -> dict[str, int]:
    """Of each embedding that has one, the row for padding: it gets no gradient on purpose."""
    names = {id(p): name for name, p in session.parameters.items()}
    found = [m for m in session.modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return {names[id(m.weight)]: m.padding_idx for m in found if m.padding_idx is not None and id(m.weight) in names}


def direction_of(
    tensors: dict[str, Tensor], grads: dict[str, Tensor], seed: int, still: Mapping[str, int]
) -> Direction:
    """A random direction, in units of each tensor's own size, along which no slope of the gradient is negative.

    Tensors with a small part in the slope move further; ``still`` are rows that do not move.
    """
    generator = torch.Generator().manual_seed(seed)
    direction: Direction = {}
    parts: dict[str, float] = {}
    for name, tensor in tensors.items():
        size = float(tensor.detach().double().square().mean().sqrt()) or 0.01
        drawn = (
            torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").to(tensor.device) * size
        )
        if name in still:
            drawn[still[name]] = 0.0
        grad = grads.get(name)
        part = float((grad.double() * drawn).sum()) if grad is not None else 0.0
        direction[name], parts[name] = (-drawn, -part) if part < 0 else (drawn, part)
    largest = max(parts.values(), default=0.0)
    for name, part in parts.items():
        if 0 < part < largest:
            direction[name] = direction[name] * min(MOST, largest / part)
    return direction


def halves(direction: Direction) -> Sequence[Direction]:
    """Its first and its second half, in the order of the model."""
    names = list(direction)
    middle = len(names) // 2
    return [{n: direction[n] for n in part} for part in (names[:middle], names[middle:]) if part]
