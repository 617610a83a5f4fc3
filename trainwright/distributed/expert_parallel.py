"""Expert parallelism: ranks with different samples divide the experts of a mixture, and exchange tokens.

As in GShard (https://arxiv.org/abs/2006.16668), an all-to-all sends each token to the ranks of its experts, and another
one sends the outputs back. Each rank has the router and all other layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.distributed.group import raising_rank_error
from trainwright.distributed.split_plan import expert_modules


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Convert the weights of the experts to DTensors of ``mesh`` (1-D), in place. All ranks must have the same."""
    exchange = TokenExchange(mesh.get_group())
    for module in expert_modules(model):
        for name in module.expert_weights:
            if (weight := getattr(module, name)) is not None:
                part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))
        module.exchange = exchange


class TokenExchange:
    """Sends tokens to the ranks of ``group`` that have their experts. Each rank has the same number of experts."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def local(self, weight: Tensor) -> Tensor:
        """Return the weights of the experts of this rank."""
        assert isinstance(weight, DTensor)
        return weight.to_local()

    def __call__(self, rows: Tensor, load_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the output of each row's expert. ``rows`` are sorted by expert, ``load_E`` counts the rows of each.

        ``compute`` gets rows sorted by the experts of this rank, and the ends of their groups. Costs a host sync.
        """
        ranks = self._group.size()
        sent = load_E.long()
        received = torch.zeros_like(sent)
        with raising_rank_error("exchange the numbers of tokens"):
            distributed.all_to_all_single(received, sent, group=self._group)
        received_RE = received.view(ranks, -1)  # from each rank, for each expert of this one
        there, here = torch.stack([sent.view(ranks, -1).sum(1), received_RE.sum(1)]).tolist()
        mine = all_to_all_single_autograd(rows, here, there, self._group)
        experts = torch.arange(received_RE.shape[1], device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(received).argsort(stable=True)
        out = compute(mine[order], received_RE.sum(0).cumsum(0).int())
        return all_to_all_single_autograd(out[order.argsort()], there, here, self._group)
