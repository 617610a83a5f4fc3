"""The arguments of a loss function, and others in their place: blank, constant, shuffled and better predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainwright.engine.chunked import IGNORE
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name

CLASSES = frozenset({"cross_entropy", "nll_loss"})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
RESIDUALS = frozenset({"sub", "rsub", "__sub__", "__rsub__"})
"""A difference outside of the models, of a prediction and a target, stands for the square of it."""
FEW = 8
"""Targets of which each column gets a mean of its own."""
SURE = 30.0
"""The logit of a probability that is as good as 1."""


@dataclass(frozen=True)
class ComparedLoss:
    """One call: the function, its prediction ``x`` and its ``target``, and its other arguments.

    ``of_distances``: the prediction is made of sums of squares.
    """

    name: str
    function: TorchFunction
    x: Tensor
    target: Tensor
    rest: Kwargs
    of_distances: bool = False

    def value(self, x: Tensor, target: Tensor) -> float:
        """The mean of what the function returns for these."""
        if self.name in RESIDUALS:
            return float((x.double() - target.double()).square().mean())
        return float(self.function(x, target, **self.rest).double().mean())

    @property
    def classes(self) -> int:
        """Classes of a loss over classes."""
        return int(self.x.shape[1 if self.x.dim() > 1 else 0])

    @property
    def is_hard(self) -> bool:
        """Whether targets are numbers of classes."""
        return self.name in CLASSES and not self.target.is_floating_point()

    def valid(self) -> Tensor:
        """The targets that count, flat."""
        flat = self.target.detach().flatten()
        return flat[flat != self.rest.get("ignore_index", IGNORE)] if self.is_hard else flat

    @property
    def is_weighted_by_the_loop(self) -> bool:
        """Whether the loop makes one number of what the function returns for each target, and may leave some out."""
        return self.name in RESIDUALS or self.rest.get("reduction") == "none"

    def of_those(self, counts: Tensor) -> ComparedLoss:
        """The same of those targets alone that count. ``counts``: of each element of the prediction."""
        has_weights = self.name not in CLASSES and self.rest.get("weight") is not None
        if bool(counts.all()) or not counts.any() or has_weights:
            return self
        x, target = self.x.detach(), self.target.detach()
        if self.name in CLASSES:
            rows = counts.any(1)
            return replace(
                self, x=x.movedim(1, -1)[rows], target=(target if self.is_hard else target.movedim(1, -1))[rows]
            )
        return replace(self, x=x[counts], target=target[counts])

    # other predictions

    def blank(self) -> Tensor:
        """Outputs of 0; of log-probabilities and probabilities all the same."""
        x = self.x.detach()
        if self.name == "nll_loss":
            return torch.full_like(x, -torch.tensor(float(self.classes), device="cpu").log().item())
        return torch.full_like(x, 0.5 if self.name == "binary_cross_entropy" else 0.0)

    def of_constant(self) -> float:
        """The loss of the best prediction that is the same for all samples, without what it gains by being fitted."""
        constant, factor, more = self._constant()
        return factor * self.value(constant, self.target.detach()) + more

    def of_smoothed(self) -> tuple[float, float]:
        """The loss of a perfect prediction, the entropy of a smoothed target, and that of equal shares; else 0, 0."""
        share = float(self.rest.get("label_smoothing", 0.0)) / self.classes if self.is_hard else 0.0
        right = 1.0 - (self.classes - 1) * share
        if not share or right >= 1.0:
            return 0.0, 0.0
        return -right * math.log(right) - (self.classes - 1) * share * math.log(share), math.log(self.classes)

    def of_best_within(self, low: float, high: float) -> float:
        """The loss of the best logits between these bounds: ``high`` where the target is, ``low`` elsewhere."""
        high = min(high, low + SURE)
        if self.is_hard:
            best = torch.full_like(self.x.detach(), low)
            best.scatter_(1, self.target.detach().clamp(0, self.classes - 1).unsqueeze(1), high)
            return self.value(best, self.target.detach())
        return self.value((low + (high - low) * self.target.detach()).to(self.x), self.target.detach())

    def mass(self) -> float:
        """How far the exponentials of the prediction add up to another sum than 1 over the classes, median of rows."""
        return float((self.x.detach().double().logsumexp(1).exp() - 1).abs().flatten().median())

    def of_shuffled(self) -> float:
        """The loss with the targets in another order, the mean of two."""
        return sum(self.value(self.x.detach(), self._shuffled(seed)) for seed in (0, 1)) / 2

    @property
    def varies(self) -> bool:
        """Whether there are several targets, and not all the same."""
        valid = self.valid()
        return len(self.target) > 1 and len(valid) > 1 and bool((valid != valid[0]).any())

    def _constant(self) -> tuple[Tensor, float, float]:
        """The best prediction without inputs; by what factor and what sum its loss is too low, as it was fitted."""
        x, count = self.x.detach(), max(2, self.target.shape[0] if self.target.dim() else 1)
        if self.is_hard:
            counts = torch.bincount(self.valid().clamp(0, self.classes - 1), minlength=self.classes).to(x)
            logs = (counts / counts.sum().clamp(min=1)).clamp(min=1e-9).log()
            seen, total = int((counts > 0).sum()), max(1, int(counts.sum()))
            return self._over_classes(logs), 1.0, (seen - 1) / (2 * total)
        if self.name in CLASSES:
            return self._over_classes(self.target.detach().double().mean(0).clamp(min=1e-9).log().to(x)), 1.0, 0.0
        each = self.target.dim() == 2 and count >= FEW
        target = self.target.detach().double()
        mean = target.mean(0, keepdim=True) if each else target.mean()
        if self.name in BINARY:
            mean = mean.clamp(1e-6, 1 - 1e-6)
            mean = mean.logit() if self.name.endswith("logits") else mean
        return mean.to(x).expand_as(x).clone(), count / (count - 1), 0.0

    def _over_classes(self, logs: Tensor) -> Tensor:
        shape = [1] * self.x.dim()
        shape[1 if self.x.dim() > 1 else 0] = self.classes
        return logs.reshape(shape if logs.dim() == 1 else logs.shape).expand_as(self.x).clone()

    def _shuffled(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.target.shape[0], generator=generator, device="cpu").to(self.target.device)
        return self.target.detach()[order]

    def nearer(self, step: float) -> Tensor:
        """The prediction moved towards the target, so that this loss falls to first order; in float32 at least.

        In bf16 a small step would be lost in rounding.
        """
        x, target = self.x.to(torch.promote_types(self.x.dtype, torch.float32)), self.target.detach()
        if self.is_hard:
            at = target.clamp(0, self.classes - 1)
            one_hot = torch.nn.functional.one_hot(at.long(), self.classes).movedim(-1, 1 if x.dim() > 1 else 0)
            return x + step * one_hot.to(x)
        if self.name in CLASSES:
            return x + step * (target - x.detach().softmax(1))
        if self.name.endswith("logits"):
            return x + step * (target - x.detach().sigmoid())
        return x + step * (target - x.detach())


def compared(function: TorchFunction, args: Args, kwargs: Kwargs, *, outside: bool) -> ComparedLoss | None:
    """A call that compares a prediction with a target; None for any other. ``outside``: of all modules."""
    name = function_name(function)
    if name in RESIDUALS:
        return _residual(name, function, args) if outside else None
    if name not in CLASSES | BINARY | DISTANCES:
        return None
    given = dict(zip(("input", "target", "weight"), args)) | kwargs
    x, target = given.pop("input", None), given.pop("target", None)
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or len(args) > 3 or not x.numel():
        return None
    if not target.dim() or (name not in CLASSES and x.shape != target.shape):
        return None  # one that broadcasts has a name of its own
    if name in CLASSES and x.dim() < 2:
        return None
    return ComparedLoss(name, function, x, target, given)


def _residual(name: str, function: TorchFunction, args: Args) -> ComparedLoss | None:
    tensors = [each for each in args if isinstance(each, Tensor)]
    if len(tensors) != 2 or tensors[0].shape != tensors[1].shape or not tensors[0].dim():
        return None
    learning = [each for each in tensors if each.requires_grad]
    fixed = [each for each in tensors if not each.requires_grad and each.is_floating_point()]
    if len(learning) != 1 or len(fixed) != 1 or fixed[0].numel() < 2:
        return None
    return ComparedLoss(name, function, learning[0], fixed[0], {})
