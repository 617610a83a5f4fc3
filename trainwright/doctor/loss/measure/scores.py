"""How a loss is computed: the arguments of each standard loss and softmax of a step, and the sign of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from trainwright.recorder.program import RecordedStep, constants_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.classified import CHUNKED, CLASSIFYING, Classified, classified
from trainwright.replay.experiments import experiment
from trainwright.replay.inspector import StepInspector
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import terms_of
from trainwright.runlog.json_values import Facts

Grads: TypeAlias = dict[str, Tensor | None]
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
"""Losses with a lower bound that are better when they are smaller: nobody maximises one."""
ABOVE = 1e-3
"""What the logarithm of a probability, and a trifle that keeps it finite, is at most."""
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


def class_dim(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> int:
    """The class dimension of the first argument of a loss or a softmax."""
    if name in CLASSES:
        return min(CLASSES[name], x.dim() - 1)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if isinstance(dim, int) else -1


class LossCalls:
    """Collects the arguments of loss functions, and the gradient of the loss at what they return.

    ``stack`` holds the paths of the modules that run, outermost first.
    """

    def __init__(self, stack: Sequence[str] = ()) -> None:
        self.stack = stack
        self.calls: list[Facts] = []
        self.outer: list[Facts] = []
        self.drawn = False
        self._kept: list[Tensor] = []  # so that no id is used again
        self._raised: set[int] = set()
        self._residuals: set[int] = set()
        self._probabilities: dict[int, str | None] = {}  # the path of the module that made them; None: of none

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return id(tensor)

    def returned(self, path: str, module: nn.Module, output: object) -> None:
        """A module has returned ``output``."""
        if isinstance(output, Tensor) and isinstance(module, nn.Softmax | nn.Sigmoid):
            self._probabilities[self._keep(output)] = path

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        self.drawn |= name in SAMPLES
        if not isinstance(result, Tensor) or not args:
            return
        plain = name.strip("_")
        if plain in PAIRED:
            self._note_outer(plain, args, kwargs, result)
        if name in ("softmax", "sigmoid"):
            self._probabilities[self._keep(result)] = self.stack[-1] if self.stack else None
        if not self.stack:
            self._note_residual(name, plain, args, result)
        if name in BOUNDED or name in ("softmax", "log_softmax"):
            self._note_loss(name, args, kwargs, result)

    # two shapes that should be equal

    def _note_outer(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        """A column and a row of as many samples broadcast to a square, which nobody intends."""
        pair = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
        named = name.endswith("_loss")
        if len(pair) < 2 or pair[0].dim() == pair[1].dim() or (self.stack and not named):
            return
        low, high = sorted(pair, key=lambda each: each.dim())
        if low.dim() > 1 and high._base is not None and high._base.dim() < high.dim():
            return  # rows of several columns, to which a view of the data has added a dimension: pairs on purpose
        if not low.dim() or low.shape[0] != high.shape[0] or low.shape[0] < 2:
            return
        count = math.prod(torch.broadcast_shapes(low.shape, high.shape))  # type: ignore[no-untyped-call]
        one_learns = low.requires_grad != high.requires_grad
        if count <= max(low.numel(), high.numel()) or not one_learns:
            return
        if named or not self._raised.intersection((id(low), id(high))):
            shapes = [list(each.shape) for each in pair]
            self.outer.append({"op": name, "shapes": shapes, "terms": count, "samples": int(low.shape[0])})

    def _note_residual(self, name: str, plain: str, args: Args, result: Tensor) -> None:
        if name in RAISES:
            self._raised.add(self._keep(result))
        if plain in ("sub", "rsub") and sum(isinstance(e, Tensor) and e.requires_grad for e in args) == 1:
            others = [e for e in args if isinstance(e, Tensor) and not e.requires_grad and e.numel() > 1]
            if others:
                self._residuals.add(self._keep(result))
        even = name != "pow" or (len(args) > 1 and args[1] == 2)
        if name in SQUARES and even and id(args[0]) in self._residuals and result.requires_grad:
            self._note_gradient({"op": "squared error" if name != "abs" else "absolute error"}, result)

    # the arguments of each loss

    def _note_loss(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        arguments = dict(zip(("input", "target"), args)) | kwargs
        x, target = arguments.get("input"), arguments.get("target")
        if not isinstance(x, Tensor) or not x.requires_grad or not x.numel():
            return
        facts: Facts = {"op": name, "shape": list(x.shape), "module": self.stack[-1] if self.stack else None}
        loss = classified(name, args, kwargs) if isinstance(target, Tensor) or name == CHUNKED else None
        if loss is not None and name == CHUNKED:  # its input is hidden states; its head makes the scores
            facts["shape"] = [len(loss.target), loss.classes]
        if name in CLASSES or name.endswith("softmax"):
            facts["simplex"] = is_simplex(x, class_dim(name, x, args, kwargs))
        if name == "binary_cross_entropy_with_logits":
            facts["squashed"] = bool(made_by(x, ("SigmoidBackward0", "SoftmaxBackward0")))
        if facts.get("simplex") or facts.get("squashed"):
            made_in = self._probabilities.get(id(x))
            facts["made_in"] = self._through_views(x) if made_in is None else made_in
        if name == "nll_loss":
            facts["above_0"] = float((x.detach() > ABOVE).double().mean())
        if loss is not None and x.dim() == 2 and len(loss.target):
            facts |= _accuracy(loss)
        if name.startswith("binary") and isinstance(target, Tensor) and target.numel():
            facts |= {"target_min": float(target.min()), "target_max": float(target.max())}
        if name != "softmax":
            self._note_gradient(facts, result)
        elif facts["simplex"]:
            self.calls.append(facts)

    def _through_views(self, x: Tensor) -> str | None:
        """The module that computed the probabilities that ``x`` is a view of."""
        wanted = made_by(x, ("SigmoidBackward0", "SoftmaxBackward0"))
        matching = (each for each in self._kept if each.grad_fn is not None and each.grad_fn is wanted)
        return next((self._probabilities.get(id(each)) for each in matching), None)

    def _note_gradient(self, facts: Facts, result: Tensor) -> None:
        """Adds whether a smaller (1) or larger (-1) ``result`` makes the loss smaller."""
        self.calls.append(facts)

        def hook(gradient: Tensor) -> None:
            facts["wants"] = wants(facts["op"], gradient)

        if result.requires_grad:
            result.register_hook(hook)  # type: ignore[no-untyped-call]


class _Losses(StepInspector):
    """The same in a replay."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.found = LossCalls(self.stack)

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        self.found.returned(path, module, output)

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        self.found.on_function(name, args, kwargs, result)


