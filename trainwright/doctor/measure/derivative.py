"""Finds weights without a gradient that the loss depends on, by difference quotients of a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from trainwright.doctor.facts.gradient import DerivativeFacts, Slope
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.program import Backward, Call, Instruction, Operation, Slot, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.session import ReplaySession

Direction = dict[str, Tensor]
Dtype = Literal["fp64", "fp32"]
MAX_ELEMENTS = 1 << 26
"""Trained elements of a model that is run in float64."""
MAX_KINDS, MAX_TESTS, MAX_NAMES = 3, 24, 16
"""Kinds of backward pass, directions that are tried to find tensors, and names."""
LENGTHS: dict[str, tuple[float, float, float]] = {"fp64": (1e-5, 1e-4, 1e-3), "fp32": (3e-3, 1e-2, 3e-2)}
"""Of the steps, in units of a weight's usual size: two of them show how far the quotient may be trusted."""
LONG = 0.01
"""A step that crosses the stairs of a quantized weight and is not far away."""
NO_SLOPE, STAIRS = 1e-6, 1e3
"""Fraction of the slope of the weights with a gradient that counts as none; times that for steps of ``LONG`` alone."""
REFUSED = (RuntimeError, TypeError, NotImplementedError)


@replay(DerivativeFacts, when="requested", memory=6.0, by_samples=True, steps=12.0)
def derivative(session: ReplaySession) -> DerivativeFacts:
    """Raises NotReplayable where the model is too large, or has no loss that is a number."""
    if sum(p.numel() for p in session.parameters.values()) > MAX_ELEMENTS:
        raise NotReplayable("the model is too large to be run in float64")
    try:
        return _unreached(session, "fp64")
    except REFUSED:  # a part of the model insists on its dtype
        return _unreached(session, "fp32")


