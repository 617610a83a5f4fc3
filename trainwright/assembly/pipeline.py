"""Pipeline parallelism: the blocks of a model divided into stages on separate ranks, by torch's schedules.

A model can be divided if it has ``blocks``, the attribute ``stage_ends`` (names of the modules before the first block,
and names of those after the last block), and a forward that skips modules that are None. For two stages on a rank the
model also needs ``embed(input)`` and ``unembed(x)``, the parts of forward before and after the blocks. Other models
need a table, see ``stage_plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from trainwright.assembly.stage_plan import StagedModel
from trainwright.plan.splits import TWO_STAGE_SCHEDULES
from trainwright.recipe.schema import PipelineSchedule

SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
"""Classes of torch. ScheduleZBVZeroBubble and ScheduleDualPipeV are left out: their ``eval`` fails in torch 2.13."""


def stage_blocks(blocks: int, stages: int) -> list[list[int]]:
    """Return the blocks of each stage: divided evenly, the larger parts first."""
    return [part.tolist() for part in np.array_split(np.arange(blocks), stages)]


def stages_per_rank(schedule: PipelineSchedule) -> int:
    """Return the number of stages that each rank computes."""
    return 2 if schedule in TWO_STAGE_SCHEDULES else 1


class Stages:
    """The stages of this rank, one or two, and the schedules that run them.

    ``group`` contains the ranks of all stages in order. Removes from ``model`` what this rank does not compute, as
    defined by ``by_table`` or by the model itself.
    """

    def __init__(
        self,
        model: Any,
        group: ProcessGroup,
        schedule: PipelineSchedule,
        device: torch.device,
        by_table: StagedModel | None = None,
    ) -> None:
        self._group = group
        self._schedule = schedule
        self._device = device
        self._by_table = by_table
        ranks, rank = group.size(), group.rank()
        self._count, self._ranks = ranks * stages_per_rank(schedule), ranks
        shares = stage_blocks(len(by_table.plan.blocks if by_table else model.blocks), self._count)
        mine = range(rank, self._count, ranks)
        kept = {block for index in mine for block in shares[index]}
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        if by_table:
            by_table.keep(kept, is_first=self.is_first, is_last=self.is_last)
        else:
            keep_stage(model, kept, is_first=self.is_first, is_last=self.is_last)
        if len(mine) == 1:
            self._modules: dict[int, nn.Module] = {rank: model}
        else:
            last = self._count - 1
            self._modules = {
                index: _Stage(model, shares[index], is_first=index == 0, is_last=index == last) for index in mine
            }

    def fitting(self, num_micro: int) -> int:
        """Return the smallest number of micro-batches >= ``num_micro`` that the schedule supports."""
        if self._schedule == "gpipe":
            return num_micro
        each = self._ranks if self._schedule in TWO_STAGE_SCHEDULES else 1
        return max(self._ranks, -(-num_micro // each) * each)

    def as_returned(self, output: Tensor) -> object:
        """Return the output of the last stage, in the form that the full model returns."""
        return output if self._by_table is None else self._by_table.as_returned(output)

    def make(self, num_micro: int, loss: Any) -> Any:
        """Return a schedule for ``num_micro`` micro-batches. Its gradients are sums over them, not means."""
        stages: list[_PipelineStageBase] = [
            PipelineStage(module, index, self._count, self._device, group=self._group)
            for index, module in self._modules.items()
        ]
        one_or_more = stages if self._schedule in TWO_STAGE_SCHEDULES else stages[0]
        return SCHEDULES[self._schedule](one_or_more, num_micro, loss, scale_grads=False)


class _Stage(nn.Module):
    """One stage: some of the blocks on this rank. The first stage also embeds, the last stage also unembeds."""

    def __init__(self, model: Any, blocks: Sequence[int], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self._mine = blocks
        self._is_first = is_first
        self._is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        if self._is_first:
            x = self.model.embed(x)
        for index in self._mine:
            x = self.model.blocks[index](x)
        return self.model.unembed(x) if self._is_last else x


def keep_stage(model: Any, blocks: set[int], *, is_first: bool, is_last: bool) -> None:
    """Remove the modules that other ranks compute; the names of the rest do not change."""
    for index in range(len(model.blocks)):
        if index not in blocks:
            model.blocks[index] = nn.Identity()
    first, last = model.stage_ends
    for name in (*(() if is_first else first), *(() if is_last else last)):
        is_list = isinstance(getattr(model, name), nn.ModuleList)
        setattr(model, name, nn.ModuleList() if is_list else None)
