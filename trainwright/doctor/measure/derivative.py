"""Compares the gradients of a step with difference quotients of its losses, and finds the tensors that deviate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.gradient import DerivativeFacts, Slopes
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.program import Backward, Call, Instruction, Operation, Slot, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector, custom_functions_of
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.session import ReplaySession

Direction = dict[str, Tensor]
Dtype = Literal["fp64", "fp32"]
MAX_ELEMENTS = 1 << 26
"""Trained elements of a model that is run in float64."""
MAX_KINDS, MAX_TESTS, MAX_NAMES = 3, 24, 16
"""Kinds of backward pass that are compared, directions that are tried to find tensors that deviate, and names."""
LENGTHS: dict[str, tuple[float, float, float]] = {"fp64": (1e-5, 1e-4, 1e-3), "fp32": (3e-3, 1e-2, 3e-2)}
"""Of the steps, in units of a weight's usual size: two of them show how far the quotient may be trusted."""
LONG = 0.01
"""A step that crosses the stairs of a quantized weight and is not far away."""
NEAR = 1e-7
"""A step in float64 that hardly ever crosses a kink; rounding leaves its quotient seven digits."""
OFF = {"fp64": 1e-3, "fp32": 3e-2}
"""Relative difference of slopes: a quarter of the units of a layer of 256 may have a kink within the step."""
NO_SLOPE, STAIRS = 1e-6, 1e3
"""Fraction of the slope of the weights with a gradient that counts as none; times that for steps of ``LONG`` alone."""
MAX_BOOST = 30.0
"""Tensors with a small part in the slope are moved this many times further at most, so that each one counts."""
STRAIGHT_THROUGH = ("gumbel_softmax", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine")
"""Functions of torch that pass on a gradient where they have no slope."""
REFUSED = (RuntimeError, TypeError, NotImplementedError)


@replay(DerivativeFacts, when="requested", memory=6.0, by_samples=True, steps=16.0)
def derivative(session: ReplaySession) -> DerivativeFacts:
    """Raises NotReplayable where the model is too large, or has no loss that is a number."""
    if sum(p.numel() for p in session.parameters.values()) > MAX_ELEMENTS:
        raise NotReplayable("the model is too large to be run in float64")
    try:
        return _Comparison(session, "fp64").facts()
    except REFUSED:  # a part of the model insists on its dtype
        return _Comparison(session, "fp32").facts()


@dataclass
class _Loss:
    """One of the losses that backward was called on, as a function of the weights."""

    session: ReplaySession
    program: list[Instruction]
    scale: float
    dtype: Dtype
    grads: dict[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan

    def differentiate(self) -> dict[str, Tensor]:
        """The gradients of this loss alone, without its scale. Raises what the user's code raises."""
        result = self._run("backward", Intervention(dtype=self.dtype))
        self.loss = result.loss
        return {name: g.to_dense() / self.scale for name, g in result.grads.items() if g is not None}

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

    def slope(self, direction: Direction, length: float) -> tuple[float, float]:
        """The central difference quotient, and how much of it curvature makes on one side."""
        ahead, behind = self.at(direction, length), self.at(direction, -length)
        return (ahead - behind) / (2 * length), abs(ahead + behind - 2 * self.loss) / (2 * length)

    def slopes(self, direction: Direction) -> Slopes:
        """Both slopes. Where a part of the loss is rounded to fewer digits, longer steps are the better ones."""
        short, middle, long = LENGTHS[self.dtype]
        (narrow, bent), (usual, more_bent) = self.slope(direction, short), self.slope(direction, middle)
        best, error = narrow, abs(narrow - usual) + 0.1 * bent
        if error > 1e-4 * abs(narrow):
            other = abs(self.slope(direction, long)[0] - usual) + 0.1 * more_bent
            best, error = (usual, other) if other < error else (best, error)
        coarse = self.slope(direction, LONG)[0]
        return Slopes(tuple(direction), along(self.grads, direction), best, error, coarse)


class _Comparison:
    """The comparison for all kinds of backward pass of a step."""

    def __init__(self, session: ReplaySession, dtype: Dtype) -> None:
        self._session, self._dtype, self._tests = session, dtype, MAX_TESTS
        self._losses = _losses_of(session, dtype)
        if not self._losses:
            raise NotReplayable("no loss is made of what the watched model returned")
        names = {id(p): name for name, p in session.parameters.items()}
        embeddings = [m for m in session.modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self._padding = {names[id(m.weight)]: m.padding_idx for m in embeddings if id(m.weight) in names}
        named = zip(session.replayer.names, session.replayer.subject.parameters)
        self._trained = {name: p for name, p in named if p.requires_grad and p.is_floating_point() and p.numel()}

    def facts(self) -> DerivativeFacts:
        for loss in self._losses:
            loss.grads = loss.differentiate()
        trained, held = self._trained, {id(p) for o in self._session.optimizers for p in owned_by(o)}
        reached = {n for loss in self._losses for n, g in loss.grads.items() if bool(g.abs().max() > 0)}
        whole, deviating = [], []
        for loss in self._losses:
            if direction := self._direction(self._with_gradient(loss), loss.grads):
                whole.append(loss.slopes(direction))
                deviating += self._off(loss, direction, whole[-1])
        unreached = self._unreached({n: p for n, p in trained.items() if n not in reached and id(p) in held})
        ends = _Ends(self._session)
        if deviating or unreached:
            with self._session.live():
                versions = {n: p._version for n, p in trained.items()}
                ends.run(upto="forward")
                written = {n for n, p in trained.items() if p._version != versions[n]}
            deviating = [each for each in deviating if not set(each.names) <= written]
        names = {name for each in unreached for name in each.names}
        return DerivativeFacts(
            dtype=self._dtype,
            tensors=len(trained),
            whole=tuple(whole),
            deviating=tuple(deviating[:MAX_NAMES]),
            unreached=tuple(unreached[:MAX_NAMES]),
            unreached_share=sum(trained[n].numel() for n in names) / max(1, sum(p.numel() for p in trained.values())),
            cuts=tuple(dict.fromkeys(ends.cuts)),
            author=ends.author,
        )

    def _direction(self, tensors: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Direction:
        """A random direction in units of each tensor's own size, along which no slope of a gradient is negative."""
        generator = torch.Generator().manual_seed(self._session.step)
        direction: Direction = {}
        parts: dict[str, float] = {}
        for name, tensor in tensors.items():
            size = float(tensor.detach().double().square().mean().sqrt()) or 0.01
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
            drawn = drawn.to(tensor.device) * size
            if self._padding.get(name) is not None:
                drawn[self._padding[name]] = 0.0  # it gets no gradient on purpose
            part = float((grads[name].double() * drawn).sum()) if name in grads else 0.0
            direction[name], parts[name] = (-drawn, -part) if part < 0 else (drawn, part)
        largest = max(parts.values(), default=0.0)
        return {
            n: d * min(MAX_BOOST, largest / parts[n]) if 0 < parts[n] < largest else d for n, d in direction.items()
        }

    def _with_gradient(self, loss: _Loss) -> dict[str, Tensor]:
        return {n: p for n, p in self._trained.items() if n in loss.grads and bool(loss.grads[n].abs().max() > 0)}

    def _is_off(self, slopes: Slopes) -> bool:
        """Whether the slopes differ by more than the quotient's own error and a kink or two explain."""
        size, apart = max(abs(slopes.of_gradient), abs(slopes.of_loss)), abs(slopes.of_gradient - slopes.of_loss)
        is_known = slopes.error < 0.1 * abs(slopes.of_loss)  # not where the loss is chaotic or made of stairs
        return is_known and apart > OFF[self._dtype] * size and apart > 10 * slopes.error

    def _off(self, loss: _Loss, direction: Direction, whole: Slopes) -> list[Slopes]:
        """The groups of tensors whose slopes differ; tensors that are off by the same factor are one group."""
        if not self._is_off(whole):
            return []
        if self._dtype == "fp64":
            near, _ = loss.slope(direction, NEAR)
            if abs(near - whole.of_gradient) <= OFF["fp64"] * abs(whole.of_gradient):
                return []  # they differ only beyond a kink of the loss
        parts = _halves(direction)
        if len(parts) < 2 or self._tests < len(parts):
            return [whole]
        self._tests -= len(parts)
        measured = [loss.slopes(part) for part in parts]
        if all(map(self._is_off, measured)) and abs(measured[0].factor - measured[1].factor) < 1e-2 * abs(whole.factor):
            return [whole]
        return [found for part, each in zip(parts, measured) for found in self._off(loss, part, each)] or [whole]

    def _unreached(self, without: dict[str, Tensor]) -> list[Slopes]:
        """The tensors without any gradient that a loss has a slope along."""
        found: dict[str, Slopes] = {}
        for loss in self._losses if without else ():
            sizes = [float(g.norm() * self._session.parameters[n].detach().norm()) for n, g in loss.grads.items()]
            least = NO_SLOPE * max(sizes, default=abs(loss.loss))
            for each in self._sloping(loss, self._direction(without, {}), least):
                found.setdefault(each.names[0], each)
        return list(found.values())

    def _sloping(self, loss: _Loss, direction: Direction, least: float) -> list[Slopes]:
        slopes = loss.slopes(direction)
        if not (abs(slopes.of_loss) > max(10 * slopes.error, least) or abs(slopes.coarse) > STAIRS * least):
            return []
        parts = _halves(direction)
        if len(parts) < 2:
            return [slopes]
        if self._tests < len(parts):
            return [replace(slopes, names=(name,)) for name in direction]
        self._tests -= len(parts)
        return [found for part in parts for found in self._sloping(loss, part, least)]


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


def along(grads: Mapping[str, Tensor], direction: Direction) -> float:
    """The slope that these gradients give along ``direction``."""
    return sum(float((grads[n] * d.to(grads[n])).sum()) for n, d in direction.items() if n in grads)


def _halves(direction: Direction) -> list[Direction]:
    """Its first and its second half, in the order of the model."""
    names = list(direction)
    middle = len(names) // 2
    return [{n: direction[n] for n in part} for part in (names[:middle], names[middle:]) if part]


def _is_cut(name: str, inputs: list[Tensor], output: Tensor) -> bool:
    """Whether values that have a graph were made into values without one. A new tensor of the same shape has none."""
    is_new = name.endswith("_like") or name.startswith("new_")
    return bool(inputs) and not is_new and output.is_floating_point() and not output.requires_grad


class _Ends(StepInspector):
    """Collects what ends the graph, and what the user put into the backward pass."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.cuts: list[tuple[str, ...]] = []
        self._author: dict[str, None] = {}

    @property
    def author(self) -> str:
        """In words; "" where there is nothing."""
        hooked = any(p._backward_hooks for p in self.session.parameters.values())
        hooked |= any(m._backward_hooks or m._backward_pre_hooks for m in self.session.modules.values())
        return ", ".join([*self._author, *(["a hook on a gradient"] if hooked else [])])

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if name == "register_hook":
            self._author["a hook on a gradient"] = None
        elif name in STRAIGHT_THROUGH:
            self._author[f"a straight-through estimator ({name})"] = None
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        is_number = bool(inputs) and name in ("item", "tolist", "numpy", "__float__", "__array__")
        if len(self.cuts) < 256 and (is_number or (isinstance(result, Tensor) and _is_cut(name, inputs, result))):
            how = "no_grad" if not torch.is_grad_enabled() else "data" if name == "__get__" else name
            self.cuts.append((how, self.stack[-1] if self.stack else ""))

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if not self.stack and not in_backward:
            for each in custom_functions_of(tensors_of(output)):
                self._author[f"the autograd function {each.__name__}"] = None
