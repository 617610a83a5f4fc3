"""The passes of a step whose weights are divided among ranks by torch's FSDP2, with exact sums.

FSDP gathers the weights of a unit (a block) before it is computed, and sums its gradients during the backward pass;
each rank sums its part. Ranks thus communicate throughout the passes, and cannot first agree that all have succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.shards import is_divided, is_sharded, units
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.engine.loss import Accumulated, Loss, LossFn, run_divided
from trainwright.engine.precision import Precision
from trainwright.engine.rank_sums import as_number
from trainwright.engine.recover import is_out_of_memory, make_room, oom_snapshot, out_of_memory_error
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OutOfMemoryError

T = TypeVar("T")


class ShardedPasses:
    """Runs the micro-batches of a rank of ``world``; afterwards ``.grad`` holds this rank's parts of the summed
    gradients.

    Each total is divided by the number of samples of the step, which all ranks know beforehand; ``correction`` makes
    the sum exact. With ``zero`` 1, gradients are summed after the last micro-batch and stay unsharded until then.
    ``norms`` exchange batch statistics.
    """

    def __init__(
        self, world: World, zero: int, witness: StepWitness = SILENT, norms: SyncedNorms = LOCAL_STATISTICS
    ) -> None:
        self._world = world
        self._zero = zero
        self._witness = witness
        self._norms = norms
        self._used = _Used()

    def __call__(self, state: TrainState, batch: StepBatch, loss_fn: LossFn, precision: Precision) -> Accumulated:
        """Run the micro-batches. Called by ``without_retry``, because the ranks cannot restart together."""
        self._used.watch(state.model)
        outputs, number = [], len(batch.global_ids)
        for index, micro in enumerate(batch.micro):
            if len(batch.micro) > 1:
                self._exchange(state.model, is_last=index == len(batch.micro) - 1)
            what = f"micro-batch {index} of step {state.step + 1}"
            outputs.append(run_divided(state, micro, loss_fn, precision, number, what, self._witness, self._norms))
        return self._combined(state, outputs, number)

    def _exchange(self, model: nn.Module, *, is_last: bool) -> None:
        """Communicate once per step, not in each micro-batch."""
        assert is_sharded(model)
        model.set_requires_all_reduce(is_last)
        if self._zero == 1:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)

    def _combined(self, state: TrainState, outputs: Sequence[Loss], number: int) -> Accumulated:
        """Return loss, weight and metrics of all ranks. Costs one exchange of a few numbers."""
        parameters = [p for p in state.parameters if p.requires_grad]
        names, device = sorted(outputs[0].metrics), parameters[0].device
        rows = [
            torch.stack([as_number(each, device) for each in (o.weight, o.total, *(o.metrics[n] for n in names))])
            for o in outputs
        ]
        mine = torch.stack([torch.where(row[0] != 0, row, 0.0) for row in rows]).sum(0)
        used = [self._used.is_used(p) for p in parameters]
        everywhere = self._world.gather(torch.cat([mine, torch.tensor(used, dtype=mine.dtype, device=device)])).sum(0)
        weight, *sums = everywhere[: len(mine)].unbind()
        self._sum_whole(parameters)
        if not all(used):  # reading the counts on a GPU costs a host sync
            for parameter, count in zip(parameters, everywhere[len(mine) :].tolist(), strict=True):
                if not count:  # no rank has a gradient
                    parameter.grad = None
        loss, *metrics = [(each / weight).to(outputs[0].total.dtype) for each in sums]
        divisor = torch.where(weight != 0, weight, 1.0)
        correction = (number / divisor).to(torch.promote_types(loss.dtype, torch.float32))
        totals = tuple(output.total for output in outputs)
        return Accumulated(loss, weight, totals, dict(zip(names, metrics, strict=True)), correction)

    def _sum_whole(self, parameters: Sequence[Tensor]) -> None:
        kept_whole = [p for p in parameters if not is_divided(p)]
        for parameter in kept_whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._world.sum_([p.grad for p in kept_whole if p.grad is not None])


class _Used:
    """Tracks the parameters that got a gradient on this rank; FSDP sets zeros for the others.

    While a unit computes, its modules hold full weights instead of the parts. Hooks on the full weights record the
    gradients.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._whole: dict[int, Tensor] = {}  # full weights that have a hook already
        self._found: set[int] = set()

    def watch(self, model: nn.Module) -> None:
        """Start a step."""
        if model is not self._model:
            self._model = model
            for unit in units(model):
                assert isinstance(unit, nn.Module)
                unit.register_forward_pre_hook(partial(self._add_hooks, _places(unit)))
        self._found.clear()

    def is_used(self, parameter: Tensor) -> bool:
        return id(parameter) in self._found if is_divided(parameter) else parameter.grad is not None

    def _add_hooks(self, places: list[tuple[nn.Module, str, Tensor]], *_: object) -> None:
        for module, name, part in places:
            live = module._parameters[name]
            assert live is not None
            if id(live) not in self._whole:
                self._whole[id(live)] = live
                live.register_post_accumulate_grad_hook(partial(self._record, id(part)))  # type: ignore[no-untyped-call]

    def _record(self, part: int, _whole: Tensor) -> None:
        self._found.add(part)


def _places(unit: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the places of the trained, divided parameters of a unit, without the parameters of nested units."""
    inner = [other for module in unit.children() for other in units(module)]
    within = {id(module) for other in inner if isinstance(other, nn.Module) for module in other.modules()}
    return [
        (module, name, parameter)
        for module in unit.modules()
        if id(module) not in within
        for name, parameter in module.named_parameters(recurse=False)
        if is_divided(parameter) and parameter.requires_grad
    ]


def without_retry(passes: Callable[[], T], state: TrainState, batch: StepBatch) -> T:
    """Run passes of ranks that compute together, so that none can restart alone; running out of memory ends the run.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        return passes()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        report = make_room(oom_snapshot(error, state, batch), batch, None, state)
    trouble = "ranks that divide the weights cannot begin a step again, so the run ends"
    found = out_of_memory_error([report], trouble)  # by now the frames that held the tensors are gone
    raise OutOfMemoryError(found.message, reports=found.reports, whole=False, remedy=found.remedy)
