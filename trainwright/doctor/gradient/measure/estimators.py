"""Finds functions of torch that pass a gradient where they have no slope: straight-through estimators."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.recorder.program import mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name

NUDGE = 1e-6
"""Of the root mean square of an input: in float64 hardly ever enough to change a choice."""
FLAT = 0.01
"""Of the change that the gradient foretells: a function that changes less has no slope where it has a gradient."""


class StraightThrough:
    """Calls torch functions, and notes those whose result stands still while their gradient says that it moves.

    What a function of torch does within itself is not seen from outside: a detach in the hard ``gumbel_softmax``, the
    backward pass of a fake quantisation. A call that may write to what it is given is left alone.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def __call__(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        leaves = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad and t.is_floating_point()]
        if not leaves or name.endswith("_") or "out" in kwargs or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        changes = {id(t): NUDGE * t.detach().square().mean().sqrt() * _signs(t) for t in leaves}

        def nudged(leaf: object) -> object:
            return leaf.detach() + changes[id(leaf)] if isinstance(leaf, Tensor) and id(leaf) in changes else leaf

        with torch.random.fork_rng(), torch.no_grad():
            moved = function(*mapped(args, nudged), **mapped(kwargs, nudged))
        result = function(*args, **kwargs)
        is_known = isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad
        if is_known and isinstance(moved, Tensor) and _stands(result, moved, leaves, changes):
            self.found[name] = None
        return result


def _signs(tensor: Tensor) -> Tensor:
    """Plus and minus one by turns, so that nothing cancels that is the same for all elements."""
    signs = 1.0 - 2.0 * (torch.arange(tensor.numel(), device=tensor.device) % 3 == 0).to(tensor.dtype)
    return signs.view(tensor.shape)


def _stands(result: Tensor, moved: Tensor, leaves: list[Tensor], changes: dict[int, Tensor]) -> bool:
    """Whether a weighted sum of the result changes by far less than its gradient foretells."""
    weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)
    grads = torch.autograd.grad(result, leaves, weights, retain_graph=True, allow_unused=True)
    foretold = sum(float((g * changes[id(t)]).sum()) for t, g in zip(leaves, grads) if g is not None)
    return abs(float((weights * (moved - result.detach())).sum())) < FLAT * abs(foretold)
