"""Backward passes that people wrote: each custom Function of a step against a difference quotient of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments import experiment
from trainwright.replay.session import ReplaySession
from trainwright.replay.tour import Tour, nodes_of

DIRECTIONS = 4
MANY = 1 << 20  # elements: of larger arguments a test would take long


class _Functions(Tour):
    """The custom Functions in the graph behind the outputs."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.classes: dict[type[Function], None] = {}

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        if self.stack or recomputed:
            return
        for node in nodes_of(tensors_of(output)):
            made_by = getattr(type(node), "_forward_cls", None)
            if made_by is not None and not made_by.__module__.startswith(("torch.", "trainwright.")):
                self.classes[made_by] = None


def custom_functions(bench: ReplaySession) -> list[type[Function]]:
    """Those that the step uses. Called within ``bench.live()``."""
    tour = _Functions(bench)
    tour.go(upto="forward")
    return list(tour.classes)


def has_context(function: type[Function]) -> bool:
    """Whether ``forward`` takes the context first: the older of two styles."""
    return function.setup_context is Function.setup_context


@contextmanager
def replaced(owner: type, name: str, new: Any) -> Iterator[None]:
    """A static method of a class is another one inside."""
    own = vars(owner).get(name)
    setattr(owner, name, staticmethod(new))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@experiment("custom_functions", when="asked")
def check_functions(bench: ReplaySession) -> dict[str, Any]:
    """For each: how far its backward is from the numbers, and the best factor between the two."""
    told: list[dict[str, Any]] = []
    with bench.live():
        calls: dict[type[Function], tuple[str, Any]] = {}
        classes = custom_functions(bench)
        tour = Tour(bench)
        with ExitStack() as undo:
            for each in classes:
                undo.enter_context(replaced(each, "forward", _noting(each, calls, tour)))
            tour.go(upto="forward")
        for each, (path, args) in calls.items():
            told.append({"function": each.__name__, "module": path, **_tested(each, args)})
    return {"functions": told}


def _noting(function: type[Function], calls: dict[type[Function], tuple[str, Any]], tour: Tour) -> Any:
    original = inspect.getattr_static(function, "forward").__func__
    start = 1 if has_context(function) else 0

    def forward(*args: Any) -> Any:
        if function not in calls:
            kept = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args[start:])
            calls[function] = (tour.stack[-1] if tour.stack else "", kept)
        return original(*args)

    return forward


def _tested(function: type[Function], args: Any) -> dict[str, Any]:
    """In fp64, or in fp32 where the forward knows no fp64."""
    if sum(a.numel() for a in args if isinstance(a, Tensor)) > MANY:
        return {"error": None}
    for dtype, widths in ((torch.float64, (1e-5, 1e-6)), (torch.float32, (1e-2, 3e-3))):
        try:
            return _Quotient(function, args, dtype).compare(widths)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
    return {"error": None}


class _Quotient:
    """One Function at one point."""

    def __init__(self, function: type[Function], args: Any, dtype: torch.dtype) -> None:
        self.function = function
        self.generator = torch.Generator().manual_seed(0)
        self.args = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        self.at = [n for n, a in enumerate(self.args) if isinstance(a, Tensor) and a.is_floating_point()]

    def outputs(self, args: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)  # a Function that draws draws the same
        return [t for t in tensors_of(self.function.apply(*args)) if t.is_floating_point()]  # type: ignore[no-untyped-call]

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like)

    def compare(self, widths: tuple[float, float]) -> dict[str, Any]:
        args = [a.clone().requires_grad_() if n in self.at else a for n, a in enumerate(self.args)]
        outputs = self.outputs(args)
        weights = [self.draw(t) for t in outputs]
        pairs = [(t, w) for t, w in zip(outputs, weights) if t.requires_grad]
        sources = [args[n] for n in self.at]
        made, given = [t for t, _ in pairs], [w for _, w in pairs]
        grads: Sequence[Tensor | None] = torch.autograd.grad(made, sources, given, allow_unused=True)
        identity = any(t.shape == s.shape and torch.equal(t, s) for t in outputs for s in sources)
        worst: dict[str, Any] = {"error": 0.0, "factor": 1.0, "unsteady": 0.0}
        constant = False
        for n, grad in zip(self.at, grads):
            if grad is None:
                continue
            told = self._one(n, grad, weights, widths)
            constant |= told.pop("constant")
            worst = max(worst, told, key=lambda each: float(each["error"]))
        return {**worst, "identity": identity, "constant": constant}

    def _one(self, n: int, grad: Tensor, weights: list[Tensor], widths: tuple[float, float]) -> dict[str, Any]:
        x = self.args[n]
        size = float(x.detach().double().pow(2).mean().sqrt()) or 1.0
        said, seen = [], []
        for _ in range(DIRECTIONS):
            way = self.draw(x) * size
            said.append(float((grad.double() * way.double()).sum()))
            seen.append([self._slope(n, way, width, weights) for width in widths])
        expected = torch.tensor(said, dtype=torch.float64)
        wide, narrow = torch.tensor(seen, dtype=torch.float64).T
        scale = max(float(expected.norm()), float(narrow.norm()), 1e-300)
        return {
            "error": float((narrow - expected).norm()) / scale,
            "factor": float((narrow @ expected) / max(float(expected @ expected), 1e-300)),
            "unsteady": float((wide - narrow).norm()) / scale,
            "constant": bool(narrow.norm() <= 1e-6 * expected.norm()) and float(expected.norm()) > 0,
        }

    @torch.no_grad()
    def _slope(self, n: int, way: Tensor, width: float, weights: list[Tensor]) -> float:
        sums = []
        for sign in (1, -1):
            args = list(self.args)
            args[n] = args[n] + sign * width * way
            sums.append(sum(float((t.double() * w.double()).sum()) for t, w in zip(self.outputs(args), weights)))
        return (sums[0] - sums[1]) / (2 * width)
