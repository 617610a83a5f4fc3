"""The division of a step among the ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.checkpoint.shards import row_of_each_rank
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, Ranks, World
from trainwright.engine.stage_passes import StagedPasses
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms


class GradientSum(Protocol):
    """Sums the gradients of all ranks in place. ``weight`` is the number of counted items of the step on all ranks."""

    def __call__(self, world: World, state: TrainState, grads: Sequence[Tensor], weight: Tensor | float, /) -> None: ...


def sum_whole(world: World, _state: TrainState, grads: Sequence[Tensor], _weight: Tensor | float) -> None:
    """Sum without compression."""
    world.sum_(grads)


def sum_in_bf16(world: World, _state: TrainState, grads: Sequence[Tensor], _weight: Tensor | float) -> None:
    """Round each rank's gradient and each partial sum to bfloat16, which halves the bytes of fp32."""
    assert isinstance(world, Ranks)
    world.sum_by_(partial(bf16_compress_hook, world.group), grads)


class PowerSgd:
    """Sends two low-rank factors instead of each matrix (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

    The part of a rank's gradient that the factors omit is added to its next gradient (error feedback). This error is
    state and differs by rank, so a checkpoint holds one row per rank. On another number of ranks, rank 0 continues with
    the sum of all rows: nothing is lost, but the last bits differ.

    The first ``after`` steps are summed without compression. So is a step that will be skipped, and a step whose set of
    parameters with gradients differs from that of the first compressed step. The errors then wait for the next step.
    """

    saves_together = True

    def __init__(self, world: Ranks, *, rank: int, after: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._world = world
        self._rank = rank
        self._after = after
        self._compressed: list[int] = []  # numbers of the parameters
        self._memory = PowerSGDState(world.group, rank, start_powerSGD_iter=2)
        self._memory.iter = 2  # this class decides which steps are compressed

    def __call__(self, world: World, state: TrainState, grads: Sequence[Tensor], weight: Tensor | float) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
        present = [number for number, p in enumerate(parameters) if p.grad is not None]
        is_same = present == self._compressed or not self._compressed
        if state.step < self._after or not is_same or not _will_be_applied(world, grads, weight):
            world.sum_(grads)
            return
        self._compressed = present
        self._world.sum_by_(partial(powerSGD_hook, self._memory), grads)

    def state_dict(self) -> StateDict:
        """Return the state.

        The rows of all ranks are gathered into one tensor, so all ranks must call this together.
        """
        memory = self._memory
        errors = {str(bucket): row_of_each_rank(each, self._world) for bucket, each in memory.error_dict.items()}
        factors = {str(bucket): [memory.p_memory_dict[bucket], q] for bucket, q in memory.q_memory_dict.items()}
        return {"rank": self._rank, "compressed": self._compressed, "factors": factors, "errors": errors}

    def load_state_dict(self, saved: Mapping[str, Tree]) -> None:
        self._compressed = list(saved["compressed"])
        for bucket, rows in saved["errors"].items():
            self._memory.error_dict[int(bucket)] = self._share(rows)
        if saved["rank"] == self._rank:  # else they start from random factors, as in the first step
            for bucket, (p, q) in saved["factors"].items():
                self._memory.p_memory_dict[int(bucket)], self._memory.q_memory_dict[int(bucket)] = p.clone(), q.clone()

    def _share(self, rows: Tensor) -> Tensor:
        if len(rows) == self._world.size:
            return rows[self._world.rank].clone()
        return rows.sum(0) if self._world.rank == 0 else torch.zeros_like(rows[0])


def _will_be_applied(world: World, grads: Sequence[Tensor], weight: Tensor | float) -> bool:
    """Return True if all ranks have finite gradients: a NaN in the error feedback would stay.

    Costs a host sync on a GPU.
    """
    if not grads or not bool(weight != 0):
        return False
    norms = torch.stack(torch._foreach_norm(list(grads)))
    return bool(world.least(int(bool(norms.isfinite().all()))))


class RankLayout(NamedTuple):
    """Division of a step among the ranks of a run; by default there is one rank.

    Attributes:
        sums: Ranks whose gradients and losses are summed.
        data: Ranks with different samples, if some of ``sums`` share theirs and each has a part of them (context
            parallelism); None: the same as ``sums``.
        exact: Gradients have the same bits on any number of ranks, see ``accumulate_exactly``.
        zero: ZeRO stage of a model that FSDP has sharded, see ``ShardedPasses``.
        divided: Ranks compute parts of the same layers or sequences, and communicate in each pass.
        stages: Ranks compute consecutive layers (pipeline parallelism).
        stream: Number of this rank's random stream; by default its rank in ``sums``.
        norms: BatchNorms that exchange batch statistics.
        sum_gradients: Sums the gradients of model copies.
    """

    sums: World = SOLO
    data: World | None = None
    exact: bool = False
    zero: int = 3
    divided: bool = False
    stages: StagedPasses | None = None
    stream: int | None = None
    norms: SyncedNorms = LOCAL_STATISTICS
    sum_gradients: GradientSum = sum_whole


ONE_RANK_LAYOUT = RankLayout()
"""Layout of a single process."""
