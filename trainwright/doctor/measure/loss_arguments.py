"""Arguments of loss functions, and the loss of other predictions and targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import CHUNKED, classified

CLASSES = frozenset({"cross_entropy", "nll_loss", CHUNKED})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
SQUARED = "squared error"
MAX_ROWS = 256
MAX_COLUMNS = 1024
"""Maximum number of values per sample that are measured."""
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
