"""Checks the backward pass of each custom autograd Function of a step by finite differences of its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function

from trainwright.doctor.facts.gradient import CustomFunctionsFacts, FunctionTest
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector, custom_functions_of
from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts

NUM_DIRECTIONS = 4
_Calls: TypeAlias = dict[type[Function], tuple[str, Args]]
"""The first call of each Function: the calling module, and copies of the arguments."""
MAX_ELEMENTS = 1 << 20  # Functions with more argument elements are not tested, because that would take too long


class _Functions(StepInspector):
    """Collects the custom Functions in the graph behind the outputs."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.classes: dict[type[Function], None] = {}

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if self.stack or in_backward:
            return
        self.classes.update(dict.fromkeys(custom_functions_of(tensors_of(output))))


def custom_functions(session: ReplaySession) -> list[type[Function]]:
    """Returns the custom Functions of the step. Must be called within ``session.live()``."""
    inspector = _Functions(session)
    inspector.run(upto="forward")
    return list(inspector.classes)


def has_context(function: type[Function]) -> bool:
    """Returns True if ``forward`` takes the context as its first argument, the older of the two styles."""
    return function.setup_context is Function.setup_context


@contextmanager
def replaced(owner: type, name: str, new: Callable[..., object]) -> Iterator[None]:
    """Context in which the static method ``name`` of the class ``owner`` is ``new``."""
    own = vars(owner).get(name)
    setattr(owner, name, staticmethod(new))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@replay(CustomFunctionsFacts, when="requested")
def check_functions(session: ReplaySession) -> CustomFunctionsFacts:
    """Returns, for each custom Function, the relative error of its backward pass and the best-fitting factor."""
    functions: list[FunctionTest] = []
    with session.live():
        calls: _Calls = {}
        classes = custom_functions(session)
        inspector = StepInspector(session)
        with ExitStack() as undo:
            for each in classes:
                undo.enter_context(replaced(each, "forward", _recording(each, calls, inspector)))
            inspector.run(upto="forward")
        for each, (path, args) in calls.items():
            functions.append(FunctionTest(each.__name__, path, **_comparison(each, args)))
    return CustomFunctionsFacts(tuple(functions))


def _recording(function: type[Function], calls: _Calls, inspector: StepInspector) -> Callable[..., object]:
    """Returns a ``forward`` that records its first call."""
    original = inspect.getattr_static(function, "forward").__func__
    start = 1 if has_context(function) else 0

    def forward(*args: object) -> object:
        if function not in calls:
            copies = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args[start:])
            calls[function] = (inspector.stack[-1] if inspector.stack else "", copies)
        return original(*args)

    return forward


def _comparison(function: type[Function], args: Args) -> Facts:
    """Returns the comparison in float64, or in float32 if the forward pass does not support float64."""
    if sum(a.numel() for a in args if isinstance(a, Tensor)) > MAX_ELEMENTS:
        return {"error": None}
    for dtype, widths in ((torch.float64, (1e-5, 1e-6)), (torch.float32, (1e-2, 3e-3))):
        try:
            return _FiniteDifferences(function, args, dtype).compare(widths)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
    return {"error": None}


