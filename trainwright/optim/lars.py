"""LARS: momentum SGD whose learning rate per layer follows the norm of the weights, for very large batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from trainwright.optim.groups import Group
from trainwright.optim.guarded import (
    GuardedOptimizer,
    State,
    require_fractions,
    require_rates,
)
from trainwright.optim.lamb import adapts, norms


class Lars(GuardedOptimizer):
    """You et al. 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888, eq. 6.

        local = trust_coefficient * ||w|| / (||g|| + weight_decay * ||w|| + eps)   1 when either norm is 0
        b = momentum * b + local * (g + weight_decay * w)
        w = w - lr * b                  nesterov: w - lr * (local * (g + weight_decay * w) + momentum * b)

    The learning rate stays outside the buffer, as in ``torch.optim.SGD``; the paper has it inside, which
    is the same until the rate changes. The group option ``adapt``: ``None`` means that parameters with fewer
    than two dimensions get plain SGD.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
    ) -> None:
        require_rates(lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)
        require_fractions(momentum=momentum)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "adapt": None,
        }
        super().__init__(params, defaults)

    def _tensors(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _kind(self, group: Group, parameter: Tensor) -> object:
        return parameter.device, parameter.dtype, adapts(group, parameter)

    def _update(self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        updates = list(torch._foreach_add(grads, parameters, alpha=decay))
        if adapts(group, parameters[0]):
            weight_N, grad_N = norms(parameters), norms(grads)
            local_N = group["trust_coefficient"] * weight_N / (grad_N + decay * weight_N + group["eps"])
            local_N = torch.where((weight_N > 0) & (grad_N > 0), local_N, 1.0)
            torch._foreach_mul_(updates, local_N.to(parameters[0].dtype).unbind())
        if momentum:
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            updates = list(torch._foreach_add(updates, buffers, alpha=momentum)) if group["nesterov"] else buffers
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
