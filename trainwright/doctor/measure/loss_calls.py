"""Measures the arguments of loss functions: live in some of the steps, and in replays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.optim import Optimizer

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.checkpoint.transforms import innermost_transform
from trainwright.doctor.facts.loss import Broadcast, LossFacts, LossSign, MeasuredLoss
from trainwright.doctor.measure.tensors import leaves_among, nodes_behind
from trainwright.recorder.callers import caller
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.pausable import without_modes
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.tape import Tape
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import CHUNKED, classified
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector, custom_functions_of
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import terms_of
from trainwright.runs.json_values import Facts, strict

CLASSES = frozenset({"cross_entropy", "nll_loss", CHUNKED})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
SQUARED = "squared error"
MAX_ROWS = 256
MAX_COLUMNS = 1024  # Maximum number of values per sample that are measured
MAX_CLASSES = 65536
BOUNDS = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("relu", 0.0, math.inf),
    "SoftplusBackward0": ("softplus", 0.0, math.inf),
}
"""Functions with bounded values, by the name of their autograd node."""
_MOVES = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Permute", "Slice", "Select", "Transpose", "TBackward", "ToCopy",
    "Clone", "Alias", "UnsafeView", "Index", "Expand",
)  # fmt: skip


def made_by(x: Tensor, names: tuple[str, ...]) -> Node | None:
    """Returns the autograd node that computed ``x``, behind views and copies, if it has one of these names."""
    node = x.grad_fn
    for _ in range(8):
        if node is None or type(node).__name__ in names:
            return node
        if not type(node).__name__.startswith(_MOVES) or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None


def is_simplex(x: Tensor, dim: int) -> bool:
    """Returns True if all rows along ``dim`` are probabilities: none is negative, and they sum to 1."""
    if not x.is_floating_point() or not x.dim() or x.shape[dim] < 2 or x.numel() == 0:
        return False
    wide = x.detach().float()
    near = 1e-4 if x.dtype == torch.float32 else 2e-2
    return bool((wide >= 0).all() & ((wide.sum(dim) - 1).abs() < near).all())


def class_dim(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> int:
    """Returns the class dimension of the first argument of a loss or a softmax."""
    if name in ("cross_entropy", "nll_loss"):
        return min(1, x.dim() - 1)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if name != "kl_div" and isinstance(dim, int) else -1


@dataclass(frozen=True)
class ComparedLoss:
    """Some rows of one call: predictions ``x`` and ``target``, both without a graph.

    Shapes: (N, C) and (N,) for classes, with -1 for ignored targets; otherwise equal shapes.
    """

    name: str
    function: TorchFunction
    x: Tensor
    target: Tensor
    rest: Kwargs

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns the mean loss."""
        if self.name == SQUARED:
            return (x.double() - target.double()).square().mean()
        if self.name in CLASSES:
            function = F.nll_loss if self.name == "nll_loss" else F.cross_entropy
            return function(x, target, ignore_index=-1, **self.rest).double()
        values: Tensor = self.function(x, target, **self.rest)
        return values.double().mean()

    def of_blank(self) -> Tensor:
        """Returns the loss of outputs of 0, or of equal probabilities or log-probabilities."""
        if self.name == "nll_loss":
            return self.value(torch.full_like(self.x, -math.log(self.x.shape[1])), self.target)
        return self.value(torch.full_like(self.x, 0.5 if self.name == "binary_cross_entropy" else 0.0), self.target)

    def sums(self) -> tuple[Tensor, float | Tensor]:
        """Returns the sum of the targets (for classes, their counts) and the number of targets."""
        if self.name in CLASSES:
            kept = (self.target >= 0).double()
            counts = torch.zeros(self.x.shape[1], dtype=torch.float64, device=self.x.device)
            return counts.index_add_(0, self.target.clamp(min=0), kept), kept.sum()
        if self.target.dim() == 2:
            return self.target.double().sum(0, keepdim=True), len(self.target)
        return self.target.double().sum(), self.target.numel()

    def of_constant(self, mean: Tensor) -> Tensor:
        """Returns the loss of one constant prediction: the mean of the targets, or the class frequencies."""
        if self.name in CLASSES:
            return self.value(mean.clamp(min=1e-9).log().to(self.x).expand_as(self.x), self.target)
        if self.name in BINARY:
            mean = mean.clamp(1e-6, 1 - 1e-6)
            mean = mean.logit() if self.name.endswith("logits") else mean
        return self.value(mean.to(self.x).expand_as(self.x).clone(), self.target)

    def of_shuffled(self) -> Tensor:
        """Returns the loss with the targets of other samples, the mean of two shifts."""
        shifts = (len(self.target) // 3 + 1, len(self.target) // 2 + 1)
        return (
            self.value(self.x, self.target.roll(shifts[0], 0)) + self.value(self.x, self.target.roll(shifts[1], 0))
        ) / 2

    def varies(self) -> Tensor:
        """Returns a 0-d bool: True if the targets are not all equal."""
        first = self.target.flatten()[:1]
        kept = self.target >= 0 if self.name in CLASSES else torch.ones_like(self.target, dtype=torch.bool)
        reference = self.target.max() if self.name in CLASSES else first
        return ((self.target != reference) & kept).any()


def compared_loss(name: str, function: TorchFunction, args: Args, kwargs: Kwargs) -> ComparedLoss | None:
    """Returns some rows of a call that compares predictions with targets; None for any other call."""
    if name in CLASSES:
        return _of_classes(name, function, args, kwargs)
    if name not in BINARY | DISTANCES | {SQUARED}:
        return None
    given = dict(zip(("input", "target", "weight"), args)) | kwargs
    x, target = given.pop("input", None), given.pop("target", None)
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or len(args) > 3:
        return None
    if x.shape != target.shape or not x.dim() or len(x) < 2 or not target.is_floating_point():
        return None
    given = {key: each for key, each in given.items() if key in ("beta", "delta")}
    return ComparedLoss(name, function, _part(x), _part(target), given)


def _of_classes(name: str, function: TorchFunction, args: Args, kwargs: Kwargs) -> ComparedLoss | None:
    call = classified(name, args, kwargs)
    if call is None or len(call.target) < 2 or not 2 <= call.classes <= MAX_CLASSES:
        return None
    every = torch.arange(0, len(call.target), max(1, -(-len(call.target) // MAX_ROWS)), device=call.target.device)
    rest = {key: kwargs[key] for key in ("weight", "label_smoothing") if kwargs.get(key) is not None}
    return ComparedLoss(name, function, call.scores(every).float(), call.target[every], rest)


def _part(x: Tensor) -> Tensor:
    """Returns evenly spread samples, and the first values of each."""
    rows = x.detach()[:: max(1, -(-len(x) // MAX_ROWS))]
    return rows if rows[0].numel() <= MAX_COLUMNS else rows.flatten(1)[:, :MAX_COLUMNS]


def room_within(loss: ComparedLoss, low: float, high: float) -> float:
    """Returns the improvement over equal scores that is possible within these bounds, as a fraction of their loss."""
    if loss.name in BINARY:
        best = loss.value((low + (min(high, 30.0) - low) * loss.target).to(loss.x), loss.target)
    else:
        best = torch.tensor(math.log1p((loss.x.shape[1] - 1) * math.exp(low - min(high, low + 30.0))))
    equal = loss.of_blank() if loss.name in BINARY else torch.tensor(math.log(loss.x.shape[1]))
    return 1.0 - float(best) / max(float(equal), 1e-12)


EVERY_STEP_UNTIL = 8  # All steps until this one are examined
INTERVALS = ((64, 4), (256, 16))  # (last step, interval) of the examined steps after EVERY_STEP_UNTIL
LAST_INTERVAL = 64  # Interval of examined steps after all of INTERVALS
MAX_VALUES = 8  # Number of values that are kept of the first and of the last examined steps
MIN_STEPS_WITH_SIGN = 3  # Number of examined steps that must show a mistake that one step may show by chance
MAX_CALLS = 32  # Maximum number of measured calls per step
MAX_LOG_PROBABILITY = 1e-3  # Upper bound of the logarithm of a probability plus a small epsilon
BOUNDED_BELOW = CLASSES | BINARY | DISTANCES | {
    "kl_div", "ctc_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", SQUARED, "absolute error",
}  # fmt: skip
"""Losses that have a lower bound and should be minimized."""
SOFTMAXES = frozenset({"softmax", "log_softmax"})
PAIRED = frozenset({"sub", "rsub", "mul", "add", *DISTANCES})
DIFFERENCES = frozenset({"sub", "rsub"})
SIZES = {"square": SQUARED, "pow": SQUARED, "abs": "absolute error"}
ADDS_DIMENSION = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "expand"})
RANDOM_FUNCTIONS = frozenset({"multinomial", "bernoulli", "poisson", "normal", "sample"})
SUM_FUNCTIONS = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub"})
WEIGHTING_FUNCTIONS = frozenset({"mul", "rmul", "div", "neg", "mean", "sum", "squeeze", "float", "to"})
"""Functions of one value that keep the name of a term."""
Row: TypeAlias = dict[str, Tensor]
_MAKER_KEY = "trainwright_made"
"""Key in the metadata of the node that made a scalar. The value is the called function and its line."""


@dataclass
class _Site:
    """One call site of a loss function, with its measurements in each examined step."""

    fixed: dict[str, Any]
    rows: list[dict[str, float]] = field(default_factory=list)
    pending: list[Row] = field(default_factory=list)
    steps: int = 0
    early: list[dict[str, float]] = field(default_factory=list)
    sums: tuple[Tensor, float | Tensor] | None = None
    wants: list[Tensor] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)


class LossCalls:
    """Collects the arguments of loss functions, and the gradient of the total loss at their results.

    Args:
        stack: Paths of the running modules, outermost first. Empty in the loop.
        slot_of: Returns the slot of a tensor in the recorded program; None if no model made it.
        is_live: The calls are those of the loop, so the user's line can be read from the stack.
    """

    def __init__(
        self, stack: Sequence[str] = (), slot_of: Callable[[Tensor], int | None] | None = None, *, is_live: bool = False
    ) -> None:
        self.stack, self._slot_of, self._is_live = stack, slot_of, is_live
        self._sites: dict[Hashable, _Site] = {}
        self._signs: dict[tuple[str, str, str | None], int] = {}
        self._outer: dict[tuple[str, str | None], Broadcast] = {}
        # for each term: its maker, and the leaves that it reaches
        self._reach: list[tuple[tuple[str, str | None], set[int]]] = []
        self._stepped: set[int] = set()
        self._useful: set[tuple[str, str | None]] = set()
        self.drawn = False
        self.steps = 0
        self._signs_now: set[tuple[str, str, str | None]] = set()
        self._numbers: dict[Hashable, int] = {}
        self.forget()

    def forget(self) -> None:
        """Drops all tensors."""
        self._raised: TensorNotes[None] = TensorNotes()
        self._residuals: TensorNotes[tuple[Tensor, Tensor]] = TensorNotes()
        self._probabilities: TensorNotes[str | None] = TensorNotes()
        self._count = itertools.count()
        self._source: TensorNotes[int] = TensorNotes()  # for results of softmax, exp, ...: the number of the input
        self._without_graph: TensorNotes[str | None] = TensorNotes()  # scalars: their maker; None: detached
        # for tensors without a graph: the tensors that they are computed from
        self._origins: TensorNotes[frozenset[int]] = TensorNotes()
        self._weighing: set[int] = set()  # such tensors that are combined with a tensor that has a graph
        self._idle: list[tuple[tuple[str, str, str | None], frozenset[int]]] = []  # terms without a graph

    def end_backward(self) -> None:
        """Drops the tensors and graphs behind a loss after its backward pass."""
        self._signs_now |= {sign for sign, origins in self._idle if not origins & self._weighing}
        self.forget()

    def end_step(self) -> None:
        """Counts the mistakes of the step and drops its tensors."""
        self.end_backward()
        for each in self._signs_now:
            self._signs[each] = self._signs.get(each, 0) + 1
        self.steps += 1
        self._signs_now, self._numbers = set(), {}

    # calls

    def returned(self, path: str, module: nn.Module, output: object) -> None:
        """Records the output of a module."""
        if isinstance(output, Tensor) and isinstance(module, nn.Softmax | nn.Sigmoid):
            self._probabilities[output] = path

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object, function: Any = None) -> None:
        """Records a call of a torch function."""
        self.drawn |= name in RANDOM_FUNCTIONS
        if not isinstance(result, Tensor) or not args:
            return
        plain = name.strip("_")
        if plain in PAIRED:
            self._record_outer(plain, args, kwargs, result)
        if name in ("softmax", "sigmoid"):
            self._probabilities[result] = self.stack[-1] if self.stack else None
        if not self.stack:
            self._record_operation(name, plain, args, kwargs, result)
        if name in BOUNDED_BELOW or name in SOFTMAXES:
            self._record_loss(name, args, kwargs, result, function)

    def _line(self) -> str | None:
        return caller() if self._is_live else None

    def _sign(self, kind: str, op: str) -> None:
        self._signs_now.add((kind, op, self._line()))

    def _site(self, op: str, **fixed: Any) -> _Site | None:
        """Returns the call site, which is the same object in each step."""
        line = self._line()
        key = (op, line, fixed.get("module"))
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        if (key, number) not in self._sites and len(self._sites) >= MAX_CALLS:
            return None
        site = self._sites.setdefault((key, number), _Site({"op": op, "line": line}))
        site.fixed |= fixed
        site.steps += 1
        return site

    # operations of the loop

    def _record_operation(self, name: str, plain: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        first = args[0]
        if name in ADDS_DIMENSION:
            self._raised[result] = None
        if name in ("softmax", "log_softmax", "exp", "clamp") and isinstance(first, Tensor):
            self._source[result] = self._source_of(first)
        tensors = [each for each in args if isinstance(each, Tensor)]
        if plain in DIFFERENCES and sum(each.requires_grad for each in tensors) == 1 and len(tensors) == 2:
            x, target = sorted(tensors, key=lambda each: not each.requires_grad)
            if x.shape == target.shape and target.numel() > 1 and target.is_floating_point():
                self._residuals[result] = (x, target)
        is_even = name != "pow" or (len(args) > 1 and args[1] == 2)
        if name in SIZES and is_even and first in self._residuals and result.requires_grad:
            self._record_residual(SIZES[name], self._residuals[first], result)
        if plain in ("mul", "rmul") and len(tensors) == 2:
            self._record_product(tensors[0], tensors[1], result)
        if self._slot_of is not None and torch.is_grad_enabled():
            self._follow(tensors, result)
        if not result.dim():
            self._record_scalar(plain, tensors, result)

    def _source_of(self, tensor: Tensor) -> int:
        if tensor not in self._source:
            self._source[tensor] = next(self._count)
        return self._source[tensor]

    def _follow(self, tensors: list[Tensor], result: Tensor) -> None:
        """Records the origins of a tensor without a graph, and tensors that are combined with one that has a graph.

        A detached tensor that weights a term is intended, and so is a term of its value.
        """
        origins = frozenset[int]().union(*(self._origins.get(each) or () for each in tensors))
        if result.requires_grad and result.dim():
            self._weighing |= origins
        elif not result.requires_grad:
            self._origins[result] = origins or frozenset({next(self._count)})

    def _record_residual(self, op: str, pair: tuple[Tensor, Tensor], result: Tensor) -> None:
        site = self._site(op, shape=tuple(pair[0].shape))
        if site is not None:
            if op == SQUARED and (loss := compared_loss(SQUARED, torch.sub, pair, {})) is not None:
                self._measure(site, loss, pair[0], pair[1])
            self._record_gradient(site, result)

    def _record_product(self, a: Tensor, b: Tensor, result: Tensor) -> None:
        """Detects p log p, and log-probabilities that are weighted by a tensor with a graph."""
        if not (a.requires_grad and b.requires_grad) or a.shape != b.shape or not a.dim():
            return
        sources = [self._source_of(each) for each in (a, b)]
        if sources[0] == sources[1] and a is not b:
            site = self._site("entropy", shape=tuple(a.shape))
            if site is not None:
                self._record_gradient(site, result)
        for one, other in ((a, b), (b, a)):
            node = other.grad_fn
            if made_by(one, ("GatherBackward0",)) is None or type(node).__name__ not in (
                "SubBackward0",
                "RsubBackward1",
            ):
                continue
            if node is not None and sum(each is None for each, _ in node.next_functions) == 1:
                self._sign("advantage", "mul")

    def _record_scalar(self, plain: str, tensors: list[Tensor], result: Tensor) -> None:
        """Tracks scalars: terms of the loss with and without a graph."""
        if self._slot_of is None:
            return
        if result.grad_fn is not None:
            # not a mapping by node, which would hold the graph
            metadata = cast("dict[str, object]", result.grad_fn.metadata)
            metadata[_MAKER_KEY] = plain, self._line()
        if plain in SUM_FUNCTIONS and result.requires_grad and len(tensors) == 2:
            for each in tensors:
                op = self._without_graph.get(each)
                if op is not None and not each.requires_grad and self._slot_of(each) is not None:
                    origins = self._origins.get(each) or frozenset()
                    self._idle.append((("no_gradient", op, self._line()), origins))
        if not result.requires_grad and torch.is_grad_enabled():
            before = [self._without_graph[each] for each in tensors if each in self._without_graph]
            made = before[0] if before and plain in WEIGHTING_FUNCTIONS else None if plain == "detach" else plain
            self._without_graph[result] = made

    def _record_outer(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        """Records a column and a row of equally many samples that broadcast to a square."""
        pair = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
        is_named = name.endswith("_loss")
        if len(pair) < 2 or pair[0].dim() == pair[1].dim() or (self.stack and not is_named):
            return
        low, high = sorted(pair, key=lambda each: each.dim())
        if low.dim() > 1 and high._base is not None and high._base.dim() < high.dim():
            return  # rows of several columns that a view has given another dimension: pairs are intended
        if not low.dim() or low.shape[0] != high.shape[0] or low.shape[0] < 2:
            return
        count = math.prod(torch.broadcast_shapes(low.shape, high.shape))  # type: ignore[no-untyped-call]
        if count <= max(low.numel(), high.numel()) or low.requires_grad == high.requires_grad:
            return
        if is_named or (low not in self._raised and high not in self._raised):
            line = self._line()
            shapes = tuple(tuple(each.shape) for each in pair)
            self._outer.setdefault((name, line), Broadcast(name, shapes, count, int(low.shape[0]), line))

    # loss functions

    def _record_loss(self, name: str, args: Args, kwargs: Kwargs, result: Tensor, function: Any) -> None:
        arguments = dict(zip(("input", "target"), args)) | kwargs
        x = arguments.get("input")
        if not isinstance(x, Tensor) or not x.requires_grad or not x.numel():
            return
        fixed: dict[str, Any] = {"shape": tuple(x.shape), "module": self.stack[-1] if self.stack else None}
        with torch.no_grad():
            if name in ("cross_entropy", "nll_loss", "ctc_loss", "kl_div") or name in SOFTMAXES:
                fixed["simplex"] = is_simplex(x, class_dim(name, x, args, kwargs))
            if name == "binary_cross_entropy_with_logits":
                fixed["squashed"] = made_by(x, ("SigmoidBackward0", "SoftmaxBackward0")) is not None
            if fixed.get("simplex") or fixed.get("squashed"):
                fixed["made_in"] = self._maker(x)
            if name == "softmax" and not fixed["simplex"]:
                return
            site = self._site(name, **fixed)
            if site is None:
                return
            if name not in SOFTMAXES:
                self._measure_loss(site, name, arguments, args, kwargs, function)
        if name != "softmax":
            self._record_gradient(site, result)

    def _maker(self, x: Tensor) -> str | None:
        """Returns the module that computed the probabilities ``x``, or the tensor that ``x`` is a view of."""
        if x in self._probabilities:
            return self._probabilities[x]
        wanted = made_by(x, ("SigmoidBackward0", "SoftmaxBackward0"))
        matching = (path for each, path in self._probabilities.tensors() if each.grad_fn is wanted is not None)
        return next(matching, None)

    def _measure_loss(
        self, site: _Site, name: str, arguments: dict[str, Any], args: Args, kwargs: Kwargs, function: Any
    ) -> None:
        x, target = arguments["input"], arguments.get("target")
        if name in ("cross_entropy", "nll_loss"):
            site.fixed["classes"] = int(x.shape[1]) if x.dim() > 1 else int(x.shape[0])
        if name == CHUNKED:
            site.fixed["classes"] = len(args[1])
        if name in ("nll_loss", "ctc_loss") and x.dim() > 1:
            masses = x.detach().double().logsumexp(1 if name == "nll_loss" else -1).exp()
            site.fixed["above_0"] = float((x.detach() > MAX_LOG_PROBABILITY).double().mean())
            site.fixed["off_sum"] = float((masses - 1).abs().flatten().median())
        if not isinstance(target, Tensor) or not target.numel():
            return
        if name in CLASSES and not target.is_floating_point():
            self._record_ignored(site, name, args, kwargs, target)
        loss = compared_loss(name, function or getattr(nn.functional, name, torch.sub), args, kwargs)
        if loss is not None:
            self._measure(site, loss, x, target)

    def _record_ignored(self, site: _Site, name: str, args: Args, kwargs: Kwargs, target: Tensor) -> None:
        """Records which targets are ignored, and which of these precede others in the same sequence."""
        call = classified(name, args, kwargs)
        if call is None:
            return
        site.fixed["ignored"] = float((call.target < 0).double().mean())
        if not 0 <= call.ignore_index < call.classes:
            return
        site.fixed["ignored_class"] = call.ignore_index
        length = _length_of_sequences(args[0] if args else kwargs["input"], target)
        if length > 2:
            rows = target.reshape(-1, length)
            left_out = rows == call.ignore_index
            carry = (~left_out).long()
            carries_later = (carry.flip(1).cumsum(1).flip(1) - carry) > 0
            carries_before = (carry.cumsum(1) - carry) > 0
            inside = (left_out & carries_later & carries_before).any(1)
            site.fixed["ignored_inside"] = float(inside.double().mean())

    def _measure(self, site: _Site, loss: ComparedLoss, x: Tensor, target: Tensor) -> None:
        """Measures values that one step cannot decide. Synchronizes with the device only in the first step."""
        with torch.no_grad():
            sums, number = loss.sums()
            known = site.sums
            if known is not None and known[0].shape == sums.shape:
                sums, number = sums + known[0], number + known[1]
            site.sums = sums, number
            row: Row = {
                "value": loss.value(loss.x, loss.target),
                "constant": loss.of_constant(sums / number),
                "shuffled": loss.of_shuffled(),
                "varies": loss.varies(),
            }
            made = made_by(x, tuple(BOUNDS))
            if made is not None:
                bound, low, high = BOUNDS[type(made).__name__]
                site.fixed["bound"] = bound
                if loss.name in DISTANCES or loss.name == SQUARED:
                    slack = 0.01 * (high - low) if math.isfinite(high) else 0.01 * loss.target.abs().max()
                    row["outside"] = ((loss.target < low - slack) | (loss.target > high + slack)).double().mean()
                elif loss.name in ("cross_entropy", "binary_cross_entropy_with_logits") and site.steps == 1:
                    site.fixed["room"] = room_within(loss, low, high)
            if site.steps == 1:
                site.fixed["reverses"] = bool(custom_functions_of([x]))
            site.pending.append(row)

    def _record_gradient(self, site: _Site, result: Tensor) -> None:
        """Records whether a smaller or a larger ``result`` lowers the total loss."""
        op = site.fixed["op"]
        rows = result.numel() // result.shape[-1] if result.dim() else 1

        @without_modes()
        def hook(gradient: Tensor) -> None:
            site.wants.append(_extremes(gradient, rows))

        if result.requires_grad and (op in BOUNDED_BELOW or op in ("entropy", "log_softmax")):
            result.register_hook(hook)  # type: ignore[no-untyped-call]

    # backward passes and updates

    def on_backward(self, losses: Sequence[Tensor]) -> None:
        """Records the leaves that each term of the loss reaches. The terms are evaluated before the next
        backward pass.
        """
        self._evaluate_terms()
        waiting = [each.grad_fn for each in losses]
        for node in waiting:  # grows during the iteration
            if node is not None and type(node).__name__.startswith(("Add", "Sub", "Mul", "Div", "Neg")):
                waiting += [following for following, _ in node.next_functions]
            elif node is not None and len(self._reach) < MAX_CALLS:
                made = cast("dict[str, tuple[str, str | None]]", node.metadata).get(_MAKER_KEY)
                if made is not None:
                    self._reach.append((made, set(map(id, leaves_among(nodes_behind([node]))))))

    def on_step(self, parameters: Collection[Tensor]) -> None:
        """Records the parameters that an optimizer updates."""
        self._stepped.update(map(id, parameters))

    def _evaluate_terms(self) -> None:
        """Finds terms that reach only parameters that no update has changed. They train nothing."""
        if not self._stepped:
            return
        useful = [made for made, leaves in self._reach if leaves & self._stepped]
        self._useful.update(useful)
        for (op, line), leaves in self._reach:
            if useful and len(leaves) > 1 and (op, line) not in self._useful:
                self._signs_now.add(("not_updated", op, line))
        self._reach, self._stepped = [], set()

    # results

    @property
    def certain(self) -> int:
        """Returns the number of mistakes that are too frequent to be chance."""
        return sum(
            count >= (1 if kind == "advantage" else MIN_STEPS_WITH_SIGN) for (kind, _, _), count in self._signs.items()
        )

    def _read(self) -> None:
        """Synchronizes with the device and converts all measurements to numbers."""
        for site in self._sites.values():
            for row in site.pending:
                values = torch.stack([each.detach().double().reshape(()).cpu() for each in row.values()]).tolist()
                read = dict(zip(row, values))
                site.rows = [*site.rows, read][-MAX_VALUES:]
                if len(site.early) < MAX_VALUES:
                    site.early.append(read)
            site.pending = []
            for each in site.wants:
                site.wanted = [*site.wanted, _wants(site.fixed["op"], each.tolist())][-2 * MAX_VALUES :]
            site.wants = []

    def calls(self) -> tuple[MeasuredLoss, ...]:
        """Returns the call sites of loss functions and softmaxes."""
        self._read()
        return tuple(_call(site) for site in self._sites.values())

    @property
    def outer(self) -> tuple[Broadcast, ...]:
        """Returns the pairs that broadcast to a square."""
        return tuple(self._outer.values())

    @property
    def signs(self) -> tuple[LossSign, ...]:
        """Returns other mistakes."""
        signs = (
            (key, count) for key, count in self._signs.items() if key[0] != "not_updated" or key[1:] not in self._useful
        )
        return tuple(LossSign(kind, op, count, line) for (kind, op, line), count in signs)


def _length_of_sequences(x: Tensor, target: Tensor) -> int:
    """Returns the length T of target sequences (B, T), which may have been flattened; 0 if unknown."""
    before = [each._base for each in (target, x) if each._base is not None]
    shapes = [target.shape, *(each.shape[:2] for each in before if each.dim() in (2, 3))]
    known = (int(each[1]) for each in shapes if len(each) == 2 and each[1] and target.numel() % each[1] == 0)
    return next(known, 0) if target.dim() in (1, 2) else 0


def _call(site: _Site) -> MeasuredLoss:
    rows, early = site.rows, site.early
    wanted = set(site.wanted)
    return MeasuredLoss(
        **site.fixed,
        steps=site.steps,
        wants=wanted.pop() if len(wanted) == 1 else 0,
        values=(_column(early, "value"), _column(rows, "value")),
        rows=tuple((r["value"], r["constant"], r["shuffled"]) for r in rows if r.get("varies")),
        outside=min((row["outside"] for row in rows if "outside" in row), default=0.0),
    )


def _column(rows: Sequence[dict[str, float]], key: str) -> tuple[float, ...]:
    return tuple(row[key] for row in rows if key in row)


def _extremes(gradient: Tensor, rows: int) -> Tensor:
    """Returns the smallest and largest nonzero value, and 1 if there are at most ``rows`` nonzero values, else 0."""
    flat = gradient.detach().double().flatten()
    used = flat != 0
    low = torch.where(used, flat, math.inf).min()
    high = torch.where(used, flat, -math.inf).max()
    return torch.stack([low, high, (used.sum() <= rows).double()])


def _wants(op: str, extremes: Sequence[float]) -> int:
    """Returns 1 if a smaller result lowers the loss, -1 if a larger one does, 0 if elements differ.

    For log_softmax only a likelihood counts: at most one element in each row has a gradient. The sign is that of the
    negative log-likelihood.
    """
    low, high, is_sparse = extremes
    if not math.isfinite(low) or not math.isfinite(high) or low * high <= 0 or abs(high - low) > 1e-2 * abs(high):
        return 0
    if op == "log_softmax":
        return 0 if not is_sparse else -1 if low > 0 else 1
    return 1 if low > 0 else -1


class LossListener(Probe):
    """Measures the loss functions that the loop calls outside of its models, in some of the steps."""

    name = LossFacts.experiment
    hears_every_step = True
    """It sets the listener of the tape for the next step."""

    def __init__(self, tape: Tape, subject: LiveObjects) -> None:
        self._tape, self._subject = tape, subject
        self._found = LossCalls(slot_of=tape.slot_of, is_live=True)
        self._terms = self._reached = self._step = self._reported = self._certain = 0
        tape.listener = self._on_function

    def _on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if innermost_transform():  # tensors inside torch.func transforms have no values
            return
        try:
            self._found.on_function(name, args, kwargs, result)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._tape.listener = None
        self._found.forget()

    def on_begun_again(self) -> None:
        self._found.forget()

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if self._tape.listener is not None and self._step < EVERY_STEP_UNTIL:
            self._found.on_backward(losses)

    def on_gradients(self) -> None:
        if self._tape.listener is not None:
            self._found.end_backward()

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if self._tape.listener is not None and self._step < EVERY_STEP_UNTIL:
            self._found.on_step(owned_by(optimizer))
            self._reached = max(self._reached, sum(p.grad is not None for p in self._subject.parameters))

    def on_closed(self, step: RecordedStep) -> None:
        if self._tape.listener is not None:
            self._found.end_step()
            self._step = step.step
            if step.step <= EVERY_STEP_UNTIL:
                self._terms = len(terms_of(step))
            known, self._certain = self._certain, self._found.certain
            self.urgent |= self._certain > known
        self._tape.listener = self._on_function if is_examined(step.step + 1) else None

    def values(self) -> Facts | None:
        """Returns the calls so far. None if the loop calls no loss function: a replay sees those inside models."""
        self.urgent = False
        found = self._found
        calls = found.calls()
        if self._step == self._reported or not (calls or found.outer or found.signs):
            return None
        self._reported = self._step
        facts = facts_of(found, self._subject, self._terms, self._reached)
        return dict(strict(vars(facts))) | {"step": self._step}


def is_examined(step: int) -> bool:
    """Returns True if the loss functions of a step are measured."""
    interval = next((each for last, each in ((EVERY_STEP_UNTIL, 1), *INTERVALS) if step <= last), LAST_INTERVAL)
    return step % interval == 0


def facts_of(found: LossCalls, subject: LiveObjects, terms: int, reached: int) -> LossFacts:
    """Returns the facts of the collected calls."""
    return LossFacts(
        given=found.calls(),
        outer=found.outer,
        signs=found.signs,
        drawn=found.drawn,
        terms=terms,
        rivals=len(subject.roots) > 1 or len(subject.optimizers) > 1,
        maximizes=any(group.get("maximize") for each in subject.optimizers for group in each.param_groups),
        reached=reached,
        steps=max(1, found.steps),
    )


class _Inspector(StepInspector):
    """Collects the loss functions of a replay, including those inside models."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.found = LossCalls(self.stack)

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        self.found.returned(path, module, output)

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        with self._without_functions():
            self.found.on_function(name, args, kwargs, result)


@replay(LossFacts, when="checkup", steps=1.4, value=4.0)
def loss_calls(session: ReplaySession) -> LossFacts:
    """Returns the loss functions of a replayed step."""
    inspector = _Inspector(session)
    with session.live():
        result = inspector.run()
    reached = sum(gradient is not None for gradient in result.grads.values())
    step, subject = session.recorded_step, session.replayer.subject
    return facts_of(inspector.found, subject, len(terms_of(step)), reached)
