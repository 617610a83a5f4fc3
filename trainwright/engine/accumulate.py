"""Gradient accumulation that is exact for any split of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple, TypeVar

from torch import Tensor

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.shards import is_sharded
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Loss, LossFn, call_loss
from trainwright.engine.precision import Precision
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import UsageError

N = TypeVar("N", Tensor, Tensor | float)


class Accumulated(NamedTuple):
    """Results of all forward and backward passes of one step.

    Attributes:
        loss: Mean over the global batch, 0-d.
        weight: Number of counted items in the global batch.
        micro_losses: Totals (or means) of the micro-batches in order, each 0-d.
        metrics: Means over ``weight``.
        correction: Factor by which the gradients must still be multiplied; None for 1.
    """

    loss: Tensor
    weight: Tensor | float
    micro_losses: tuple[Tensor, ...]
    metrics: dict[str, Tensor]
    correction: Tensor | float | None


def accumulate(
    state: TrainState, batch: StepBatch, loss_fn: LossFn, precision: Precision, witness: StepWitness = SILENT
) -> Accumulated:
    """Run forward and scaled backward on every micro-batch; gradients add up in ``.grad``.

    The weight of the global batch is known only after the last forward pass. Each total is therefore divided by a
    provisional weight: the weight of the first micro-batch times the number of micro-batches. This keeps fp16 gradients
    in range. ``correction`` = provisional / true weight then makes the sum exact. It is exactly 1 when all
    micro-batches have equal weights. For a loss that returns a mean, the weights are the sample counts.

    A micro-batch whose loss depends on no parameter (it may count nothing) has no backward pass. A micro-batch without
    samples (the rank has none left) has weight 0.
    """
    outputs: list[Loss] = []
    size = batch.size or 1
    provisional: Tensor | float | None = None  # None: the loss returns means
    for index, micro in enumerate(batch.micro):
        with precision.autocast():
            output = call_loss(loss_fn, state.model, micro, f"micro-batch {index} of step {state.step + 1}")
            if isinstance(output, Tensor):
                share = micro.size / size
                objective = output if share == 1.0 else output * share
                output = Loss(objective.detach(), share)
            else:
                if not micro.size:
                    output = with_zero_weight(output)
                if provisional is None:
                    provisional = _nonzero(output.weight) * len(batch.micro)
                objective = output.total / provisional
        if objective.requires_grad:
            scaled = state.scaler.scaled(objective)
            witness.loss_is_scaled(objective, scaled)
            scaled.backward()  # type: ignore[no-untyped-call]
        outputs.append(Loss(output.total.detach(), output.weight, output.metrics))
    return _combined(outputs, provisional, batch.size)


def run_divided(
    state: TrainState,
    micro: MicroBatch,
    loss_fn: LossFn,
    precision: Precision,
    divisor: int,
    where: str,
    witness: StepWitness = SILENT,
    norms: SyncedNorms = LOCAL_STATISTICS,
) -> Loss:
    """Run forward and scaled backward on one micro-batch, with its total divided by a ``divisor`` known beforehand.

    Returns the detached loss. A mean is multiplied by the number of samples.
    """
    with norms.synchronised(counts=micro.size > 0):
        with precision.autocast():
            output = call_loss(loss_fn, state.model, micro, where)
            if isinstance(output, Tensor):
                output = Loss(output * micro.size, float(micro.size))
            if not micro.size:
                output = with_zero_weight(output)
            objective = output.total / divisor
        if objective.requires_grad:
            scaled = state.scaler.scaled(objective)
            witness.loss_is_scaled(objective, scaled)
            scaled.backward()  # type: ignore[no-untyped-call]
        elif is_sharded(state.model) or norms.exchange:
            raise UsageError(
                f"the loss of {where} depends on no parameter, and the other ranks wait for its gradient",
                remedy="let it depend on the model's output also where nothing is counted: output.sum() * 0",
            )
    metrics = {name: value.detach() for name, value in output.metrics.items()}
    return Loss(output.total.detach(), output.weight, metrics)


def combine_divided(outputs: Sequence[Loss], divisor: int) -> Accumulated:
    """Combine micro-batches whose totals were divided by a ``divisor`` known beforehand."""
    done = _combined([*outputs], float(divisor), divisor)
    return done._replace(correction=divisor / _nonzero(done.weight))


def with_zero_weight(output: Loss) -> Loss:
    metrics = {name: value * 0.0 for name, value in output.metrics.items()}
    return Loss(output.total * 0.0, output.weight * 0.0, metrics)


def _nonzero(weight: Tensor | float) -> Tensor | float:
    """Return the weight, or 1 if the weight is 0, so that it can be a divisor. Needs no host sync."""
    return weight + (weight == 0)


def _combined(outputs: list[Loss], provisional: Tensor | float | None, size: int) -> Accumulated:
    totals = tuple(output.total for output in outputs)
    total = totals[0] if len(totals) == 1 else _sum(totals)
    if provisional is None:  # totals are fractions of the mean
        return Accumulated(total, float(size), totals, {}, None)
    weight = _sum([output.weight for output in outputs])
    metrics = {name: _sum([o.metrics[name].detach() for o in outputs]) / weight for name in outputs[0].metrics}
    loss = total / weight
    correction: Tensor | float | None = provisional / _nonzero(weight)
    if len(outputs) == 1 or (isinstance(correction, float) and correction == 1.0):
        correction = None
    return Accumulated(loss, weight, totals, metrics, correction)


def _sum(values: Sequence[N]) -> N:
    """Sum without the ``0 +`` of Python's ``sum``, which launches one more kernel for tensors."""
    return reduce(add, values)
