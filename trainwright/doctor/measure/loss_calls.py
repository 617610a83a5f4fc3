"""Measures the arguments of loss functions, in some steps of the training loop and in replays."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.optim import Optimizer

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.checkpoint.transforms import innermost_transform
from trainwright.doctor.facts.loss import Broadcast, LossFacts, LossSign, MeasuredLoss, TermFacts, TermsFacts
from trainwright.doctor.measure.loop_signs import LoopSigns
from trainwright.doctor.measure.tensors import made_by
from trainwright.recorder.callers import caller
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.graph import graph_behind, leaves_among
from trainwright.recorder.pausable import without_modes
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import Backward, Operation, RecordedStep, Slot
from trainwright.recorder.tape import Tape
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.classified import CHUNKED, classified
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector, custom_functions_of
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of
from trainwright.replay.trace import replayed_line
from trainwright.runs.json_values import Facts, strict

CLASSES = frozenset({"cross_entropy", "nll_loss", CHUNKED})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
SQUARED = "squared error"
MAX_ROWS = 256  # Maximum number of samples that are measured
MAX_COLUMNS = 1024  # Maximum number of values per sample that are measured
MAX_CLASSES = 65536  # Losses with more classes are not measured
BOUNDS = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("relu", 0.0, math.inf),
    "SoftplusBackward0": ("softplus", 0.0, math.inf),
}
"""Functions with bounded values as (name, lower bound, upper bound), by the name of their autograd node."""


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
    """Some rows of one call of a loss: predictions ``x`` and ``target``, both detached.

    Shapes: (N, C) and (N,) for classes, with -1 for ignored targets; otherwise equal shapes.
    """

    name: str
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
        values: Tensor = getattr(F, self.name)(x, target, **self.rest)
        return values.double().mean()

    def of_blank(self) -> Tensor:
        """Returns the loss of predictions without information: zeros, or equal probabilities or log-probabilities."""
        if self.name == "nll_loss":
            return self.value(torch.full_like(self.x, -math.log(self.x.shape[1])), self.target)
        return self.value(torch.full_like(self.x, 0.5 if self.name == "binary_cross_entropy" else 0.0), self.target)

    def sums(self) -> tuple[Tensor, float | Tensor]:
        """Returns (sum of the targets, number of targets). For classes the sum is the count of each class."""
        if self.name in CLASSES:
            kept = (self.target >= 0).double()
            counts = torch.zeros(self.x.shape[1], dtype=torch.float64, device=self.x.device)
            return counts.index_add_(0, self.target.clamp(min=0), kept), kept.sum()
        if self.target.dim() == 2:
            return self.target.double().sum(0, keepdim=True), len(self.target)
        return self.target.double().sum(), self.target.numel()

    def of_constant(self, mean: Tensor) -> Tensor:
        """Returns the loss of the constant prediction ``mean``: the mean of the targets, or the class frequencies."""
        if self.name in CLASSES:
            return self.value(mean.clamp(min=1e-9).log().to(self.x).expand_as(self.x), self.target)
        if self.name in BINARY:
            mean = mean.clamp(1e-6, 1 - 1e-6)
            mean = mean.logit() if self.name.endswith("logits") else mean
        return self.value(mean.to(self.x).expand_as(self.x).clone(), self.target)

    def of_shuffled(self) -> Tensor:
        """Returns the loss with the targets of other samples: the mean over two shifts of the targets."""
        count = len(self.target)
        one, other = (self.value(self.x, self.target.roll(shift, 0)) for shift in (count // 3 + 1, count // 2 + 1))
        return (one + other) / 2

    def varies(self) -> Tensor:
        """Returns True (a 0-d tensor) if the targets are not all equal."""
        first = self.target.flatten()[:1]
        kept = self.target >= 0 if self.name in CLASSES else torch.ones_like(self.target, dtype=torch.bool)
        reference = self.target.max() if self.name in CLASSES else first
        return ((self.target != reference) & kept).any()


def compared_loss(name: str, args: Args, kwargs: Kwargs) -> ComparedLoss | None:
    """Returns some rows of a call that compares predictions with targets; None for other calls."""
    if name in CLASSES:
        return _compared_class_loss(name, args, kwargs)
    if name not in BINARY | DISTANCES | {SQUARED}:
        return None
    given = dict(zip(("input", "target", "weight"), args)) | kwargs
    x, target = given.pop("input", None), given.pop("target", None)
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or len(args) > 3:
        return None
    if x.shape != target.shape or not x.dim() or len(x) < 2 or not target.is_floating_point():
        return None
    given = {key: each for key, each in given.items() if key in ("beta", "delta")}
    return ComparedLoss(name, _sample_rows(x), _sample_rows(target), given)


def _compared_class_loss(name: str, args: Args, kwargs: Kwargs) -> ComparedLoss | None:
    call = classified(name, args, kwargs)
    if call is None or len(call.target) < 2 or not 2 <= call.classes <= MAX_CLASSES:
        return None
    rows = call.sample(MAX_ROWS)
    rest = {key: kwargs[key] for key in ("weight", "label_smoothing") if kwargs.get(key) is not None}
    return ComparedLoss(name, call.scores(rows).float(), call.target[rows], rest)


def _sample_rows(x: Tensor) -> Tensor:
    """Returns at most about MAX_ROWS evenly spaced samples, with the first MAX_COLUMNS values of each."""
    rows = x.detach()[:: max(1, -(-len(x) // MAX_ROWS))]
    return rows if rows[0].numel() <= MAX_COLUMNS else rows.flatten(1)[:, :MAX_COLUMNS]


def _is_softmax(node: Node) -> bool:
    return type(node).__name__.startswith(("SoftmaxBackward", "LogSoftmaxBackward"))


def _softmax_axis(x: Tensor) -> tuple[Node, int, bool] | None:
    """Returns the node of the softmax that made ``x``, up to functions of single elements, its axis, and whether ``x``
    are log-probabilities; else None.
    """
    node, is_log = x.grad_fn, False
    for _ in range(4):
        if node is None or not node.next_functions:
            return None
        kind = type(node).__name__
        is_log = is_log or "Log" in kind
        if _is_softmax(node):
            dim = int(node._saved_dim)  # type: ignore[attr-defined]
            return node, (dim - 2**64 if dim >= 2**63 else dim) % x.dim(), is_log
        if not kind.startswith(ELEMENTWISE) or sum(each is not None for each, _ in node.next_functions) != 1:
            return None
        node = next(each for each, _ in node.next_functions if each is not None)
    return None


_Mistake: TypeAlias = tuple[str, str, str | None]  # (kind, function, line)
_CHOICE_KEY, _AXES_KEY = "trainwright_choice", "trainwright_axes"
"""Metadata keys of autograd nodes: wrong axes that count once a logarithm follows, and softmax axes of scores."""


def _notes(node: Node, key: str) -> set[_Mistake | None]:
    """Returns the set under ``key`` in the metadata of a node. It lives as long as the graph."""
    return cast("dict[str, set[_Mistake | None]]", node.metadata).setdefault(key, set())


def _counts_up(index: object, count: int) -> bool:
    """Returns True for the indices 0, 1, ..., ``count`` - 1."""
    return isinstance(index, Tensor) and index.shape == (count,) and index.tolist() == list(range(count))


def room_within(loss: ComparedLoss, low: float, high: float) -> float:
    """Returns the fraction by which the best scores within ``low`` and ``high`` reduce the loss of equal scores."""
    if loss.name in BINARY:
        best = loss.value((low + (min(high, 30.0) - low) * loss.target).to(loss.x), loss.target)
    else:
        best = torch.tensor(math.log1p((loss.x.shape[1] - 1) * math.exp(low - min(high, low + 30.0))))
    equal = loss.of_blank() if loss.name in BINARY else torch.tensor(math.log(loss.x.shape[1]))
    return 1.0 - float(best) / max(float(equal), 1e-12)


EVERY_STEP_UNTIL = 8  # All steps up to this one are examined
INTERVALS = ((64, 4), (256, 16))  # (last step, interval) of the examined steps after EVERY_STEP_UNTIL
LAST_INTERVAL = 64  # Interval of examined steps after all of INTERVALS
MAX_VALUES = 8  # The values of this many first and this many last examined steps are kept
MIN_STEPS_WITH_SIGN = 3  # Minimum number of examined steps with a mistake. One step may have it by chance.
MAX_CALLS = 32  # Maximum number of measured calls per step
MIN_TARGETS_PER_CLASS = 40  # Minimum mean number of targets per class for a comparison of class weights
MIN_FIT, MIN_GAIN_OF_FIT = 0.95, 0.3
"""Minimum absolute correlation of log class weights and log frequencies, and minimum gain by another class order."""
MIN_PAIRS = 4  # Minimum size N of a matrix of similarities
MAX_LOG_PROBABILITY = 1e-3  # Maximum log-probability that is accepted: 0, and a margin for rounding
BOUNDED_BELOW = CLASSES | BINARY | DISTANCES | {
    "kl_div", "ctc_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", SQUARED, "absolute error",
}  # fmt: skip
"""Losses that have a lower bound and are minimized."""
SOFTMAXES = frozenset({"softmax", "log_softmax"})
CHOOSES_CLASSES = frozenset({"cross_entropy", "nll_loss", "ctc_loss", "gather", "__getitem__"})
"""Functions whose first argument has scores or probabilities of classes."""
WITH_PROBABILITIES = frozenset({"mul", "rmul", "kl_div", "mse_loss", "binary_cross_entropy"})
"""Functions that combine probabilities with targets that are probabilities of classes, such as one-hot rows."""
ELEMENTWISE = ("LogBackward", "Clamp", "AddBackward", "NegBackward")
PAIRED = frozenset({"sub", "rsub", "mul", "add", *DISTANCES})
DIFFERENCES = frozenset({"sub", "rsub"})
SIZES = {"square": SQUARED, "pow": SQUARED, "abs": "absolute error"}
MAY_ADD_DIMENSION = frozenset({"unsqueeze", "__getitem__", "view", "reshape"})
RANDOM_FUNCTIONS = frozenset({"multinomial", "bernoulli", "poisson", "normal", "sample"})
COMPARISONS = DISTANCES | {"kl_div"}
"""Losses of two tensors of numbers. Without a graph they compare data with data."""
SUM_FUNCTIONS = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub"})
WEIGHTING_FUNCTIONS = frozenset({"mul", "rmul", "div", "neg", "mean", "sum", "squeeze", "float", "to"})
"""Functions that weight or reduce a term. The result keeps the name of the function that computed the term."""
CAUSES = frozenset({"sub", "rsub", "detach", "grad"})
"""Functions whose result may be a wrong argument of a later function. Their lines are recorded."""
Row: TypeAlias = dict[str, Tensor]
_SlotOf: TypeAlias = Callable[[Tensor], int | None]
_FUNCTION_KEY = "trainwright_made"
"""Key in the metadata of the autograd node of a scalar. The value is (called function, line)."""


@dataclass
class _CallSite:
    """One call site of a loss function, with its measurements in each examined step."""

    fixed: dict[str, Any]
    rows: list[dict[str, float]] = field(default_factory=list)
    pending: list[Row] = field(default_factory=list)
    steps: int = 0
    early: list[dict[str, float]] = field(default_factory=list)
    sums: tuple[Tensor, float | Tensor] | None = None
    weight: Tensor | None = None
    pos_weight: Tensor | None = None
    gradient_extremes: list[Tensor] = field(default_factory=list)
    directions: list[int] = field(default_factory=list)


class LossCalls:
    """Collects the arguments of loss functions, and the gradient of the total loss with respect to their results.

    Args:
        stack: Paths of the running modules, outermost first. Empty in the loop.
        slot_of: Returns the slot of a tensor in the recorded program; None if no recorded call computed it.
        is_live: True in the training loop, where the line of the user can be read from the Python stack.
        last: Path of the last module of the model if it is a softmax or sigmoid. In the loop, calls inside the model
            are not observed.
    """

    def __init__(
        self,
        stack: Sequence[str] = (),
        slot_of: _SlotOf | None = None,
        *,
        is_live: bool = False,
        last: str | None = None,
    ) -> None:
        self._last = last
        self.stack, self._slot_of, self._is_live = stack, slot_of, is_live
        self._sites: dict[Hashable, _CallSite] = {}
        self._mistakes: dict[tuple[str, str, str | None], int] = {}
        self._broadcasts: dict[tuple[str, str | None], Broadcast] = {}
        # for each term: its (function, line), and the ids of the leaves that it depends on
        self._term_leaves: list[tuple[tuple[str, str | None], set[int]]] = []
        self._stepped: set[int] = set()
        self._trained_terms: set[tuple[str, str | None]] = set()
        self.drawn = False
        self.steps = 0
        self._step_mistakes: set[_Mistake] = set()
        self._num_calls: dict[Hashable, int] = {}
        self.loop_signs = LoopSigns() if is_live else None
        self.forget()

    def forget(self) -> None:
        if self.loop_signs is not None:
            self.loop_signs.forget()
        self._with_new_dimension: TensorNotes[None] = TensorNotes()
        self._lengths: TensorNotes[int] = TensorNotes()  # length T of the (B, T) targets that were flattened
        self._residuals: TensorNotes[tuple[Tensor, Tensor]] = TensorNotes()
        # for results of softmax and sigmoid: (module path, line of the call); no line for nn.Softmax and nn.Sigmoid
        self._probabilities: TensorNotes[tuple[str | None, str | None]] = TensorNotes()
        self._made_at: TensorNotes[str | None] = TensorNotes()  # lines of the calls in CAUSES
        self._softmaxes: TensorNotes[str | None] = TensorNotes()  # lines of the calls
        self._count = itertools.count()
        # for results of softmax, exp, ...: a number that identifies the input
        self._input_numbers: TensorNotes[int] = TensorNotes()
        # for scalars without a graph: the function that computed them; None if it was ``detach``
        self._without_graph: TensorNotes[str | None] = TensorNotes()
        # for tensors without a graph: the tensors that they are computed from
        self._origins: TensorNotes[frozenset[int]] = TensorNotes()
        # origins of tensors that are combined with a tensor that has a graph
        self._combined_with_graph: set[int] = set()
        self._origin_lines: dict[int, str | None] = {}
        self._terms_without_graph: list[tuple[tuple[str, str, str | None], frozenset[int]]] = []

    def end_backward(self) -> None:
        """Records the terms without a gradient after a backward pass, and drops all tensors."""
        self._step_mistakes |= {
            sign for sign, origins in self._terms_without_graph if not origins & self._combined_with_graph
        }
        self.forget()

    def end_step(self) -> None:
        """Counts the mistakes of the step and drops its tensors."""
        self.end_backward()
        for each in self._step_mistakes:
            self._mistakes[each] = self._mistakes.get(each, 0) + 1
        self.steps += 1
        self._step_mistakes, self._num_calls = set(), {}

    # calls

    def returned(self, path: str, module: nn.Module, output: object) -> None:
        if isinstance(output, Tensor) and isinstance(module, nn.Softmax | nn.Sigmoid):
            self._probabilities[output] = path, None

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        self.drawn |= name in RANDOM_FUNCTIONS
        if self.loop_signs is not None:
            self.loop_signs.on_function(name, args, kwargs, result)
        if name in CAUSES:
            for each in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple) else ():
                if isinstance(each, Tensor):
                    self._made_at[each] = self._line()
        if not isinstance(result, Tensor) or not args:
            return
        plain = name.strip("_")
        if plain in PAIRED:
            self._record_broadcast(plain, args, kwargs, result)
        if name in ("softmax", "sigmoid"):
            self._probabilities[result] = self.stack[-1] if self.stack else None, self._line()
        if not self.stack:
            self._record_operation(name, plain, args, kwargs, result)
        if name in SOFTMAXES:
            self._softmaxes[result] = self._line()
        self._record_wrong_axis(name, args, kwargs, result)
        if name in BOUNDED_BELOW or name in SOFTMAXES:
            self._record_loss(name, args, kwargs, result)

    def _line(self) -> str | None:
        return caller() if self._is_live else replayed_line(sys._getframe(1)) if self.stack else None

    def _site(self, op: str, **fixed: Any) -> _CallSite | None:
        """Returns the call site, the same object in each step; None if there are too many."""
        line = self._line()
        key = (op, line, fixed.get("module"))
        number = self._num_calls[key] = self._num_calls.get(key, 0) + 1
        if (key, number) not in self._sites and len(self._sites) >= MAX_CALLS:
            return None
        site = self._sites.setdefault((key, number), _CallSite({"op": op, "line": line}))
        site.fixed |= fixed
        site.steps += 1
        return site

    # operations of the loop

    def _record_operation(self, name: str, plain: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        first = args[0]
        if (
            plain in ("flatten", "view", "reshape", "contiguous")
            and not first.is_floating_point()
            and result.dim() == 1
        ):
            self._lengths[result] = first.shape[1] if first.dim() == 2 else 0
        if name == "expand" or (name in MAY_ADD_DIMENSION and isinstance(first, Tensor) and result.dim() > first.dim()):
            self._with_new_dimension[result] = None
        if name in ("softmax", "log_softmax", "exp", "clamp") and isinstance(first, Tensor):
            self._input_numbers[result] = self._number_of(first)
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
            self._record_origins(tensors, result)
        if not result.dim() and self._slot_of is not None:
            self._record_scalar(plain, tensors, result)

    def _number_of(self, tensor: Tensor) -> int:
        if tensor not in self._input_numbers:
            self._input_numbers[tensor] = next(self._count)
        return self._input_numbers[tensor]

    def _record_origins(self, tensors: list[Tensor], result: Tensor) -> None:
        """Records the origins of tensors without a graph, and the origins that are combined with a tensor that has one.

        A detached tensor that weights a term of the loss is intended. A term without a graph that is computed from the
        same origin is then intended, too.
        """
        origins = frozenset[int]().union(*(self._origins.get(each) or () for each in tensors))
        if result.requires_grad and result.dim():
            self._combined_with_graph |= origins
        elif not result.requires_grad:
            self._origins[result] = origins or frozenset({number := next(self._count)})
            if not origins:
                made = next((line for each in (*tensors, result) if (line := self._made_at.get(each))), None)
                self._origin_lines[number] = made

    def _record_wrong_axis(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        """Detects probabilities of classes that come from a softmax over another axis, such as the samples.

        The axis of the classes is known for losses with class numbers, for a choice of one log-probability in each
        row, and for targets that sum to 1 in each row. Scores of pairs (N, N) may have a softmax over either axis.
        Probabilities that are chosen or multiplied without a logarithm are weights, as in a router or a pooling.
        """
        if name == "log" and (chosen := made_by(args[0], "GatherBackward0", "IndexBackward0")) is not None:
            self._step_mistakes.update(each for each in _notes(chosen, _CHOICE_KEY) if each is not None)
        if name not in CHOOSES_CLASSES | WITH_PROBABILITIES:
            return
        x = args[0]
        if name in WITH_PROBABILITIES:
            pair = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
            x = next((each for each in pair if each.requires_grad), None)
        if not isinstance(x, Tensor) or x.dim() < 2 or x.grad_fn is None:
            return
        if (axis := _softmax_axis(x)) is None:
            if name == "cross_entropy":
                self._note_axis(x.grad_fn, None)
            return
        node, dim, is_log = axis
        classes = x.dim() - 1 if name == "ctc_loss" or name in WITH_PROBABILITIES else 1
        rest = args[1:]
        is_pairs = x.dim() == 2 and x.shape[0] == x.shape[1]
        if name == "__getitem__":
            rest = rest[0] if rest and isinstance(rest[0], tuple) else ()
            is_choice = len(rest) == x.dim() == 2 and all(isinstance(i, Tensor) and i.dim() == 1 for i in rest)
            is_choice = is_choice and _counts_up(rest[0], len(x))
        elif name == "gather":
            given = dict(zip(("input", "dim", "index"), args)) | kwargs
            is_choice = x.dim() == 2 and given["dim"] in (1, -1) and given["index"].shape[1:] == (1,)
        elif name in WITH_PROBABILITIES:
            others = [each for each in pair if each is not x]
            is_choice = len(others) == 1 and others[0].shape == x.shape and not others[0].requires_grad
            is_choice = is_choice and is_simplex(others[0], -1) and not is_simplex(others[0], 0)
            is_choice = is_choice and bool(((others[0] != 0).sum(0) > 1).any())  # else a mean over samples of a class
            is_choice = is_choice and (is_log or name not in ("mul", "rmul"))
        else:
            is_choice = True
            is_pairs = is_pairs and (
                name not in CLASSES or _counts_up(args[1] if len(args) > 1 else kwargs.get("target"), len(x))
            )
        scores = node.next_functions[0][0]
        if not is_choice or is_pairs or scores is None or min(x.shape[dim], x.shape[classes]) < 2:
            return
        if dim == classes:
            self._note_axis(scores, None)
        elif not _is_softmax(scores):  # else Sinkhorn: rows and columns are normalized in turn
            made = (line for each, line in self._softmaxes.tensors() if each.grad_fn is node)
            mistake = "wrong_axis", name, next(made, None) or self._line()
            if is_log or name not in ("gather", "__getitem__"):
                self._note_axis(scores, mistake)
            elif result.grad_fn is not None:
                _notes(result.grad_fn, _CHOICE_KEY).add(mistake)

    def _note_axis(self, scores: Node, mistake: _Mistake | None) -> None:
        """Records a softmax of ``scores`` over the classes (None), or over another axis.

        If both occur in one step, they are the two directions of a contrastive loss and no mistake.
        """
        notes = _notes(scores, _AXES_KEY)
        notes.add(mistake)
        if None in notes:
            self._step_mistakes -= notes
        elif mistake is not None:
            self._step_mistakes.add(mistake)

    def _record_residual(self, op: str, pair: tuple[Tensor, Tensor], result: Tensor) -> None:
        site = self._site(op, shape=tuple(pair[0].shape))
        if site is not None:
            if op == SQUARED and (loss := compared_loss(SQUARED, pair, {})) is not None:
                self._measure(site, loss, pair[0], pair[1])
            self._record_gradient(site, result)

    def _record_product(self, a: Tensor, b: Tensor, result: Tensor) -> None:
        """Detects entropies (p log p), and advantages with a graph that weight log-probabilities."""
        if not (a.requires_grad and b.requires_grad) or a.numel() != b.numel():
            return
        sources = [self._number_of(each) for each in (a, b)]
        if sources[0] == sources[1] and a is not b and a.dim() and a.shape == b.shape:
            site = self._site("entropy", shape=tuple(a.shape))
            if site is not None:
                self._record_gradient(site, result)
        for one, other in ((a, b), (b, a)):
            node, chosen = other.grad_fn, made_by(one, "GatherBackward0", "NegBackward0")
            if chosen is not None and type(chosen).__name__ == "NegBackward0":
                chosen = made_by(chosen.next_functions[0][0], "GatherBackward0")
            if chosen is None or node is None or type(node).__name__ != "SubBackward0":
                continue
            if any(each is None for each, _ in node.next_functions):
                self._step_mistakes.add(("advantage", "mul", self._made_at.get(other) or self._line()))

    def _record_scalar(self, plain: str, tensors: list[Tensor], result: Tensor) -> None:
        """Records scalars, which may be terms of the loss, with or without a graph."""
        assert self._slot_of is not None
        if result.grad_fn is not None:
            # a dict with nodes as keys would keep the graph alive
            metadata = cast("dict[str, object]", result.grad_fn.metadata)
            metadata[_FUNCTION_KEY] = plain, self._line()
        if plain in SUM_FUNCTIONS and result.requires_grad and len(tensors) == 2:
            for each in tensors:
                op = self._without_graph.get(each)
                is_compared = op in COMPARISONS or self._slot_of(each) is not None
                if op is not None and not each.requires_grad and is_compared:
                    origins = self._origins.get(each) or frozenset()
                    lines = (line for number in sorted(origins) if (line := self._origin_lines.get(number)))
                    self._terms_without_graph.append((("no_gradient", op, next(lines, self._line())), origins))
        if not result.requires_grad and torch.is_grad_enabled():
            before = [self._without_graph[each] for each in tensors if each in self._without_graph]
            made = before[0] if before and plain in WEIGHTING_FUNCTIONS else None if plain == "detach" else plain
            self._without_graph[result] = made

    def _record_broadcast(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        """Records two tensors of N samples whose shapes differ, such as (N, 1) and (N,), and broadcast to (N, N)."""
        pair = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
        is_named = name.endswith("_loss")
        if len(pair) < 2 or pair[0].dim() == pair[1].dim() or (self.stack and not is_named):
            return
        low, high = sorted(pair, key=lambda each: each.dim())
        if low.dim() > 1 and high._base is not None and high._base.dim() < high.dim():
            return  # a view has added a dimension to rows with several columns: pairs are intended
        if not low.dim() or low.shape[0] != high.shape[0] or low.shape[0] < 2:
            return
        count = math.prod(torch.broadcast_shapes(low.shape, high.shape))  # type: ignore[no-untyped-call]
        if count <= max(low.numel(), high.numel()) or low.requires_grad == high.requires_grad:
            return
        if is_named or (low not in self._with_new_dimension and high not in self._with_new_dimension):
            line = self._line()
            shapes = tuple(tuple(each.shape) for each in pair)
            self._broadcasts.setdefault((name, line), Broadcast(name, shapes, count, int(low.shape[0]), line))

    # loss functions

    def _record_loss(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        arguments = dict(zip(("input", "target"), args)) | kwargs
        x = arguments.get("input")
        if not isinstance(x, Tensor) or not x.requires_grad or not x.numel():
            return
        fixed: dict[str, Any] = {"shape": tuple(x.shape), "module": self.stack[-1] if self.stack else None}
        with torch.no_grad():
            if name in ("cross_entropy", "nll_loss", "ctc_loss", "kl_div") or name in SOFTMAXES:
                fixed["simplex"] = is_simplex(x, class_dim(name, x, args, kwargs))
            if name == "binary_cross_entropy_with_logits":
                fixed["squashed"] = made_by(x, "SigmoidBackward0", "SoftmaxBackward0") is not None
            if fixed.get("simplex") or fixed.get("squashed"):
                fixed["made_in"], fixed["made_at"] = self._maker(x)
            if name == "softmax" and not fixed["simplex"]:
                return
            site = self._site(name, **fixed)
            if site is None:
                return
            if name not in SOFTMAXES:
                self._measure_loss(site, name, arguments, args, kwargs)
        if name != "softmax":
            self._record_gradient(site, result)

    def _maker(self, x: Tensor) -> tuple[str | None, str | None]:
        """Returns (module path, line) of the softmax or sigmoid whose result, or a view of it, is ``x``."""
        if x in self._probabilities:
            return self._probabilities[x]
        wanted = made_by(x, "SigmoidBackward0", "SoftmaxBackward0")
        matching = (made for each, made in self._probabilities.tensors() if each.grad_fn is wanted is not None)
        return next(matching, (self._last if wanted is not None else None, None))

    def _measure_loss(self, site: _CallSite, name: str, arguments: dict[str, Any], args: Args, kwargs: Kwargs) -> None:
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
            site.fixed["own_pairs"] = _compares_with_itself(x, target) and site.fixed.get("own_pairs", True)
        given = arguments.get("pos_weight")
        site.pos_weight = given if isinstance(given, Tensor) and given.numel() == 1 else None
        loss = compared_loss(name, args, kwargs)
        if loss is not None:
            self._measure(site, loss, x, target)

    def _record_ignored(self, site: _CallSite, name: str, args: Args, kwargs: Kwargs, target: Tensor) -> None:
        """Records the fractions of ignored targets, and of sequences with an ignored target between other targets."""
        call = classified(name, args, kwargs)
        if call is None:
            return
        site.fixed["ignored"] = float((call.target < 0).double().mean())
        length = self._lengths.get(target) or (target.shape[1] if target.dim() == 2 else 0)
        if length > 2:
            without = _rows_without(call.target.reshape(-1, length) >= 0)
            site.fixed["rows_without"] = min(without, site.fixed.get("rows_without", 1.0))
        if not 0 <= call.ignore_index < call.classes:
            return
        site.fixed["ignored_class"] = call.ignore_index
        length = _length_of_sequences(args[0] if args else kwargs["input"], target)
        if length > 2:
            left_out = target.reshape(-1, length) == call.ignore_index
            layouts = [left_out, left_out.T] if len(left_out) > 2 else [left_out]  # (B, T) or (T, B)
            site.fixed["ignored_inside"] = min(map(_fraction_inside, layouts))

    def _measure(self, site: _CallSite, loss: ComparedLoss, x: Tensor, target: Tensor) -> None:
        """Measures values that are compared over several steps. Synchronizes with the device only in the first step."""
        with torch.no_grad():
            sums, number = loss.sums()
            known = site.sums
            if known is not None and known[0].shape == sums.shape:
                sums, number = sums + known[0], number + known[1]
            site.sums, site.weight = (sums, number), loss.rest.get("weight")
            row: Row = {
                "value": loss.value(loss.x, loss.target),
                "constant": loss.of_constant(sums / number),
                "shuffled": loss.of_shuffled(),
                "varies": loss.varies(),
            }
            made = made_by(x, *BOUNDS)
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

    def _record_gradient(self, site: _CallSite, result: Tensor) -> None:
        """Registers a hook that records whether a smaller or a larger ``result`` lowers the total loss."""
        op = site.fixed["op"]
        rows = result.numel() // result.shape[-1] if result.dim() else 1

        @without_modes()
        def hook(gradient: Tensor) -> None:
            site.gradient_extremes.append(_extremes(gradient, rows))

        if result.requires_grad and (op in BOUNDED_BELOW or op in ("entropy", "log_softmax")):
            result.register_hook(hook)  # type: ignore[no-untyped-call]

    # backward passes and updates

    def on_backward(self, losses: Sequence[Tensor]) -> None:
        """Records the leaves of each term of the loss. They are evaluated before the next backward pass."""
        self._evaluate_terms()
        waiting = [each.grad_fn for each in losses]
        for node in waiting:  # grows during the iteration
            if node is not None and type(node).__name__.startswith(("Add", "Sub", "Mul", "Div", "Neg")):
                waiting += [following for following, _ in node.next_functions]
            elif node is not None and len(self._term_leaves) < MAX_CALLS:
                made = cast("dict[str, tuple[str, str | None]]", node.metadata).get(_FUNCTION_KEY)
                if made is not None:
                    self._term_leaves.append((made, set(map(id, leaves_among(graph_behind([node]))))))

    def on_step(self, parameters: Collection[Tensor]) -> None:
        """Records the parameters that an optimizer updates."""
        self._stepped.update(map(id, parameters))

    def _evaluate_terms(self) -> None:
        """Finds terms that depend only on parameters that no optimizer has updated."""
        if not self._stepped:
            return
        useful = [made for made, leaves in self._term_leaves if leaves & self._stepped]
        self._trained_terms.update(useful)
        for (op, line), leaves in self._term_leaves:
            if useful and len(leaves) > 1 and (op, line) not in self._trained_terms:
                self._step_mistakes.add(("not_updated", op, line))
        self._term_leaves, self._stepped = [], set()

    # results

    @property
    def certain(self) -> int:
        """The number of mistakes that are too frequent to be chance."""
        return sum(
            count >= (1 if kind == "advantage" else MIN_STEPS_WITH_SIGN)
            for (kind, _, _), count in self._mistakes.items()
        )

    def _synchronize(self) -> None:
        """Synchronizes with the device and converts all measurements to numbers."""
        for site in self._sites.values():
            for row in site.pending:
                values = torch.stack([each.detach().double().reshape(()).cpu() for each in row.values()]).tolist()
                read = dict(zip(row, values))
                site.rows = [*site.rows, read][-MAX_VALUES:]
                if len(site.early) < MAX_VALUES:
                    site.early.append(read)
            site.pending = []
            for each in site.gradient_extremes:
                site.directions = [*site.directions, _loss_direction(site.fixed["op"], each.tolist())][
                    -2 * MAX_VALUES :
                ]
            site.gradient_extremes = []

    def calls(self) -> tuple[MeasuredLoss, ...]:
        """Returns the call sites of loss functions and softmaxes."""
        self._synchronize()
        return tuple(_call(site) for site in self._sites.values())

    @property
    def outer(self) -> tuple[Broadcast, ...]:
        """The pairs of tensors that broadcast to (N, N)."""
        return tuple(self._broadcasts.values())

    @property
    def signs(self) -> tuple[LossSign, ...]:
        """The mistakes other than broadcasts."""
        signs = (
            (key, count)
            for key, count in self._mistakes.items()
            if key[0] != "not_updated" or key[1:] not in self._trained_terms
        )
        others = self.loop_signs.found() if self.loop_signs is not None else ()
        return (*(LossSign(kind, op, count, line) for (kind, op, line), count in signs), *others)


def _fraction_inside(left_out: Tensor) -> float:
    """Returns the fraction of the rows in which an ignored target is between targets that count."""
    carry = (~left_out).long()
    carries_later = (carry.flip(1).cumsum(1).flip(1) - carry) > 0
    carries_before = (carry.cumsum(1) - carry) > 0
    return float((left_out & carries_later & carries_before).any(1).double().mean())


def _rows_without(counts: Tensor) -> float:
    """Returns the fraction of rows in which all targets are ignored; 0 unless the other rows end in answers.

    In nine of ten rows with answers, the targets that count are consecutive and follow at least two ignored ones.
    """
    total = counts.sum(1)
    rows = counts[total > 0].long()
    if not len(rows) or len(rows) == len(counts):
        return 0.0
    first, last = rows.argmax(1), counts.shape[1] - 1 - rows.flip(1).argmax(1)
    is_answer = (first > 1) & (last - first + 1 == rows.sum(1))
    return float((total == 0).double().mean()) if float(is_answer.double().mean()) >= 0.9 else 0.0


def _length_of_sequences(x: Tensor, target: Tensor) -> int:
    """Returns the length T of target sequences (B, T), which may have been flattened; 0 if unknown."""
    before = [each._base for each in (target, x) if each._base is not None]
    shapes = [target.shape, *(each.shape[:2] for each in before if each.dim() in (2, 3))]
    known = (int(each[1]) for each in shapes if len(each) == 2 and each[1] and target.numel() % each[1] == 0)
    return next(known, 0) if target.dim() in (1, 2) else 0


def _call(site: _CallSite) -> MeasuredLoss:
    rows, early = site.rows, site.early
    directions = set(site.directions)
    return MeasuredLoss(
        **site.fixed,
        steps=site.steps,
        wants=directions.pop() if len(directions) == 1 else 0,
        values=(_column(early, "value"), _column(rows, "value")),
        rows=tuple((r["value"], r["constant"], r["shuffled"]) for r in rows if r.get("varies")),
        outside=min((row["outside"] for row in rows if "outside" in row), default=0.0),
        weights_of=() if site.sums is None or site.weight is None else _classes_of(site.weight, site.sums[0]),
        inverted=site.sums is not None and _is_inverted(site, *site.sums),
    )


def _compares_with_itself(x: Tensor, target: Tensor) -> bool:
    """Returns True for similarities (N, N) whose diagonal is the same largest value in each row, and never a target."""
    if x.dim() != 2 or x.shape[0] != x.shape[1] or len(x) < MIN_PAIRS or target.shape != x.shape[:1]:
        return False
    scores, own = x.detach().float(), x.detach().float().diagonal()
    near = 1e-3 * (scores.max() - scores.min())
    is_largest = ((scores.max(1).values - own) < near).all() & ((own.max() - own.min()) < near) & (near > 0)
    return bool(is_largest & (target != torch.arange(len(target), device=target.device)).all())


def _is_inverted(site: _CallSite, sums: Tensor, number: float | Tensor) -> bool:
    """Returns True if class weights rise with the frequencies of the classes, instead of falling."""
    if site.pos_weight is not None and sums.numel() == 1:
        rate, weight = float(sums) / max(1.0, float(number)), float(site.pos_weight)
        if not 0 < rate < 1 or weight <= 0 or float(number) < 5 * MIN_TARGETS_PER_CLASS:
            return False
        odds = math.log(rate / (1 - rate))
        return abs(odds) > 0.4 and abs(math.log(weight) - odds) < 0.25
    n, w = sums.detach().double().cpu().flatten(), site.weight
    if w is None or w.shape != n.shape or not n.all() or n.mean() < MIN_TARGETS_PER_CLASS:
        return False
    w = w.detach().double().cpu()
    if not (w > 0).all() or n.log().std() < 0.3 or w.log().std() < 0.1:
        return False
    if len(n) == 2:
        return abs(float((w.log() - n.log()).diff())) < 0.25
    return float(torch.corrcoef(torch.stack([w.log(), n.log()]))[0, 1]) > MIN_FIT


def _classes_of(weight: Tensor, counts: Tensor) -> tuple[int, ...]:
    """Returns for each class weight the class whose frequency it fits; () if the weights may be in the right order.

    Wrong orders that are tested: class numbers sorted as text, and shifts by one class.
    """
    numbers = range(len(counts))
    n = counts.detach().double().cpu()
    if len(numbers) < 5 or weight.shape != counts.shape or not n.all() or n.mean() < MIN_TARGETS_PER_CLASS:
        return ()
    w = weight.detach().double().cpu()
    if not (w > 0).all() or n.log().std() < 0.3 or w.log().std() < 0.1:
        return ()
    orders = [[*numbers], sorted(numbers, key=str), [*numbers[1:], 0], [numbers[-1], *numbers[:-1]]]
    fits = [float(-torch.corrcoef(torch.stack([w.log(), n[order].log()]))[0, 1]) for order in orders]
    best = max(range(len(orders)), key=fits.__getitem__)
    return tuple(orders[best]) if fits[best] > max(MIN_FIT, fits[0] + MIN_GAIN_OF_FIT) else ()


def _column(rows: Sequence[dict[str, float]], key: str) -> tuple[float, ...]:
    return tuple(row[key] for row in rows if key in row)


def _extremes(gradient: Tensor, rows: int) -> Tensor:
    """Returns the smallest and largest nonzero value, and 1 if there are at most ``rows`` nonzero values, else 0."""
    flat = gradient.detach().double().flatten()
    used = flat != 0
    low = torch.where(used, flat, math.inf).min()
    high = torch.where(used, flat, -math.inf).max()
    return torch.stack([low, high, (used.sum() <= rows).double()])


def _loss_direction(op: str, extremes: Sequence[float]) -> int:
    """Returns 1 if a smaller result lowers the loss, -1 if a larger result does, 0 if it depends on the element.

    For log_softmax the direction is that of the negative log-likelihood. It is known only if at most one element in
    each row has a gradient.
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
    observes_every_step = True
    """``on_closed`` sets or removes the listener of the tape for the next step."""

    def __init__(self, tape: Tape, subject: LiveObjects) -> None:
        self._tape, self._subject = tape, subject
        path, last = [("", None), *(each for root in subject.roots[:1] for each in root.named_modules())][-1]
        path_of_last = path if isinstance(last, nn.Softmax | nn.Sigmoid) else None
        self._found = LossCalls(slot_of=tape.slot_of, is_live=True, last=path_of_last)
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
            if step.step <= EVERY_STEP_UNTIL:
                self._terms = len(terms_of(step))
            assert self._found.loop_signs is not None
            self._found.loop_signs.end_step(step)
            self._found.end_step()
            self._step = step.step
            known, self._certain = self._certain, self._found.certain
            self.urgent |= self._certain > known
        self._tape.listener = self._on_function if is_examined(step.step + 1) else None

    def values(self) -> Facts | None:
        """Returns the facts so far; None if there is nothing new. Only replays measure calls inside models."""
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
    """Returns the collected calls as LossFacts."""
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