class _FiniteDifferences:
    """Finite differences of one Function at one point."""

    def __init__(self, function: type[Function], args: Args, dtype: torch.dtype) -> None:
        self.function = function
        self.generator = torch.Generator().manual_seed(0)
        self.seed = 0
        self.args = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        self.at = [n for n, a in enumerate(self.args) if isinstance(a, Tensor) and a.is_floating_point()]

    def outputs(self, args: Sequence[object]) -> list[Tensor]:
        torch.manual_seed(self.seed)  # makes a Function that draws random numbers draw the same ones
        return [t for t in tensors_of(self.function.apply(*args)) if t.is_floating_point()]  # type: ignore[no-untyped-call]

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(like)

    def compare(self, widths: tuple[float, float]) -> Facts:
        with torch.no_grad():
            weights = [self.draw(t) for t in self.outputs(self.args)]
        if self._draws_in_backward(weights):
            return {"error": None}
        outputs, grads = self._passes(self.args, weights)
        sources = [self.args[n] for n in self.at]
        identity = any(t.shape == s.shape and torch.equal(t, s) for t in outputs for s in sources)
        worst: Facts = {"error": 0.0, "factor": 1.0, "unsteady": 0.0}
        constant = False
        for n, grad in grads.items():
            facts = self._compare_argument(n, grad, weights, widths)
            constant |= facts.pop("constant")
            worst = max(worst, facts, key=lambda each: float(each["error"]))
        worst["moving"] = max(
            (self._error_where_it_moves(n, each, weights, widths[1]) for n, each in grads.items()), default=0.0
        )
        own_way = self._reads_unused_argument(weights)
        straight = bool(grads) and all(any(torch.equal(grad, w) for w in weights) for grad in grads.values())
        return {**worst, "identity": identity, "constant": constant, "own_way": own_way, "straight": straight}

    def _draws_in_backward(self, weights: list[Tensor]) -> bool:
        """Returns True if the gradients depend on the random state of the backward pass, for equal outputs."""
        (_, one), (_, other) = (self._passes(self.args, weights, drawing) for drawing in (1, 2))
        return any(not torch.equal(grad, other[n]) for n, grad in one.items())

    def _reads_unused_argument(self, weights: list[Tensor]) -> bool:
        """Returns True if the backward pass reads an argument that the outputs do not depend on, such as feedback
        weights.
        """
        outputs, grads = self._passes(self.args, weights)
        for n in self.at:
            moved = list(self.args)
            moved[n] = self.args[n] + self.draw(self.args[n])
            same, others = self._passes(moved, weights)
            changes = any(not torch.equal(grad, others[at]) for at, grad in grads.items())
            if changes and all(map(torch.equal, outputs, same)):
                return True
        return False

    def _passes(
        self, args: Sequence[object], weights: list[Tensor], drawing: int | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Returns the outputs, and the gradient of each argument that gets one, by argument number.

        The backward pass begins with the random state of ``drawing``, or else with the one that the forward pass
        leaves.
        """
        leaves = {n: a.detach().clone().requires_grad_() for n in self.at if isinstance(a := args[n], Tensor)}
        outputs = self.outputs([leaves.get(n, a) for n, a in enumerate(args)])
        pairs = [(t, w) for t, w in zip(outputs, weights) if t.requires_grad]
        if drawing is not None:
            torch.manual_seed(drawing)
        grads = torch.autograd.grad(
            [t for t, _ in pairs], list(leaves.values()), [w for _, w in pairs], allow_unused=True
        )
        return outputs, {n: grad for n, grad in zip(leaves, grads) if grad is not None}

    def _compare_argument(self, n: int, grad: Tensor, weights: list[Tensor], widths: tuple[float, float]) -> Facts:
        x = self.args[n]
        size = float(x.detach().double().pow(2).mean().sqrt()) or 1.0
        analytic, numeric = [], []
        for _ in range(NUM_DIRECTIONS):
            direction = self.draw(x) * size
            analytic.append(float((grad.double() * direction.double()).sum()))
            numeric.append([self._slope(n, direction, width, weights) for width in widths])
        expected = torch.tensor(analytic, dtype=torch.float64, device="cpu")
        wide, narrow = torch.tensor(numeric, dtype=torch.float64, device="cpu").T
        scale = max(float(expected.norm()), float(narrow.norm()), 1e-300)
        return {
            "error": float((narrow - expected).norm()) / scale,
            "factor": float((narrow @ expected) / max(float(expected @ expected), 1e-300)),
            "unsteady": float((wide - narrow).norm()) / scale,
            "constant": bool(narrow.norm() <= 1e-6 * expected.norm()) and float(expected.norm()) > 0,
        }

    def _error_where_it_moves(self, n: int, grad: Tensor, weights: list[Tensor], width: float) -> float:
        """Returns the error along those elements of an argument that move the output at their position; 1 if there are
        none.

        Gradients at other elements are surrogates, such as a straight-through gradient behind a clamp.
        """
        x, args = self.args[n], list(self.args)
        size = float(x.detach().double().pow(2).mean().sqrt()) or 1.0
        args[n] = x + width * size * self.draw(x)
        with torch.no_grad():
            pairs = list(zip(self.outputs(self.args), self.outputs(args)))
        moved = [before != after for before, after in pairs if before.shape == x.shape]
        if not moved or not bool(moved[0].any()):
            return 1.0
        direction = self.draw(x) * size * moved[0]
        predicted, seen = float((grad.double() * direction.double()).sum()), self._slope(n, direction, width, weights)
        return abs(predicted - seen) / max(abs(predicted), abs(seen), 1e-300)

    @torch.no_grad()
    def _slope(self, n: int, direction: Tensor, width: float, weights: list[Tensor]) -> float:
        """Returns the central difference of the weighted outputs along ``direction``."""
        sums = []
        for sign in (1, -1):
            args = list(self.args)
            args[n] = args[n] + sign * width * direction
            sums.append(sum(float((t.double() * w.double()).sum()) for t, w in zip(self.outputs(args), weights)))
        return (sums[0] - sums[1]) / (2 * width)
