"""The passes of a step through the stages of a pipeline, which lie on several ranks.

A schedule of torch sends activations and their gradients between the stages. All stages have the same samples: the
first reads their inputs; the last computes the loss, and tells the others what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.engine.accumulate import weighing_nothing
from trainwright.engine.loss import Batch, Loss, LossFn, call_loss
from trainwright.engine.oom_report import is_out_of_memory
from trainwright.engine.precision import FP32, Precision
from trainwright.errors import OutOfMemoryError, UsageError

StageLoss = Callable[[Tensor, Tensor], Tensor]
"""``loss(output, index)`` of the micro-batch whose number is the one element of ``index``."""


class StageSchedule(Protocol):
    """Of ``torch.distributed.pipelining``: the first stage gives inputs, the last one the numbers of micro-batches."""

    def step(self, *inputs: Tensor, target: Tensor | None, return_outputs: bool) -> Tensor | None: ...
    def eval(self, *inputs: Tensor, target: Tensor | None) -> Tensor | None: ...


class PipelineStages(Protocol):
    """The stages of this rank."""

    is_first: bool
    is_last: bool

    def fitting(self, num_micro: int) -> int: ...
    def make(self, num_micro: int, loss: StageLoss) -> StageSchedule: ...
    def as_returned(self, output: Tensor) -> object: ...


class StagedPasses:
    """Runs micro-batches through all stages. ``world`` has the ranks of the stages, in order.

    Every micro-batch is filled up to ``rows`` samples, and their number to one that the schedule takes; what is added
    weighs nothing.
    """

    def __init__(self, stages: PipelineStages, world: World, rows: int) -> None:
        self._stages, self._world, self._rows = stages, world, rows
        self._schedules: dict[int, StageSchedule] = {}
        self._work = _NO_WORK

    def train(
        self, state: TrainState, batch: StepBatch, loss_fn: LossFn, precision: Precision, divisor: int
    ) -> list[Loss]:
        """Leaves the gradients of these samples in ``.grad``, of totals divided by ``divisor``.

        Returns what each micro-batch gave, on every stage.
        """
        where = f"step {state.step + 1}"
        work = _Work(loss_fn, batch.micro, divisor, where, state.scaler.scaled, {}, self._stages.as_returned)
        return self._run(work, precision, trains=True)

    def evaluate(self, batch: Batch, loss_fn: LossFn) -> Loss:
        """Forward only, in the precision that is set already. Returns the loss on every stage."""
        micro = MicroBatch(batch, np.arange(len(inputs_of(batch))))
        work = _Work(loss_fn, (micro,), 1, "the evaluation", _as_it_is, {}, self._stages.as_returned)
        try:
            return self._run(work, FP32, trains=False)[0]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise OutOfMemoryError(
            "out of memory in the evaluation, and the stages cannot begin again together",
            whole=False,
            remedy="evaluate fewer samples at a time (evaluation.batch), or on devices with more memory",
        )

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of the gradients of all stages."""
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
        self._work = _NO_WORK
        mine = [_on_host(work.outputs[index]) for index in range(wanted)] if self._stages.is_last else []
        return self._world.collect(mine)[-1]

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
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
    """The micro-batches that are under way. ``outputs`` are filled in by their number, some of them twice."""

    loss_fn: LossFn
    micro: Sequence[MicroBatch]
    divisor: int
    where: str
    scaled: Callable[[Tensor], Tensor]
    outputs: dict[int, Loss]
    as_returned: Callable[[Tensor], object]

    def objective(self, output: Tensor, index: int) -> Tensor:
        """What is minimised; notes the loss."""
        micro = self.micro[index]
        inputs = inputs_of(micro.data)
        model = _Given(inputs, self.as_returned(output[: len(inputs)]))
        made = call_loss(self.loss_fn, model, micro, f"micro-batch {index} of {self.where}")
        if isinstance(made, Tensor):
            made = Loss(made * micro.size, float(micro.size))
        if not micro.size:
            made = weighing_nothing(made)
        metrics = {name: value.detach() for name, value in made.metrics.items()}
        self.outputs[index] = Loss(made.total.detach(), made.weight, metrics)
        return self.scaled(made.total / self.divisor)


class _Given(nn.Module):
    """Stands for a model in a loss function where the output for ``inputs`` is known already.

    Raises UsageError where it is asked for that of anything else, or twice, for which dropout would differ.
    """

    def __init__(self, inputs: Tensor, output: object) -> None:
        super().__init__()
        self._inputs, self._output, self._calls = inputs, output, 0

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


def _as_it_is(objective: Tensor) -> Tensor:
    return objective


def _no_loss(model: nn.Module, batch: Batch) -> Loss:
    raise AssertionError("no micro-batch is under way")


_NO_WORK = _Work(_no_loss, (), 1, "", _as_it_is, {}, _as_it_is)


def _on_host(loss: Loss) -> Loss:
    weight = loss.weight.cpu() if isinstance(loss.weight, Tensor) else loss.weight
    return Loss(loss.total.cpu(), weight, {name: value.cpu() for name, value in loss.metrics.items()})


def inputs_of(data: Batch) -> Tensor:
    """What the first stage reads: the batch itself, or its first tensor. Raises UsageError for another kind."""
    inputs = data[0] if isinstance(data, tuple | list) and data else data
    if not isinstance(inputs, Tensor):
        raise UsageError(
            f"parallel.pipeline: the batch is a {type(data).__name__} whose input is no tensor",
            remedy="give batches (input, target)",
        )
    return inputs
