"""Pipeline parallelism: the blocks of a model divided into stages on separate ranks, by torch's schedules.

A model can be divided if it has ``blocks``, the attribute ``stage_ends`` (names of the modules before the first block,
and of the modules after the last one), and a forward that skips modules that are None. For two stages on a rank the
model also needs ``embed(input)`` and ``unembed(x)``, the parts of forward before and after the blocks. Other models
need a table, see ``stage_plan``.

If an embedding and the output layer are tied, the first and the last stage have a copy each, which are equal at the
start. The sum of their gradients updates both, as in Megatron-LM and torchtitan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks, new_group
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from trainwright.assembly.stage_plan import StagedModel
from trainwright.checkpoint.names import SHARED
from trainwright.distributed import SOLO, Ranks, World
from trainwright.distributed.split_plan import ties_of
from trainwright.plan.splits import TWO_STAGE_SCHEDULES, V_SCHEDULES
from trainwright.recipe.schema import PipelineSchedule

SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def stage_blocks(blocks: int, stages: int) -> list[list[int]]:
    """Return the blocks of each stage: divided evenly, the larger parts first."""
    return [part.tolist() for part in np.array_split(np.arange(blocks), stages)]


class Stages:
    """The stages of this rank, one or two, and the schedules that run them.

    ``group`` contains the ranks of all stages in order. Removes from ``model`` the modules of other ranks, as defined
    by ``by_table`` or by the model itself. ``tied`` has the names of the weights that the first and the last stage
    share, in the same order on both ranks (``ends``).
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
        self._has_two = schedule in TWO_STAGE_SCHEDULES
        self._count, self._ranks = ranks * (1 + self._has_two), ranks
        shares = stage_blocks(len(by_table.plan.blocks if by_table else model.blocks), self._count)
        last_stage = self._count - 1
        mine = (rank, last_stage - rank) if schedule in V_SCHEDULES else range(rank, self._count, ranks)
        kept = {block for index in mine for block in shares[index]}
        self.is_first, self.is_last = 0 in mine, last_stage in mine
        places = [(each, {owner: model.get_submodule(owner) for owner, _ in each}) for each in ties_of(model)]
        if by_table:
            by_table.keep(kept, is_first=self.is_first, is_last=self.is_last)
        else:
            keep_stage(model, kept, is_first=self.is_first, is_last=self.is_last)
        self.tied: Sequence[str] = [name for tied, owners in places if (name := hold_shared(model, tied, owners))]
        self.ends: World = SOLO
        if self.tied:
            first, *_, last = get_process_group_ranks(group)
            self.ends = Ranks(group if ranks == 2 else new_group([first, last], use_local_synchronization=True))
        if len(mine) == 1:
            self._modules: dict[int, nn.Module] = {rank: model}
        else:
            self._modules = {
                index: _Stage(model, shares[index], is_first=index == 0, is_last=index == last_stage) for index in mine
            }

    def fitting(self, num_micro: int) -> int:
        """Return the smallest number of micro-batches >= ``num_micro`` that the schedule supports."""
        if self._schedule in ("gpipe", "zbv"):
            return num_micro
        if self._schedule == "dualpipev":
            return max(self._count, num_micro)
        each = self._ranks if self._has_two else 1
        return max(self._ranks, -(-num_micro // each) * each)

    def as_returned(self, output: Tensor) -> object:
        """Return the output of the last stage, in the form that the full model returns."""
        return output if self._by_table is None else self._by_table.as_returned(output)

    def make(self, num_micro: int, loss: Any) -> Any:
        """Return a schedule for ``num_micro`` micro-batches. Its gradients are sums over them, not means."""
        stages: list[_PipelineStageBase] = [
            _LocalStage(module, index, self._count, self._device, group=self._group)
            for index, module in self._modules.items()
        ]
        one_or_more = stages if self._has_two else stages[0]
        return SCHEDULES[self._schedule](one_or_more, num_micro, loss, scale_grads=False)


class _LocalStage(PipelineStage):
    """A stage that can be evaluated if the next one is on the same rank.

    torch 2.11 to 2.14 pass gradients between such stages also in an evaluation, which has none.
    """

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


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


def hold_shared(model: nn.Module, places: Sequence[tuple[str, str]], owners: Mapping[str, nn.Module]) -> str:
    """Return the name of a tied weight on this stage; "" if no other stage has it, or this one does not.

    ``places`` are its places in the full model, as names of (module, parameter); ``owners`` are these modules by name.
    If its first place is on another stage, the weight is registered under that name, too, so that the names in a
    checkpoint do not change.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    here = [place for place in places if modules.get(place[0]) is owners[place[0]]]
    if not here or len(here) == len(places):
        return ""
    (owner, name), first = places[0], owners[places[0][0]]
    if places[0] not in here:
        model._modules = {SHARED: nn.Module(), **model._modules}
        path = f"{SHARED}.{owner}".split(".")
        for end in range(2, len(path) + 1):
            parent = model.get_submodule(".".join(path[: end - 1]))
            if path[end - 1] not in parent._modules:
                parent.add_module(path[end - 1], _without_contents(first) if end == len(path) else nn.Module())
        model.get_submodule(".".join(path)).register_parameter(name, first._parameters[name])
    return ".".join(filter(None, here[0]))


def _without_contents(module: nn.Module) -> nn.Module:
    """Return an empty module of the same class, because an optimizer may treat its class (embeddings) separately."""
    empty = copy(module)
    empty._parameters, empty._buffers, empty._modules = {}, {}, {}
    return empty
