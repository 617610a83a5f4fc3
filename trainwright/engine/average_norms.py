"""Measures the BatchNorm statistics of averaged weights with torch's ``update_bn``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from trainwright.checkpoint.average import Swa
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.shards import reshard
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.loss import Loss, LossFn, as_loss_fn, call_loss
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.user_log import LoggedMeans, collecting


def measure_norms_of(
    average: Swa,
    state: TrainState,
    loss: Callable[..., Loss | Tensor],
    batches: Iterable[StepBatch],
    *,
    precision: Precision = FP32,
    world: World = SOLO,
) -> bool:
    """Set the running statistics of BatchNorm to the mean over ``batches``, computed with the averaged weights.

    All micro-batches have the same weight. Each rank of ``world`` reads its part of the batches, and the result is the
    mean over ranks. BatchNorm layers in evaluation mode keep their statistics. Live weights, live statistics, other
    buffers and random generators stay unchanged. Costs one forward pass per micro-batch.

    Returns False, without measuring, if there is no batch.
    """
    roots = [root for root in (state.model, loss) if isinstance(root, nn.Module)]
    buffers = {id(buffer): buffer for root in roots for buffer in root.buffers()}.values()
    before = [buffer.clone() for buffer in buffers]
    norms = [norm for norm in average.norms.values() if norm.training]
    with torch.no_grad(), preserved_rng(), collecting(LoggedMeans()):  # reading the first batch may draw random numbers
        first = next(stream := iter(batches), None)
        if first is None:
            return False
        micro_batches = ((micro,) for batch in chain([first], stream) for micro in batch.micro if micro.size)
        with average.swapped():
            update_bn(micro_batches, _UpdateBnModule(state.model, norms, as_loss_fn(loss), precision))
            reshard(state.model)
            if world.size > 1:
                means = [b for norm in norms for b in norm.buffers() if b.is_floating_point()]
                world.sum_(means)
                torch._foreach_div_(means, float(world.size))
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    average.norms_are_current = True
    return True


class _UpdateBnModule(nn.Module):
    """The module passed to ``update_bn``. It exposes only the measured layers and ignores changes of mode."""

    def __init__(self, model: nn.Module, norms: Sequence[nn.Module], loss_fn: LossFn, precision: Precision) -> None:
        super().__init__()
        self._model, self._norms = (model,), norms
        self._loss_fn, self._precision = loss_fn, precision

    def modules(self, *_options: object, **_named_options: object) -> Iterator[nn.Module]:
        return iter(self._norms)

    def train(self, *_mode: bool, **_named_mode: bool) -> _UpdateBnModule:
        return self

    def forward(self, micro: MicroBatch) -> None:
        with self._precision.autocast():
            call_loss(self._loss_fn, self._model[0], micro, "the BatchNorm statistics of the average")
