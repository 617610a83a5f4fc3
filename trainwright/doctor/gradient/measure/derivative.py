"""Compares the gradients of a step with difference quotients of its losses, and finds the tensors that deviate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.doctor.gradient.facts import DerivativeFacts, Slopes
from trainwright.doctor.gradient.measure.estimators import StraightThrough
from trainwright.doctor.gradient.measure.slopes import (
    Direction,
    Dtype,
    LossAlongWeights,
    along,
    direction_of,
    halves,
    losses_of,
    padding_rows,
)
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.inspector import StepInspector, custom_functions_of
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MOST_ELEMENTS = 1 << 26
"""Trained elements of a model that is run in float64."""
MOST_KINDS = 3
"""Kinds of backward pass of one step that are looked at."""
MOST_TESTS = 24
"""Directions that are tried to find the tensors that deviate."""
OFF = {"fp64": 1e-3, "fp32": 3e-2}
"""By this share slopes must differ: a quarter of the units of a layer of 256 may have a kink within the step."""
NEAR = 1e-7
"""A step in float64 that hardly ever crosses a kink; rounding leaves its quotient seven digits."""
NO_SLOPE = 1e-6
"""Of the slope that the weights with a gradient may have at most."""
STAIRS = 1e3
"""Times that, where the loss has a slope by long steps alone: it is made of stairs, as by a cast to integers."""
MOST_NAMES = 16


@experiment(DerivativeFacts.experiment, when="requested", memory=6.0, by_samples=True, steps=16.0)
def derivative(session: ReplaySession) -> Facts:
    """Raises NotReplayable where the model is too large, or has no loss that is a number."""
    if sum(p.numel() for p in session.parameters.values()) > MOST_ELEMENTS:
        raise NotReplayable("the model is too large to be run in float64")
    try:
        facts = _Comparison(session, "fp64").facts()
    except (RuntimeError, TypeError, NotImplementedError):  # a part of the model insists on its dtype
        facts = _Comparison(session, "fp32").facts()
    values: Facts = strict(vars(facts))
    return values


class _Comparison:
    """The comparison for all kinds of backward pass of a step."""

    def __init__(self, session: ReplaySession, dtype: Dtype) -> None:
        self._session, self._dtype = session, dtype
        self._losses = losses_of(session, dtype, MOST_KINDS)
        if not self._losses:
            raise NotReplayable("no loss is made of what the watched model returned")
        self._tests = MOST_TESTS
        self._still = padding_rows(session)

    def facts(self) -> DerivativeFacts:
        for loss in self._losses:
            loss.grads = loss.differentiate()
        trained = self._trained()
        reached = {n for loss in self._losses for n, g in loss.grads.items() if bool(g.abs().max() > 0)}
        whole, deviating = [], []
        for loss in self._losses:
            direction = direction_of(self._with_gradient(loss), loss.grads, self._session.step, self._still)
            if direction:
                whole.append(loss.slopes(direction, coarse=True))
                deviating += self._off(loss, direction, whole[-1])
        unreached = self._unreached({n: p for n, p in trained.items() if n not in reached and n in self._owned()})
        names = {name for each in unreached for name in each.names}
        cuts = _Cuts(self._session)
        hooks = 0
        functions: tuple[str, ...] = ()
        left = None
        if deviating or unreached:
            with self._session.live():
                versions = {n: p._version for n, p in trained.items()}
                cuts.run(upto="forward")
                written = {n for n, p in trained.items() if p._version != versions[n]}
            deviating = [each for each in deviating if not set(each.names) <= written]
            functions = tuple(sorted({each.__name__ for each in cuts.functions}))
            hooks = cuts.hooks + _hooks_on(self._session)
            left = self._left_without_cuts(deviating) if deviating and cuts.found else None
        is_explained = bool(functions or hooks or cuts.found)
        return DerivativeFacts(
            dtype=self._dtype,
            backwards=len(self._losses),
            tensors=len(trained),
            whole=tuple(whole),
            deviating=tuple(deviating[:MOST_NAMES]),
            unreached=tuple(unreached[:MOST_NAMES]),
            unreached_share=sum(trained[n].numel() for n in names) / max(1, sum(p.numel() for p in trained.values())),
            cuts=tuple(dict.fromkeys(cuts.found)),
            left_without_cuts=left,
            hooks=hooks,
            functions=functions,
            estimators=self._straight_through() if deviating and not is_explained else (),
        )

    def _straight_through(self) -> tuple[str, ...]:
        """The functions of torch that pass a gradient where they have no slope."""
        through = StraightThrough()
        for loss in self._losses:
            try:
                loss.differentiate(through)
            except (RuntimeError, TypeError, NotImplementedError):  # something in the model takes no such call
                continue
        return tuple(through.found)

    def _trained(self) -> dict[str, Tensor]:
        named = zip(self._session.replayer.names, self._session.replayer.subject.parameters)
        return {name: p for name, p in named if p.requires_grad and p.is_floating_point() and p.numel()}

    def _with_gradient(self, loss: LossAlongWeights) -> dict[str, Tensor]:
        return {n: p for n, p in self._trained().items() if n in loss.grads and bool(loss.grads[n].abs().max() > 0)}

    def _owned(self) -> set[str]:
        ids = {id(p) for optimizer in self._session.optimizers for p in owned_by(optimizer)}
        return {name for name, p in self._session.parameters.items() if id(p) in ids}

    def _is_off(self, slopes: Slopes) -> bool:
        """Whether the slopes differ by more than the quotient's own error and a kink or two explain."""
        size = max(abs(slopes.of_gradient), abs(slopes.of_loss))
        apart = abs(slopes.of_gradient - slopes.of_loss)
        is_known = slopes.error < 0.1 * abs(slopes.of_loss)  # not where the loss is chaotic, or is made of stairs
        return is_known and apart > OFF[self._dtype] * size and apart > 10 * slopes.error

    def _is_kink(self, loss: LossAlongWeights, direction: Direction, slopes: Slopes) -> bool:
        """Whether the slopes differ only beyond a kink of the loss: a far shorter step has that of the gradient."""
        if self._dtype != "fp64":
            return False
        near, _ = loss.slope(direction, NEAR)
        return abs(near - slopes.of_gradient) <= OFF["fp64"] * abs(slopes.of_gradient)

    def _off(self, loss: LossAlongWeights, direction: Direction, whole: Slopes) -> list[Slopes]:
        """The groups of tensors whose slopes differ; tensors that are off by the same factor are one group."""
        if not self._is_off(whole) or self._is_kink(loss, direction, whole):
            return []
        parts = halves(direction)
        if len(parts) < 2 or self._tests < len(parts):
            return [whole]
        self._tests -= len(parts)
        measured = [loss.slopes(part, coarse=True) for part in parts]
        off = [self._is_off(each) for each in measured]
        if all(off) and abs(measured[0].factor - measured[1].factor) < 1e-2 * abs(whole.factor):
            return [whole]
        return [found for part, each in zip(parts, measured) for found in self._off(loss, part, each)] or [whole]

    def _unreached(self, without: dict[str, Tensor]) -> list[Slopes]:
        """The tensors without any gradient that a loss has a slope along."""
        found: dict[str, Slopes] = {}
        for loss in self._losses if without else ():
            sizes = [float(g.norm() * self._session.parameters[n].detach().norm()) for n, g in loss.grads.items()]
            least = NO_SLOPE * max(sizes, default=abs(loss.loss))
            for each in self._sloping(loss, direction_of(without, {}, self._session.step, self._still), least):
                found.setdefault(each.names[0], each)
        return list(found.values())

    def _sloping(self, loss: LossAlongWeights, direction: Direction, least: float) -> list[Slopes]:
        slopes = loss.slopes(direction, coarse=True)
        if not (abs(slopes.of_loss) > max(10 * slopes.error, least) or abs(slopes.coarse) > STAIRS * least):
            return []
        parts = halves(direction)
        if len(parts) < 2:
            return [slopes]
        if self._tests < len(parts):
            return [Slopes((name,), 0.0, slopes.of_loss, slopes.error, slopes.coarse) for name in direction]
        self._tests -= len(parts)
        return [found for part in parts for found in self._sloping(loss, part, least)]

    def _left_without_cuts(self, deviating: list[Slopes]) -> float | None:
        """How much of the deviation is left when nothing ends the graph."""
        before = sum(abs(each.of_gradient - each.of_loss) for each in deviating)
        after = 0.0
        for loss in self._losses:
            try:
                grads = loss.differentiate(_kept)
            except (RuntimeError, TypeError, NotImplementedError):
                return None
            direction = direction_of(self._with_gradient(loss), loss.grads, self._session.step, self._still)
            for each in deviating:
                if set(each.names) <= set(direction):
                    after += abs(along(grads, {n: direction[n] for n in each.names}) - each.of_loss)
        return after / before if before else None


