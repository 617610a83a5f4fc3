"""Divides the layers of a model by a custom plan, and checks that it still trains the same.

An incomplete plan can compute correct outputs with wrong gradients. For example, each rank could have only a part of
the gradient of a norm over its heads. Loss and gradients of two samples are therefore compared with those of the full
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.checkpoint.rng import reseed
from trainwright.checkpoint.shards import is_divided
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loss import Loss, LossFn
from trainwright.errors import UsageError, text_of

CHECKED_POSITIONS = 16
MAX_DIFFERENCE_EPS = 1000
"""Maximum relative difference of norms, in units of the machine epsilon. Sums are computed in a different order."""
NOISE_RATIO = 1e-4
"""Gradients smaller than this fraction of the largest one are rounding errors."""


class LossAndNorms(NamedTuple):
    """The loss, and the norm of the gradient of each parameter by name."""

    loss: float
    norms: Mapping[str, float]


def divide_and_try(model: nn.Module, divide: Callable[[], None], loss_fn: LossFn, batch: Any, ranks: int) -> None:
    """Divide the model and check it. All ranks must call it. Raises UsageError if loss or gradients change."""
    batch = _shortened(batch, ranks)
    with _without_zeros(model):
        whole = _try(model, loss_fn, batch)
        divide()
        try:
            divided = _try(model, loss_fn, batch)
        except UsageError:
            raise
        except Exception as error:
            raise _rejection(f"the divided layers raise an error: {text_of(error, lines=1)}") from error
    _require_same(whole, divided, max(torch.finfo(each.dtype).eps for each in model.parameters()))


def _try(model: nn.Module, loss_fn: LossFn, batch: Any) -> LossAndNorms:
    norms: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def note(parameter: Tensor) -> None:
        """Record the norm and free the gradient at once, so that not all gradients of the full model are in memory."""
        gradient = parameter.grad
        if gradient is not None and not is_divided(gradient):
            norms[names[parameter]] = gradient.norm()  # type: ignore[index]
            parameter.grad = None

    handles = [each.register_post_accumulate_grad_hook(note) for each in names]  # type: ignore[no-untyped-call]
    try:
        with evaluating(model, loss_fn), torch.enable_grad():
            made = loss_fn(model, batch)
            total = made.total if isinstance(made, Loss) else made
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    for parameter, name in names.items():
        gradient = parameter.grad
        if gradient is not None and is_divided(gradient):
            norms[name] = gradient.full_tensor().norm()
        parameter.grad = None
    return LossAndNorms(float(total), {name: float(norm) for name, norm in norms.items()})


def _require_same(whole: LossAndNorms, divided: LossAndNorms, eps: float) -> None:
    if not math.isfinite(whole.loss):
        return
    limit = MAX_DIFFERENCE_EPS * eps
    if not abs(divided.loss - whole.loss) <= limit * max(abs(whole.loss), NOISE_RATIO):
        raise _rejection(f"the loss of two samples is {divided.loss:.6g}, and {whole.loss:.6g} in the full model")
    least = NOISE_RATIO * max(whole.norms.values(), default=0.0)
    for name, norm in whole.norms.items():
        found = divided.norms.get(name, 0.0)
        if not abs(found - norm) <= limit * max(norm, least):
            raise _rejection(f"the gradient of {name} has the norm {found:.4g}, and {norm:.4g} in the full model")


def _rejection(why: str) -> UsageError:
    return UsageError(
        f"parallel.plan would change the training: {why}",
        remedy="include the modules between divided layers: a row layer behind each column layer, per_head for norms "
        "of heads; or leave those modules out, or use parallel.shard",
    )


def _shortened(batch: Any, ranks: int) -> Any:
    """Return the batch with fewer positions, if it consists of token ids of equal length."""
    widths = {each.shape[1] if each.dim() > 1 else 0 for each in tree_leaves(batch) if isinstance(each, Tensor)}
    width = widths.pop() if len(widths) == 1 else 0
    count = min(width, max(CHECKED_POSITIONS, ranks)) // ranks * ranks
    is_of_ids = not any(each.is_floating_point() for each in tree_leaves(batch) if isinstance(each, Tensor))
    return tree_map_only(Tensor, lambda each: each[:, :count], batch) if count and is_of_ids else batch


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Replace zero weights by random ones, equal on all ranks, since zeros would hide errors in what they scale."""
    zeros = [name for name, each in model.named_parameters() if each.numel() and not each.any()]
    with torch.no_grad(), evaluating(model):
        reseed(0)
        for name in zeros:
            model.get_parameter(name).normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for name in zeros:
                model.get_parameter(name).zero_()
