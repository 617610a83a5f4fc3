"""Differences that become scores: a logit less a constant is none of a prediction and its target."""

from __future__ import annotations

from torch import Tensor

from trainwright.doctor.loss.measure.comparing import BINARY, CLASSES, RESIDUALS, ComparedLoss
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name

OF_SCORES = CLASSES | BINARY | {"softmax", "log_softmax", "logsumexp", "sigmoid", "logsigmoid", "argmax", "multinomial"}


class ScoredDifferences:
    """Follows differences through the functions that are called on them. ``found``: ids of those that reach a function
    of scores.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self._made_of: dict[int, tuple[Tensor, set[int]]] = {}

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
        given = [self._made_of[id(each)] for each in tensors_of((args, kwargs)) if id(each) in self._made_of]
        calls = set[int]().union(*(numbers for _, numbers in given))
        if function_name(function) in OF_SCORES:
            self.found |= calls
        elif calls:
            self._made_of |= {id(made): (made, calls) for made in tensors_of(result)}
        return result
