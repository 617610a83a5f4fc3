"""LAMB: Adam with the update of each matrix scaled to the norm of the matrix, for very large batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from trainwright.optim.groups import Group
from trainwright.optim.guarded import (
    GuardedOptimizer,
    State,
    require_betas,
    require_fractions,
    require_rates,
)


class Lamb(GuardedOptimizer):
    """You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962, algorithm 2.

        m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * (||w|| / ||u||) * u        ratio 1 when either norm is 0; phi is the identity

    The group option ``adapt`` turns the ratio on or off. ``None`` means: on for parameters with at least
    two dimensions, so that norms and biases get plain AdamW steps, as in the authors' code.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool | None = None,
    ) -> None:
        require_rates(lr=lr, eps=eps, weight_decay=weight_decay)
        require_betas("betas", betas)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    def _tensors(self, _group: Group) -> tuple[str, ...]:
        return "step", "exp_avg", "exp_avg_sq"

    def _kind(self, group: Group, parameter: Tensor) -> object:
        return parameter.device, parameter.dtype, adapts(group, parameter)

    def _update(self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        exp_avgs = [state["exp_avg"] for state in states]
        exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)

        # norms and corrections in at least float32: a bfloat16 counter would stop at 256
        wide = torch.promote_types(torch.float32, parameters[0].dtype)
        step_N = torch.stack(steps).to(wide)
        root_N = bias_correction(beta2, step_N).sqrt().to(parameters[0].dtype)
        updates = list(torch._foreach_sqrt(exp_avg_sqs))
        torch._foreach_div_(updates, root_N.unbind())
        torch._foreach_add_(updates, group["eps"])
        updates = list(torch._foreach_div(exp_avgs, updates))
        torch._foreach_div_(updates, bias_correction(beta1, step_N).to(parameters[0].dtype).unbind())
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if adapts(group, parameters[0]):
            torch._foreach_mul_(updates, trust_ratios(parameters, updates).to(parameters[0].dtype).unbind())
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def adapts(group: Group, parameter: Tensor) -> bool:
    """Return True if the step of this parameter is scaled to its norm."""
    return parameter.ndim >= 2 if group["adapt"] is None else bool(group["adapt"])


def norms(tensors: list[Tensor]) -> Tensor:
    """Return 2-norms, shape (N,), in at least float32."""
    wide = torch.promote_types(torch.float32, tensors[0].dtype)
    return torch.stack(list(torch._foreach_norm(tensors, 2.0, dtype=wide)))


def trust_ratios(parameters: list[Tensor], updates: list[Tensor]) -> Tensor:
    """Return ||w|| / ||u||, shape (N,); 1 if either is 0."""
    weight_N, update_N = norms(parameters), norms(updates)
    return torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)


def bias_correction(beta: float, step_N: Tensor) -> Tensor:
    """Return 1 - beta^t, by expm1: the plain formula loses 4 of 7 digits in float32 when beta is near 1."""
    return -torch.expm1(step_N * (math.log(beta) if beta else -math.inf))


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
