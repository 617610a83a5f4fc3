"""Divides the layers of a model by a plan that is not ours, and tries whether it still trains the same.

A plan that names too little can compute the right outputs with wrong gradients: of a norm over the heads of a rank,
each rank would have a part. So loss and gradients of two samples are compared with those of the whole model.
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

MAX_POSITIONS_TRIED = 16
FEW_ROUNDINGS = 1000
"""Times the distance of two neighbouring numbers that a norm may differ by: the order of sums is another."""
NOISE = 1e-4
"""Gradients this much smaller than the largest one are rounding alone."""


class LossAndNorms(NamedTuple):
    """The loss, and the norm of the gradient of each parameter by its name."""

    loss: float
    norms: Mapping[str, float]


def divide_and_try(model: nn.Module, divide: Callable[[], None], loss_fn: LossFn, batch: Any, ranks: int) -> None:
    """Divides the model. All ranks must call it together. Raises UsageError where loss or gradients are others then."""
    batch = _short(batch, ranks)
    with _without_zeros(model):
        whole = _try(model, loss_fn, batch)
        divide()
        try:
            divided = _try(model, loss_fn, batch)
        except UsageError:
            raise
        except Exception as error:
            raise _refused(f"the divided layers cannot be computed: {text_of(error, lines=1)}") from error
    _require_same(whole, divided, max(torch.finfo(each.dtype).eps for each in model.parameters()))


def _try(model: nn.Module, loss_fn: LossFn, batch: Any) -> LossAndNorms:
    norms: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def note(parameter: Tensor) -> None:
        """At once, so that not all gradients of the whole model are held."""
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
    limit = FEW_ROUNDINGS * eps
    if not abs(divided.loss - whole.loss) <= limit * max(abs(whole.loss), NOISE):
        raise _refused(f"the loss of two samples is {divided.loss:.6g}, and {whole.loss:.6g} of the whole model")
    least = NOISE * max(whole.norms.values(), default=0.0)
    for name, norm in whole.norms.items():
        found = divided.norms.get(name, 0.0)
        if not abs(found - norm) <= limit * max(norm, least):
            raise _refused(f"the gradient of {name} has the norm {found:.4g}, and {norm:.4g} in the whole model")


def _refused(why: str) -> UsageError:
    return UsageError(
        f"parallel.plan would train something else: {why}",
        remedy="name what lies between divided layers, too: a row layer behind each column layer, per_head for norms "
        "of heads; or leave those modules out, or use parallel.shard",
    )


def _short(batch: Any, ranks: int) -> Any:
    """With fewer positions, where all tensors have as many."""
    widths = {each.shape[1] if each.dim() > 1 else 0 for each in tree_leaves(batch) if isinstance(each, Tensor)}
    width = widths.pop() if len(widths) == 1 else 0
    count = min(width, max(MAX_POSITIONS_TRIED, ranks)) // ranks * ranks
    is_of_ids = not any(each.is_floating_point() for each in tree_leaves(batch) if isinstance(each, Tensor))
    return tree_map_only(Tensor, lambda each: each[:, :count], batch) if count and is_of_ids else batch


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Weights that are zero are not, alike on all ranks: what they scale would not show."""
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
