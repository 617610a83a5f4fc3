"""The loss of one part of every sequence, for ranks that divide sequences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from trainwright.engine.loss import Batch, Loss, LossFn, as_loss_fn
from trainwright.errors import UsageError


def loss_of_part(loss: Callable[..., Loss | Tensor], cut: Callable[[Tensor], Tensor]) -> LossFn:
    """Return the loss on full batches (ids_BT, target_BT): the model computes its part, ``cut`` selects that of the
    target.
    """
    loss_fn = as_loss_fn(loss)

    def of_part(model: nn.Module, batch: Batch) -> Loss | Tensor:
        *inputs, target = batch
        made = loss_fn(model, (*inputs, cut(target)))
        if isinstance(made, Tensor):
            raise UsageError(
                "parallel.context: the loss returns a mean, which hides the number of counted positions",
                remedy="return tw.Loss(total, weight), with the number of positions that count",
            )
        return made

    return of_part