def _kept(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Calls a torch function so that it does not end the graph."""
    with torch.enable_grad():
        output = function(*args, **kwargs)
    inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
    if not isinstance(output, Tensor) or not _is_cut(function_name(function), inputs, output):
        return output
    return inputs[0] if output.shape == inputs[0].shape else output


def _is_cut(name: str, inputs: list[Tensor], output: Tensor) -> bool:
    """Whether values that have a graph were made into values without one. A new tensor of the same shape has none."""
    is_new = name.endswith("_like") or name.startswith("new_")
    return bool(inputs) and not is_new and output.is_floating_point() and not output.requires_grad


class _Cuts(StepInspector):
    """Collects what ends the graph on purpose, and what else of the user's is in the backward pass."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.found: list[tuple[str, ...]] = []
        self.functions: set[type[torch.autograd.Function]] = set()
        self.hooks = 0

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        self.hooks += name == "register_hook"
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        is_number = bool(inputs) and name in ("item", "tolist", "numpy", "__float__", "__array__")
        if len(self.found) < 256 and (is_number or (isinstance(result, Tensor) and _is_cut(name, inputs, result))):
            how = "no_grad" if not torch.is_grad_enabled() else "data" if name == "__get__" else name
            self.found.append((how, self.stack[-1] if self.stack else ""))

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if not self.stack and not in_backward:
            self.functions.update(custom_functions_of(tensors_of(output)))


def _hooks_on(session: ReplaySession) -> int:
    """Hooks of the user's on parameters and in the backward pass of modules."""
    on_parameters = sum(len(p._backward_hooks or ()) for p in session.parameters.values())
    return on_parameters + sum(len(m._backward_hooks) + len(m._backward_pre_hooks) for m in session.modules.values())
