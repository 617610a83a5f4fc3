"""The passes of a step through the stages of a pipeline, which are on several ranks.

A schedule of torch sends activations and their gradients between the stages. All stages have the same samples. The
first stage reads their inputs; the last stage computes the loss and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.shards import locals_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.engine.loss import Batch, Loss, LossFn, detached, summed_loss
from trainwright.engine.precision import FP32, Precision
from trainwright.errors import UsageError

StageLoss = Callable[[Tensor, Tensor], Tensor]
"""``loss(output, index)``, where the only element of ``index`` is the number of the micro-batch."""


class StageSchedule(Protocol):
    """A schedule of ``torch.distributed.pipelining``.

    The first stage passes inputs; the last stage passes the numbers of the micro-batches as targets.
    """

    def step(self, *inputs: Tensor, target: Tensor | None, return_outputs: bool) -> Tensor | None: ...
    def eval(self, *inputs: Tensor, target: Tensor | None) -> Tensor | None: ...


class PipelineStages(Protocol):
    """The stages of this rank. ``tied`` names weights that the two ranks of ``ends`` share: first and last stage."""

    is_first: bool
    is_last: bool
    tied: Sequence[str]
    ends: World

    def fitting(self, num_micro: int) -> int: ...
    def make(self, num_micro: int, loss: StageLoss) -> StageSchedule: ...
    def as_returned(self, output: Tensor) -> object: ...


class StagedPasses:
    """Runs micro-batches through all stages. ``world`` contains the ranks of the stages, in order.

    Every micro-batch is padded to ``rows`` samples. Empty micro-batches are added until the schedule supports their
    number. Padding has weight 0.
    """

    def __init__(self, stages: PipelineStages, world: World, rows: int) -> None:
        self._stages = stages
        self._world = world
        self._rows = rows
        self._schedules: dict[int, StageSchedule] = {}
        self._work: _Work | None = None

    def train(
        self, state: TrainState, batch: StepBatch, loss_fn: LossFn, precision: Precision, divisor: int
    ) -> list[Loss]:
        """Run forward and backward passes; the gradients are in ``.grad``. Loss totals are divided by ``divisor``.

        Returns the loss of each micro-batch, on every stage.
        """
        where = f"step {state.step + 1}"
        work = _Work(loss_fn, batch.micro, divisor, where, state.scaler.scaled, {}, self._stages.as_returned)
        losses = self._run(work, precision, trains=True)
        for parameter in self._tied(state.model):
            if parameter.grad is None:  # the other stage may have a gradient
                parameter.grad = torch.zeros_like(parameter)
        return losses

    def evaluate(self, batch: Batch, loss_fn: LossFn) -> Loss:
        """Run forward only, in the precision that is already set. Returns the loss on every stage."""
        micro = MicroBatch(batch, np.arange(len(inputs_of(batch))))
        work = _Work(loss_fn, (micro,), 1, "the evaluation", lambda objective: objective, {}, self._stages.as_returned)
        return self._run(work, FP32, trains=False)[0]

    def sum_tied(self, model: nn.Module) -> None:
        """Sum the gradients of the weights that the first and the last stage share."""
        self._stages.ends.sum_(locals_of(p.grad for p in self._tied(model) if p.grad is not None))

    def counted(self, model: nn.Module, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients that count in the norm of this stage; tied weights count on the first stage only."""
        elsewhere = set() if self._stages.is_first else {id(p) for p in self._tied(model)}
        return [p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere]

    def _tied(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for name in self._stages.tied if (p := model.get_parameter(name)).requires_grad]

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients of all stages."""
        return self._world.gather(norm.double()[None]).square().sum().sqrt().to(norm.dtype)

    def _run(self, work: _Work, precision: Precision, *, trains: bool) -> list[Loss]:
        wanted = len(work.micro)
        count = self._stages.fitting(wanted)
        empty = MicroBatch(work.micro[0].data, work.micro[0].ids[:0])
        self._work = work = work._replace(micro=(*work.micro, *[empty] * (count - wanted)))
        if count not in self._schedules:
            self._schedules[count] = self._stages.make(count, self._loss)
        schedule = self._schedules[count]
        inputs = [torch.cat([self._filled(micro) for micro in work.micro])] if self._stages.is_first else []
        numbers = torch.arange(count, device="cpu") if self._stages.is_last else None
        with precision.autocast():
            if trains:
                schedule.step(*inputs, target=numbers, return_outputs=False)
            else:
                schedule.eval(*inputs, target=numbers)
        self._work = None
        mine = [_on_host(work.outputs[index]) for index in range(wanted)] if self._stages.is_last else []
        return next(filter(None, self._world.collect(mine)))

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
        assert self._work is not None
        return self._work.objective(output, int(index))

    def _filled(self, micro: MicroBatch) -> Tensor:
        inputs = inputs_of(micro.data)
        if len(inputs) > self._rows:
            raise UsageError(
                f"parallel.pipeline: a micro-batch has {len(inputs)} samples, and stages exchange {self._rows}",
                remedy="set batch.micro to the largest micro-batch, and evaluation.batch to no more",
            )
        return torch.cat([inputs, inputs[:1].expand(self._rows - len(inputs), *inputs.shape[1:])])


class _Work(NamedTuple):
    """The micro-batches in progress. ``outputs`` has the loss of each by its number; an entry may be written twice."""

    loss_fn: LossFn
    micro: Sequence[MicroBatch]
    divisor: int
    where: str
    scaled: Callable[[Tensor], Tensor]
    outputs: dict[int, Loss]
    as_returned: Callable[[Tensor], object]

    def objective(self, output: Tensor, index: int) -> Tensor:
        """Return the value to minimize; store the loss."""
        micro = self.micro[index]
        inputs = inputs_of(micro.data)
        model = _ModelStandIn(inputs, self.as_returned(output[: len(inputs)]))
        made = summed_loss(self.loss_fn, model, micro, f"micro-batch {index} of {self.where}")
        self.outputs[index] = detached(made)
        return self.scaled(made.total / self.divisor)


class _ModelStandIn(nn.Module):
    """Stands in for the model in a loss function, because the output for ``inputs`` is already known.

    Raises UsageError if it is called with other inputs, or twice (dropout would differ).
    """

    def __init__(self, inputs: Tensor, output: object) -> None:
        super().__init__()
        self._inputs = inputs
        self._output = output
        self._calls = 0

    def forward(self, *inputs: object, **named: object) -> object:
        self._calls += 1
        if [id(each) for each in (*inputs, *named.values())] != [id(self._inputs)] or self._calls > 1:
            raise UsageError(
                "parallel.pipeline: stages compute the first tensor of a batch once, as it comes, and the loss asks "
                f"the model for something else: call {self._calls}, with {len(inputs) + len(named)} values",
                remedy="give batches (input, target), and call model(input) once; what is done to the input belongs "
                "into the model",
            )
        return self._output


def _on_host(loss: Loss) -> Loss:
    weight = loss.weight.cpu() if isinstance(loss.weight, Tensor) else loss.weight
    return Loss(loss.total.cpu(), weight, {name: value.cpu() for name, value in loss.metrics.items()})


def inputs_of(data: Batch) -> Tensor:
    """Return the input of the first stage: the batch, or its first tensor. Raises UsageError for other types."""
    inputs = data[0] if isinstance(data, tuple | list) and data else data
    if not isinstance(inputs, Tensor):
        raise UsageError(
            f"parallel.pipeline: the batch is a {type(data).__name__} whose input is no tensor",
            remedy="give batches (input, target)",
        )
    return inputs
