"""Records the numbers that leave torch between calls without gradients: what an evaluation is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.callers import caller, calling_frame, line_of
from trainwright.recorder.figure_program import FigureProgram
from trainwright.recorder.pausable import PausableMode, without_users_modes
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

LEAVES = frozenset({"item", "__float__", "__int__"})
ARRAYS = frozenset({"tolist", "numpy", "__array__"})
LOSSES = frozenset(
    {
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "gaussian_nll_loss",
        "poisson_nll_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
        "soft_margin_loss",
    }
)
"""Functions with a reduction."""
DECISIONS = frozenset({"argmax", "argmin", "eq", "ne", "gt", "ge", "lt", "le", "round", "sign", "isclose"})
"""What comes of these tells right from wrong; it is no loss."""
MOST = 512
"""Numbers of one evaluation."""
Reduction: TypeAlias = Literal["mean", "sum", "other"]


@dataclass(frozen=True, slots=True)
class MadeOf:
    """How a tensor was made of outputs of a model: the last function, and over how many elements it reduces.

    ``decided``: it is made of decisions, such as which of the classes is the largest. ``at_once``: one of them was
    taken over all rows and all columns at once. ``calls``: which calls of the model, by number, gave the outputs.
    """

    function: str
    reduction: Reduction = "other"
    count: int = 1
    decided: bool = False
    calls: frozenset[int] = frozenset()
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Escape:
    """A number that left torch in the function ``code``; of no output has no ``origin``.

    ``call`` counts the calls of the model before it, ``over`` the passes over data that were begun before it.
    """

    line: str | None
    origin: MadeOf | None
    value: float
    call: int
    over: int = 0
    code: CodeType | None = None


class EscapeTape(PausableMode):
    """While it runs, it follows what is made of the outputs of a model. Holds no tensor, but for ``program``."""

    def __init__(self) -> None:
        super().__init__()
        self.program = FigureProgram()
        self._known: dict[int, tuple[weakref.ref[Tensor], MadeOf]] = {}
        self.forget()

    def forget(self) -> None:
        """Begins a new evaluation."""
        self._known.clear()
        self.program.forget()
        self.escapes: list[Escape] = []
        self.rows: list[int] = []
        self.passes = 0
        self.arrays = 0  # tensors of outputs that left torch as a whole
        self.mass: list[tuple[float, str | None]] = []  # of what nll_loss was given: its sum of probabilities

    def called(self, output: object, rows: int) -> None:
        """A model has returned ``output`` for so many rows."""
        call = frozenset({len(self.rows)})
        self.rows.append(rows)
        self.program.called(output)
        for tensor in tensors_of(output):
            self._remember(tensor, MadeOf("output", calls=call))

    def called_part(self, output: object) -> None:
        """A part of the model was called directly; its outputs count for the rows of the model's call before it."""
        self.program.called(output, is_part=True)
        for tensor in tensors_of(output):
            self._remember(tensor, MadeOf("output", calls=frozenset({len(self.rows) - 1})))

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        is_heard = self.running and not torch.compiler.is_compiling() and len(self.escapes) < MOST
        if not is_heard:
            return function(*args, **(kwargs or {}))
        with without_users_modes():
            before = self.program.before(function, args)
        result = function(*args, **(kwargs or {}))
        with without_users_modes():
            self._note(getattr(function, "__name__", "?"), args, kwargs or {}, result)
            self.program.add(function, args, kwargs or {}, result, before)
        return result

    def _note(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if name in LEAVES:
            origin = self._origin(args[0])
            if isinstance(result, int | float):
                self.program.left(args[0], len(self.escapes))
                frame = calling_frame()
                code = None if frame is None else frame.f_code
                self.escapes.append(Escape(line_of(frame), origin, float(result), len(self.rows), self.passes, code))
        elif name in ARRAYS:
            self.arrays += self._origin(args[0]) is not None
        elif name == "__setitem__":  # counts[c] += ...: what is written into is made of it
            of = self._origins((args[0], args[-1])) if self._origins((args[-1],)) else []
            if of and isinstance(args[0], Tensor):
                calls = frozenset().union(*(each.calls for each in of))
                self._remember(args[0], MadeOf("setitem", decided=all(each.decided for each in of), calls=calls))
        elif isinstance(result, Tensor | tuple) and (of := self._origins((args, kwargs))):
            at_once = any(each.at_once for each in of) or self._is_taken_at_once(name, args, result, of)
            for each in tensors_of(result, 2):
                self._remember(each, replace(_made(name, args, kwargs, each, of), at_once=at_once))
            if name == "nll_loss":
                self._weigh(args, kwargs)

    def _is_taken_at_once(self, name: str, args: Args, result: object, of: Sequence[MadeOf]) -> bool:
        """Whether it is one decision where there are several rows and several columns."""
        if name not in ("argmax", "argmin") or not isinstance(result, Tensor) or result.dim() or len(of) != 1:
            return False
        shape = args[0].shape if args and isinstance(args[0], Tensor) else ()
        rows = sum(self.rows[call] for call in of[0].calls)
        return len(shape) > 1 and shape[0] == rows > 1 and shape.numel() > rows

    def _weigh(self, args: Args, kwargs: Kwargs) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point() and x.numel():
            with torch._C.DisableTorchFunction():
                mass = x.detach().double().exp().sum(1)
                self.mass.append((float((mass - 1).abs().median()), caller()))

    def _remember(self, tensor: Tensor, origin: MadeOf) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), origin)

    def _origin(self, value: object) -> MadeOf | None:
        reference, origin = self._known.get(id(value), (None, None))
        return origin if reference is not None and reference() is value else None

    def _origins(self, value: object, depth: int = 3) -> list[MadeOf]:
        if isinstance(value, Tensor):
            origin = self._origin(value)
            return [] if origin is None else [origin]
        if isinstance(value, dict):
            value = tuple(value.values())
        if depth and isinstance(value, tuple | list):
            return [each for item in value for each in self._origins(item, depth - 1)]
        return []


