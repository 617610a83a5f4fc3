"""What becomes of a difference, and what scores are made of: by the functions that are called on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.doctor.loss.measure.comparing import BINARY, CLASSES, RESIDUALS, ComparedLoss
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name

OF_SCORES = CLASSES | BINARY | {"softmax", "log_softmax", "logsumexp", "sigmoid", "logsigmoid", "log_sigmoid"}
OF_SCORES |= {"argmax", "multinomial"}
MONOTONE = OF_SCORES | {"softplus", "relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "exp", "expm1", "log", "log1p"}
MONOTONE |= {"clamp", "clip", "clamp_min", "clamp_max", "erf", "erfc", "sign", "logaddexp"}
"""What one side of a difference is to become large by, or small: there is nothing that both should be equal at."""
EVEN = frozenset({"square", "pow", "abs", "absolute", "norm", "linalg_norm", "linalg_vector_norm", "vector_norm"})
EVEN |= {"cosh", "maximum", "max", "where", "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
"""What makes a distance of a difference, that of a quantile among them."""
BILINEAR = frozenset({"matmul", "bmm", "einsum", "dot", "mv", "mm", "inner", "vdot"})
SUMS = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub", "neg", "negative", "mean", "sum", "stack", "cat"})
PRODUCTS = frozenset({"mul", "rmul", "imul", "multiply", "div", "divide", "truediv", "itruediv"})
VIEWS = frozenset(
    {"float", "double", "to", "type", "squeeze", "unsqueeze", "view", "reshape", "flatten", "getitem", "contiguous"}
)
SQUARES = frozenset({"square", "pow", "abs", "absolute"})
DISTANCES = frozenset({"cdist"})


class FollowedDifferences:
    """Follows differences through the functions that are called on them, up to the loss.

    A difference is a distance where its square or its size is taken. A logit less a constant becomes a score; of what
    is bent to one side, as by a hinge, or of what the loss is a linear function of, as of a divergence less a
    likelihood, there is nothing that the one should be equal to.
    """

    def __init__(self) -> None:
        self._scored: set[int] = set()
        self._bent: set[int] = set()
        self._made_of: dict[int, tuple[Tensor, set[int]]] = {}

    def is_distance(self, call: ComparedLoss) -> bool:
        """Whether a call compares a prediction with its target; of differences, once all functions were called."""
        return call.name not in RESIDUALS or (id(call) in self._bent and id(call) not in self._scored)

    def begin(self, call: ComparedLoss, result: object) -> object:
        """Follows the result of a call from here on where it is a difference."""
        if call.name in RESIDUALS and isinstance(result, Tensor):
            self._made_of[id(result)] = (result, {id(call)})
        return result

    def followed(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Calls a function."""
        result = function(*args, **kwargs)
        if not self._made_of:
            return result
        given = [each for each in tensors_of((args, kwargs)) if id(each) in self._made_of]
        calls = set[int]().union(*(self._made_of[id(each)][1] for each in given))
        if not calls:
            return result
        name, made = function_name(function).strip("_"), tensors_of(result)
        if function_name(function) in OF_SCORES:
            self._scored |= calls
            return result
        if any(each.requires_grad for each in made):
            self._scored |= calls - self._bent if name in MONOTONE else set()
            is_even = name in EVEN or (name in PRODUCTS | BILINEAR and len(given) > 1)
            is_chosen = name == "where" and not any(each.dtype == torch.bool for each in given)  # by something else
            self._bent |= calls if is_even and not is_chosen else set()
        self._made_of |= {id(each): (each, calls) for each in made}
        return result


class SummedSquares:
    """Follows sums of squares of what learns, as long as nothing but a linear function is taken of them.

    Scores that are distances have the size of the number of features, and not that of an output.
    """

    def __init__(self) -> None:
        self._squares: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def is_one(self, x: Tensor) -> bool:
        """Whether this is one, or a linear function of some."""
        return id(x) in self._sums

    def follow(self, function: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        """After each call of a function."""
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        name = function_name(function).strip("_")
        given = tensors_of((args, kwargs))
        squares, sums = (any(id(each) in of for each in given) for of in (self._squares, self._sums))
        learning = sum(each.requires_grad for each in given)
        if name in SQUARES:
            self._squares[id(result)] = result
        elif name in DISTANCES or (name == "sum" and squares):
            self._sums[id(result)] = result
        elif _is_linear(name, learning) and (squares or sums):
            of = self._sums if sums else self._squares
            of[id(result)] = result


def _is_linear(name: str, given: int) -> bool:
    """Whether a function is linear in what was made of differences. ``given``: how many such arguments it has."""
    return name in SUMS | VIEWS or (name in PRODUCTS and given == 1)
