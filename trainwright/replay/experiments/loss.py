"""What a loss is made of: each standard loss and softmax of a step, what it was given, and which way it is pulled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.recorder.program import Backward, Operation, RecordedStep, Slot
from trainwright.replay.classified import CHUNKED, CLASSIFYING, Classified, classified
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of
from trainwright.replay.tour import Tour

BOUNDED = frozenset(
    [
        *CLASSIFYING,
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "soft_margin_loss",
        "ctc_loss",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
    ]
)
"""Losses that are good when they are small and have a least value: nobody wants one as large as it can be."""
SQUARES = frozenset({"pow", "square", "abs"})
PAIRED = frozenset({"sub", "rsub", "mul", "add", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
RAISES = frozenset({"unsqueeze", "__getitem__", "view", "reshape", "expand"})
CLASSES = {"cross_entropy": 1, "nll_loss": 1, "kl_div": -1}
"""The dimension of the classes in the first argument."""
SAMPLES = frozenset({"multinomial", "bernoulli", "poisson", "normal", "rand_like", "randn_like", "sample"})


def is_simplex(x: Tensor, dim: int) -> bool:
    """Whether all rows along ``dim`` are probabilities: none is negative, their sum is 1, they are not all the same."""
    if not x.is_floating_point() or not x.dim() or x.shape[dim] < 2 or x.numel() == 0:
        return False
    wide = x.detach().float()
    near = 1e-4 if x.dtype == torch.float32 else 2e-2
    return bool((wide >= 0).all()) and bool(((wide.sum(dim) - 1).abs() < near).all())


def class_dim(name: str, x: Tensor, args: Any, kwargs: Any) -> int:
    """Along which dimension of its first argument a loss or a softmax compares classes."""
    if name in CLASSES:
        return min(CLASSES[name], x.dim() - 1)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if isinstance(dim, int) else -1


class _Losses(Tour):
    """Writes down what loss functions are given, and the gradient of the loss at what they return."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.given: list[dict[str, Any]] = []
        self.outer: list[dict[str, Any]] = []
        self.drawn = False
        self._kept: list[Tensor] = []  # so that no id is given away twice
        self._raised: set[int] = set()
        self._residuals: set[int] = set()
        self._probabilities: dict[int, str] = {}

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return id(tensor)

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        if isinstance(output, Tensor) and isinstance(module, nn.Softmax | nn.Sigmoid):
            self._probabilities[self._keep(output)] = path

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        self.drawn |= name in SAMPLES
        if not isinstance(result, Tensor) or not args:
            return
        plain = name.strip("_")
        if plain in PAIRED:
            self._note_outer(plain, args, kwargs, result)
        if name in ("softmax", "sigmoid"):
            self._probabilities[self._keep(result)] = self.stack[-1] if self.stack else ""
        if not self.stack:
            self._note_residual(name, plain, args, result)
        if name in BOUNDED or name in ("softmax", "log_softmax"):
            self._note_loss(name, args, kwargs, result)

    # two shapes that should have been one

    def _note_outer(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """A column against a row of as many samples gives a square, and nobody asked for one."""
        pair = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
        named = name.endswith("_loss")
        if len(pair) < 2 or pair[0].dim() == pair[1].dim() or (self.stack and not named):
            return
        low, high = sorted(pair, key=lambda each: each.dim())
        if not low.dim() or low.shape[0] != high.shape[0] or low.shape[0] < 2:
            return
        count = math.prod(torch.broadcast_shapes(low.shape, high.shape))  # type: ignore[no-untyped-call]
        one_learns = low.requires_grad != high.requires_grad
        if count <= max(low.numel(), high.numel()) or not one_learns:
            return
        if named or not self._raised.intersection((id(low), id(high))):
            shapes = [list(each.shape) for each in pair]
            self.outer.append({"op": name, "shapes": shapes, "terms": count, "samples": int(low.shape[0])})

    def _note_residual(self, name: str, plain: str, args: Any, result: Tensor) -> None:
        if name in RAISES:
            self._raised.add(self._keep(result))
        if plain in ("sub", "rsub") and sum(isinstance(e, Tensor) and e.requires_grad for e in args) == 1:
            others = [e for e in args if isinstance(e, Tensor) and not e.requires_grad and e.numel() > 1]
            if others:
                self._residuals.add(self._keep(result))
        even = name != "pow" or (len(args) > 1 and args[1] == 2)
        if name in SQUARES and even and id(args[0]) in self._residuals and result.requires_grad:
            self._ask({"op": "squared error" if name != "abs" else "absolute error"}, result)

    # what each loss was given

    def _note_loss(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        given = dict(zip(("input", "target"), args)) | kwargs
        x, target = given.get("input"), given.get("target")
        if not isinstance(x, Tensor) or not x.requires_grad or not x.numel():
            return
        told: dict[str, Any] = {"op": name, "shape": list(x.shape), "module": self.stack[-1] if self.stack else ""}
        one = classified(name, args, kwargs) if isinstance(target, Tensor) or name == CHUNKED else None
        if one is not None and name == CHUNKED:  # scores made by the head in it are no probabilities
            told["shape"] = [len(one.target), one.classes]
        if name in CLASSES or name.endswith("softmax"):
            told["simplex"] = is_simplex(x, class_dim(name, x, args, kwargs))
        if name == "binary_cross_entropy_with_logits":
            told["squashed"] = bool(_made_by(x, ("SigmoidBackward0", "SoftmaxBackward0")))
        if told.get("simplex") or told.get("squashed"):
            told["made_in"] = self._probabilities.get(id(x), "") or self._through_views(x)
        if name == "nll_loss":
            told["above_0"] = float((x.detach() > 0).double().mean())
        if one is not None and x.dim() == 2 and len(one.target):
            told |= _guessed(one)
        if name.startswith("binary") and isinstance(target, Tensor) and target.numel():
            told |= {"target_min": float(target.min()), "target_max": float(target.max())}
        if name != "softmax":
            self._ask(told, result)
        elif told["simplex"]:
            self.given.append(told)

    def _through_views(self, x: Tensor) -> str:
        """Where the probabilities were made that ``x`` is a view of."""
        wanted = _made_by(x, ("SigmoidBackward0", "SoftmaxBackward0"))
        made = (each for each in self._kept if each.grad_fn is not None and each.grad_fn is wanted)
        return next((self._probabilities.get(id(each), "") for each in made), "")

    def _ask(self, told: dict[str, Any], result: Tensor) -> None:
        """Notes whether the loss wants ``result`` smaller (1) or larger (-1), and by one measure for all of it."""
        self.given.append(told)

        def hook(gradient: Tensor) -> None:
            told["wants"] = wants(told["op"], gradient)
            told["value"] = weighed(told["op"], result, gradient)

        if result.requires_grad:
            result.register_hook(hook)  # type: ignore[no-untyped-call]


def _guessed(one: Classified) -> dict[str, float]:
    """How often the class with the highest score is right, and the probability that is given to it."""
    at = one.sample()
    scores = one.scores(at).float()
    sure, named = (scores.exp() if one.name == "nll_loss" else scores.softmax(1)).max(1)
    return {"right": float((named == one.target[at]).double().mean()), "sure": float(sure.mean())}


def wants(op: str, gradient: Tensor) -> int:
    """1: the loss gets better where this one gets smaller, -1: where it gets larger, by one measure for all; else 0.

    Of log-probabilities it is about those that are picked, one in each row at most: a likelihood.
    """
    flat = gradient.detach().double().flatten()
    used = flat[flat != 0]
    if not len(used) or not bool(used.isfinite().all()):
        return 0
    low, high = float(used.min()), float(used.max())
    if low * high <= 0 or abs(high - low) > 1e-2 * abs(high):
        return 0
    if op == "log_softmax":
        rows = len(flat) // gradient.shape[-1] if gradient.dim() else 1
        return 0 if len(used) > rows else (-1 if low > 0 else 1)
    return 1 if low > 0 else -1


def weighed(op: str, result: Tensor, gradient: Tensor) -> float:
    """The mean of what counts in ``result``; of a likelihood its negative logarithm."""
    weight = gradient.detach().double().abs()
    value = float((result.detach().double() * weight).sum() / weight.sum().clamp(min=1e-300))
    return -value if op == "log_softmax" else value


_MOVES = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Permute", "Slice", "Select", "Transpose", "TBackward", "ToCopy",
    "Clone", "Alias", "UnsafeView", "Index", "Expand",
)  # fmt: skip


def _made_by(x: Tensor, names: tuple[str, ...]) -> Any:
    """The node of the graph that made ``x``, through views and copies, if it has one of these names."""
    node: Any = x.grad_fn
    for _ in range(8):
        if node is None or type(node).__name__ in names:
            return node
        if not type(node).__name__.startswith(_MOVES) or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None


@experiment("loss", when="checkup")
def loss(bench: ReplaySession) -> dict[str, Any]:
    """The losses and softmaxes of the step with what each was given, shapes that broadcast, the terms."""
    tour = _Losses(bench)
    with bench.live():
        played = tour.go()
    return {
        "reached": sum(gradient is not None for gradient in played.grads.values()),
        "given": tour.given[:32],
        "outer": tour.outer[:4],
        "drawn": tour.drawn,
        "terms": len(terms_of(bench.segment)),
        "rivals": len(bench.roots) > 1 or len(bench.optimizers) > 1,
        "tokens": any(_is_tokens(x) for x in bench.inputs),
        "fed": any(ids is not None for ids in bench.ids),
    }


def _is_tokens(x: Tensor) -> bool:
    return not x.is_floating_point() and x.dtype != torch.bool and x.dim() == 2 and x.shape[1] > 2


class _Values(Tour):
    """Follows what the loss is made of through a training: each value as it would be without a sign turned."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.values: list[float] = []

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        op = "log_softmax" if name == "log_softmax" else name
        counts = name in BOUNDED or op == "log_softmax" or name in SQUARES
        if not isinstance(result, Tensor) or not result.requires_grad or not counts or (name in SQUARES and self.stack):
            return

        def hook(gradient: Tensor) -> None:
            if wants(op, gradient):
                self.values.append(weighed(op, result, gradient))

        result.register_hook(hook)  # type: ignore[no-untyped-call]


def followed(bench: ReplaySession, steps: int, **edit: Any) -> list[float]:
    """The standard loss itself over updates on this batch alone, whatever sign backward was given."""
    tour = _Values(bench)
    with bench.live():
        for _ in range(steps):
            tour.go("step", **edit)
    return tour.values


@experiment("sign", when="asked")
def sign(bench: ReplaySession) -> dict[str, Any]:
    """The standard loss itself over a few updates on this batch: as it was, with a tenth of the rate, sign turned."""
    return {
        "as_it_was": followed(bench, 4),
        "tenth": followed(bench, 4, lr=0.1),
        "turned": followed(bench, 4, lr=0.1, sign=-1.0),
    }


@experiment("terms", when="asked")
def terms(bench: ReplaySession) -> dict[str, Any]:
    """The terms whose sum the loss is: the weight of each, and the norm of its gradient with that weight.

    ``shared`` is the norm over the parameters that every term reaches. In fp32: a term that is small without the loss
    scale must not vanish here.
    """
    found = terms_of(bench.segment)
    if not 2 <= len(found) <= 8:
        raise NotReplayable("the loss is not a sum of a few terms")
    grads = []
    with bench.live():
        for term in found:
            played = bench.player.play(alone(bench.segment, term), Intervention(dtype="fp32"), upto="backward")
            if played.error is not None:
                raise played.error
            grads.append((float(played.losses[-1]), played.grads))
            for parameter in bench.player.subject.parameters:
                parameter.grad = None
    reached = [{n for n, g in each.items() if g is not None and bool((g != 0).any())} for _, each in grads]
    common = set.intersection(*reached)
    told = []
    for term, (value, each) in zip(found, grads):
        told.append({
            "name": term.name, "weight": term.weight, "own": term.own, "value": value, "slot": term.slot,
            "norm": abs(term.weight) * _norm(each, set(each)), "shared": abs(term.weight) * _norm(each, common),
        })  # fmt: skip
    return {"terms": told, "shared": len(common)}


def alone(segment: RecordedStep, term: Term) -> RecordedStep:
    """The step with one term as its loss, up to the first backward pass."""
    end = next(n for n, each in enumerate(segment.program) if isinstance(each, Backward))
    backward = segment.program[end]
    assert isinstance(backward, Backward)
    kept = [each for each in segment.program[:end] if not _adds_to(each, term)]
    program = [*kept, replace(backward, slot=term.slot, scale_at=1.0, gradient=None)]
    return replace(segment, program=program, values={k: v for k, v in segment.values.items() if k != "carried"})


def _adds_to(each: Any, term: Term) -> bool:
    """``loss += other``: the other terms are written into the first one."""
    return isinstance(each, Operation) and each.in_place and each.args[0] == Slot(term.slot)


def _norm(grads: dict[str, Tensor | None], names: set[str]) -> float:
    chosen = [g.double().square().sum() for n, g in grads.items() if g is not None and n in names]
    return float(torch.stack(chosen).sum().sqrt()) if chosen else 0.0