def _made(name: str, args: Args, kwargs: Kwargs, result: Tensor, of: list[MadeOf]) -> MadeOf:
    plain, calls = name.strip("_"), frozenset().union(*(each.calls for each in of))
    decided = plain in DECISIONS or all(each.decided for each in of)
    elements = args[0].numel() if args and isinstance(args[0], Tensor) else 1
    over = max(1, elements // max(1, result.numel()))
    first = of[0]
    if plain in LOSSES:
        reduction, count = _of_loss(args, kwargs)
        return MadeOf(plain, reduction, count, decided, calls)
    if plain == "mean" and (result.numel() < elements or elements == 1):
        return MadeOf(plain, "mean", over, decided, calls)
    if plain in ("sum", "count_nonzero") and result.numel() < elements:
        if first.reduction == "mean":
            return MadeOf(plain, "other", 1, decided, calls)
        return MadeOf(plain, "sum", over * first.count, decided, calls)
    if len(of) == 1 and elements == result.numel() and plain in _SAME:
        return first
    if result.numel() == 1 and plain in _SUMS and all(each.reduction == "sum" for each in of):
        return MadeOf(first.function, "sum", sum(each.count for each in of), decided, calls)
    if result.numel() == 1 and plain in _SUMS and {(each.reduction, each.calls) for each in of} == {("mean", calls)}:
        return MadeOf(plain, "mean", first.count, decided, calls)
    if result.numel() == 1 and len(args) == 2 and (plain in _TIMES or plain in _OVER):
        return replace(_scaled(plain, args, first), decided=decided, calls=calls)
    return MadeOf(plain, decided=decided, calls=calls)


_SAME = frozenset({"float", "double", "half", "to", "cpu", "cuda", "detach", "clone", "squeeze", "view", "reshape"})
_SUMS, _TIMES, _OVER = (
    frozenset({"add", "iadd", "radd"}),
    frozenset({"mul", "rmul", "imul"}),
    frozenset({"div", "truediv"}),
)


def _scaled(name: str, args: Args, of: MadeOf) -> MadeOf:
    """A sum over what it is of is a mean, and so is one over a sum that is computed beside it; a mean times that is a
    sum.
    """
    by = args[1]
    if name in _TIMES:
        is_sum = of.reduction == "mean" and not isinstance(by, Tensor) and by == of.count
        return MadeOf(of.function, "sum", of.count) if is_sum else MadeOf(name)
    is_mean = of.reduction == "sum" and (isinstance(by, Tensor) or by == of.count)
    return MadeOf(of.function, "mean", 1 if isinstance(by, Tensor) else of.count) if is_mean else MadeOf(name)


def _of_loss(args: Args, kwargs: Kwargs) -> tuple[Reduction, int]:
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    count = target.numel() if isinstance(target, Tensor) else 1
    reduction = kwargs.get("reduction", "mean")
    return reduction if reduction in ("mean", "sum") else "other", max(1, count)