def _accuracy(loss: Classified) -> dict[str, float]:
    """How often the class with the highest score is right, and the mean of its probability."""
    at = loss.sample()
    scores = loss.scores(at).float()
    sure, predicted = (scores.exp() if loss.name == "nll_loss" else scores.softmax(1)).max(1)
    return {"right": float((predicted == loss.target[at]).double().mean()), "sure": float(sure.mean())}


def wants(op: str, gradient: Tensor) -> int:
    """The sign of a gradient that has nearly the same value at all elements; 0 for any other gradient.

    1: a smaller result makes the loss smaller; -1: a larger one does. For log_softmax only a likelihood counts, of
    which at most one element in each row has a gradient; its sign is that of the negative log-likelihood.
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
    """The mean of ``result`` weighted by the absolute gradient; for log_softmax the negative log-likelihood."""
    weight = gradient.detach().double().abs()
    value = float((result.detach().double() * weight).sum() / weight.sum().clamp(min=1e-300))
    return -value if op == "log_softmax" else value


_MOVES = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Permute", "Slice", "Select", "Transpose", "TBackward", "ToCopy",
    "Clone", "Alias", "UnsafeView", "Index", "Expand",
)  # fmt: skip


def made_by(x: Tensor, names: tuple[str, ...]) -> Node | None:
    """The node of the graph that computed ``x``, looking through views and copies, if it has one of these names."""
    node = x.grad_fn
    for _ in range(8):
        if node is None or type(node).__name__ in names:
            return node
        if not type(node).__name__.startswith(_MOVES) or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None


_PLAIN = ("Mul", "Div", "Neg", *_MOVES)
MOST_NODES = 24


def is_of_probabilities(x: Tensor) -> bool:
    """Whether what a softmax over the classes made was given another form by more than a factor: weighed by itself, or
    taken from 1.
    """
    waiting, seen = [(x.grad_fn, False)], 0
    while waiting and seen < MOST_NODES:
        (node, is_bent), seen = waiting.pop(0), seen + 1
        if node is None:
            continue
        name, before = type(node).__name__, [each for each, _ in node.next_functions if each is not None]
        if name in ("SoftmaxBackward0", "LogSoftmaxBackward0"):
            if is_bent and node._saved_dim in (1, 1 - x.dim(), 2**64 - x.dim() + 1):  # type: ignore[attr-defined]
                return True
            continue
        waiting += [(each, is_bent or len(before) > 1 or not name.startswith(_PLAIN)) for each in before]
    return False


@experiment("loss", when="checkup", steps=1.4, value=4.0)
def loss(session: ReplaySession) -> Facts:
    """The losses and softmaxes of the step with their arguments, shapes that broadcast, and the number of terms."""
    inspector = _Losses(session)
    with session.live():
        result = inspector.run()
    reached = sum(gradient is not None for gradient in result.grads.values())
    are_rivals = len(session.roots) > 1 or len(session.optimizers) > 1
    return facts_of(inspector.found, session.recorded_step, reached, are_rivals)


def facts_of(found: LossCalls, step: RecordedStep, reached: int, are_rivals: bool) -> Facts:
    """``reached`` parameters have a gradient; ``are_rivals``: there are several models or optimizers."""
    inputs = [each.tensor for call in step.calls for each in constants_of((call.args, call.kwargs))]
    return {
        "reached": reached,
        "given": found.calls[:32],
        "outer": found.outer[:4],
        "drawn": found.drawn,
        "terms": len(terms_of(step)),
        "rivals": are_rivals,
        "tokens": any(_is_tokens(x) for x in inputs),
    }


def _is_tokens(x: Tensor) -> bool:
    return not x.is_floating_point() and x.dtype != torch.bool and x.dim() == 2 and x.shape[1] > 2


class _Values(StepInspector):
    """Collects the values of the standard losses of a step, whatever their sign in the total loss is."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.values: list[float] = []

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        counts = name in BOUNDED or name == "log_softmax" or name in SQUARES
        if not isinstance(result, Tensor) or not result.requires_grad or not counts or (name in SQUARES and self.stack):
            return

        def hook(gradient: Tensor) -> None:
            if wants(name, gradient):
                self.values.append(weighed(name, result, gradient))

        result.register_hook(hook)  # type: ignore[no-untyped-call]


def loss_course(session: ReplaySession, steps: int, *, lr: float = 1.0, sign: float = 1.0) -> list[float]:
    """The standard loss itself over updates on this batch alone, whatever sign it has in the total loss."""
    inspector = _Values(session)
    with session.live():
        for _ in range(steps):
            inspector.run("step", lr=lr, sign=sign)
    return inspector.values


@experiment("sign", when="requested", steps=16.0)
def sign(session: ReplaySession) -> Facts:
    """The standard loss itself over four updates on this batch: as it was, with a tenth of the learning rate, and with
    the sign of the gradient inverted as well.
    """
    return {
        "as_it_was": loss_course(session, 4),
        "tenth": loss_course(session, 4, lr=0.1),
        "turned": loss_course(session, 4, lr=0.1, sign=-1.0),
    }