@dataclass
class _Loss:
    """One of the losses that backward was called on, as a function of the weights."""

    session: ReplaySession
    program: list[Instruction]
    scale: float
    dtype: Dtype
    grads: dict[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan

    def differentiate(self) -> None:
        """The gradients of this loss alone, without its scale. Raises what the user's code raises."""
        result = self._run("backward", Intervention(dtype=self.dtype))
        self.loss = result.loss
        self.grads = {name: g.to_dense() / self.scale for name, g in result.grads.items() if g is not None}

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
        recorded = replace(self.session.recorded_step, program=self.program, values={})
        with self.session.live():
            result = self.session.replayer.run(recorded, intervention, upto=upto)
        if result.error is not None:
            raise result.error
        if not result.losses:
            raise NotReplayable("the loss is not a single number")
        return result

    def slope(self, direction: Direction) -> Slope:
        """Where a part of the loss is rounded to fewer digits, longer steps are the better ones."""
        short, middle, long = LENGTHS[self.dtype]
        (narrow, bent), (usual, more_bent) = self._quotient(direction, short), self._quotient(direction, middle)
        best, error = narrow, abs(narrow - usual) + 0.1 * bent
        if error > 1e-4 * abs(narrow):
            other = abs(self._quotient(direction, long)[0] - usual) + 0.1 * more_bent
            best, error = (usual, other) if other < error else (best, error)
        return Slope(tuple(direction), best, error, self._quotient(direction, LONG)[0])

    def _quotient(self, direction: Direction, length: float) -> tuple[float, float]:
        """The central difference quotient, and how much of it curvature makes on one side."""
        ahead, behind = self.at(direction, length), self.at(direction, -length)
        return (ahead - behind) / (2 * length), abs(ahead + behind - 2 * self.loss) / (2 * length)


def _unreached(session: ReplaySession, dtype: Dtype) -> DerivativeFacts:
    losses = _losses_of(session, dtype)
    if not losses:
        raise NotReplayable("no loss is made of what the watched model returned")
    for loss in losses:
        loss.differentiate()
    named = zip(session.replayer.names, session.replayer.subject.parameters)
    trained = {name: p for name, p in named if p.requires_grad and p.is_floating_point() and p.numel()}
    held = {id(p) for optimizer in session.optimizers for p in owned_by(optimizer)}
    reached = {n for loss in losses for n, g in loss.grads.items() if bool(g.abs().max() > 0)}
    without = {n: p for n, p in trained.items() if n not in reached and id(p) in held}
    found: dict[str, Slope] = {}
    for loss in losses if without else ():
        sizes = [float(g.norm() * session.parameters[n].detach().norm()) for n, g in loss.grads.items()]
        least = NO_SLOPE * max(sizes, default=abs(loss.loss))
        for each in _sloping(loss, _direction(without, session.step), least, [MAX_TESTS]):
            found.setdefault(each.names[0], each)
    ends = _Ends(session)
    if found:
        with session.live():
            ends.run(upto="forward")
    names = {name for each in found.values() for name in each.names}
    return DerivativeFacts(
        tensors=len(trained),
        unreached=tuple(found.values())[:MAX_NAMES],
        unreached_share=sum(trained[n].numel() for n in names) / max(1, sum(p.numel() for p in trained.values())),
        cuts=tuple(dict.fromkeys(ends.cuts)),
    )


def _direction(tensors: Mapping[str, Tensor], seed: int) -> Direction:
    """A random direction in units of each tensor's own size."""
    generator = torch.Generator().manual_seed(seed)
    direction: Direction = {}
    for name, tensor in tensors.items():
        size = float(tensor.detach().double().square().mean().sqrt()) or 0.01
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
        direction[name] = drawn.to(tensor.device) * size
    return direction


def _sloping(loss: _Loss, direction: Direction, least: float, tests: list[int]) -> list[Slope]:
    """The tensors along which the loss has a slope, found by halving; ``tests`` are left."""
    slope = loss.slope(direction)
    if not (abs(slope.of_loss) > max(10 * slope.error, least) or abs(slope.coarse) > STAIRS * least):
        return []
    names = list(direction)
    if len(names) < 2:
        return [slope]
    if tests[0] < 2:
        return [replace(slope, names=(name,)) for name in names]
    tests[0] -= 2
    halves = [{n: direction[n] for n in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]
    return [found for half in halves for found in _sloping(loss, half, least, tests)]


def _losses_of(session: ReplaySession, dtype: Dtype) -> list[_Loss]:
    """The losses of the step, one of each kind of backward pass."""
    program = session.recorded_step.program
    found: dict[tuple[object, ...], _Loss] = {}
    for place, each in enumerate(program):
        if isinstance(each, Backward) and each.slot is not None and each.inputs is None:
            part = _needed(each, program[:place])
            kind = tuple(getattr(one, "name", getattr(one, "root", "")) for one in part)
            if len(found) < MAX_KINDS:
                found.setdefault(kind, _Loss(session, part, each.scale, dtype))
    return list(found.values())


def _needed(backward: Backward, before: list[Instruction]) -> list[Instruction]:
    """The instructions that this loss is made of: without other backward passes the gradients are its own."""
    needed: set[int] = set()
    kept: list[Instruction] = [backward]

    def need(value: object) -> None:
        mapped(value, lambda leaf: needed.add(leaf.number) if isinstance(leaf, Slot) else None)

    need([Slot(backward.slot) if backward.slot is not None else None, backward.gradient])
    for each in reversed(before):
        if isinstance(each, Call | Operation):
            writes = isinstance(each, Operation) and each.in_place and isinstance(each.args[0], Slot)
            if needed.intersection(each.outputs) or (writes and each.args[0].number in needed):
                need((each.args, each.kwargs))
                kept.append(each)
    return kept[::-1]


class _Ends(StepInspector):
    """Collects what ends the graph: functions that make values without a graph from values with one."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.cuts: list[tuple[str, ...]] = []

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        is_number = bool(inputs) and name in ("item", "tolist", "numpy", "__float__", "__array__")
        if len(self.cuts) < 256 and (is_number or (isinstance(result, Tensor) and _is_cut(name, inputs, result))):
            how = "no_grad" if not torch.is_grad_enabled() else "data" if name == "__get__" else name
            self.cuts.append((how, self.stack[-1] if self.stack else ""))


def _is_cut(name: str, inputs: list[Tensor], output: Tensor) -> bool:
    """A new tensor of the same shape has no graph, and is no cut."""
    is_new = name.endswith("_like") or name.startswith("new_")
    return bool(inputs) and not is_new and output.is_floating_point() and not output.requires_grad