Grads: TypeAlias = dict[str, Tensor | None]
MAX_TERMS = 8


@replay(TermsFacts, when="requested")
def loss_terms(session: ReplaySession) -> TermsFacts:
    """Returns the terms of the loss, computed in float32: without a loss scale, small terms would vanish in float16."""
    return terms_facts(session)


def terms_facts(session: ReplaySession) -> TermsFacts:
    """Returns the terms of the loss of the recorded step. Raises NotReplayable unless it is a sum of a few terms."""
    parts = terms_of(session.recorded_step)
    if not 2 <= len(parts) <= MAX_TERMS:
        raise NotReplayable("the loss is not a sum of a few terms")
    with session.live():
        grads = [_gradients(session, term) for term in parts]
    reached = [{n for n, g in each.items() if g is not None and bool((g != 0).any())} for each in grads]
    common = set.intersection(*reached)
    norms = [
        math.sqrt(sum(float(g.double().square().sum()) for n in common if (g := of_term[n]) is not None))
        for of_term in grads
    ]
    pairs = zip(parts, norms)
    return TermsFacts(
        tuple(TermFacts(t.name, t.weight, t.coefficient, abs(t.weight) * norm) for t, norm in pairs), len(common)
    )


def _gradients(session: ReplaySession, term: Term) -> Grads:
    change = Intervention(dtype="fp32")
    result = session.replayer.run(alone(session.recorded_step, term), change, upto="backward")
    for parameter in session.replayer.subject.parameters:
        parameter.grad = None
    if result.error is not None:
        raise result.error
    return result.grads


def alone(recorded: RecordedStep, term: Term) -> RecordedStep:
    """Returns the step up to its first backward pass, with one term as its loss."""
    end = next(n for n, each in enumerate(recorded.program) if isinstance(each, Backward))
    backward = recorded.program[end]
    assert isinstance(backward, Backward)
    # without ``loss += other``, which adds other terms in place to this one
    kept = [
        each
        for each in recorded.program[:end]
        if not (isinstance(each, Operation) and each.in_place and each.args[0] == Slot(term.slot))
    ]
    program = [*kept, replace(backward, slot=term.slot, scale_at=1.0, gradient=None)]
    return replace(recorded, program=program, values={k: v for k, v in recorded.values.items() if k != "carried"})
