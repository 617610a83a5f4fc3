"""Muon: momentum with the update of each hidden matrix orthogonalized; all other parameters get AdamW.

Muon and AdamW are in one optimizer, so that one schedule, one state_dict and one guard apply to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from trainwright.checkpoint.shards import divided_like, is_divided, local, locals_of, whole
from trainwright.errors import UsageError, require_choice, suggest
from trainwright.optim.groups import Group, GroupRule, GroupSettings, Role, matches, norm_parameters, param_groups
from trainwright.optim.guarded import (
    GuardedOptimizer,
    State,
    require_betas,
    require_fractions,
    require_rates,
)

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b and c of ``orthogonalize``
NS_STEPS = 5
NS_EPS = 1e-7
ADAMW_LR = 3e-4  # default for the parameters that AdamW updates
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

AdjustLR = Literal["original", "match_rms_adamw"]


class Muon(GuardedOptimizer):
    """Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/; on matrices equal to torch.optim.Muon.

        b = momentum * b + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * b      (u = b without nesterov)
        w = w - lr * weight_decay * w - lr * adjust * orthogonalize(u)

    ``adjust_lr``: "original" is max(1, rows / columns)**0.5, "match_rms_adamw" is
    0.2 * max(rows, columns)**0.5, so that AdamW's learning rate and decay fit (Moonshot 2025, arXiv 2502.16982).
    Convolutions count as (out channels, all else). All matrices of one shape or its transpose are
    orthogonalised in one batched product.

    Groups with ``"algorithm": "adamw"`` (as ``muon_groups`` makes them) get AdamW with their own ``lr``,
    ``betas`` and ``eps``.

    ``ns_dtype="auto"`` is bfloat16 on a GPU and on CPUs with bfloat16 instructions, else float32. Measured on
    2 Zen 4 cores, float32 / bfloat16: 4 matrices of 512x128 5.3 / 2.5 ms, 12 of 768x768 852 / 418 ms.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        adjust_lr: AdjustLR = "original",
        ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    ) -> None:
        require_rates(lr=lr, weight_decay=weight_decay)
        require_fractions(momentum=momentum)
        require_choice("adjust_lr", adjust_lr, ("original", "match_rms_adamw"))
        require_choice("ns_dtype", ns_dtype, ("auto", *_DTYPES))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "adjust_lr": adjust_lr,
            "ns_dtype": ns_dtype,
            "algorithm": "muon",
            "betas": (0.9, 0.999),
            "eps": 1e-8,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] == "muon":
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    raise UsageError(
                        f"Muon needs matrices; got a parameter of shape {tuple(parameter.shape)}",
                        remedy='put it into a group with "algorithm": "adamw", or use muon_groups(model)',
                    )

    def _tensors(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["algorithm"] == "muon" else ("step", "exp_avg", "exp_avg_sq")

    def _kind(self, group: Group, parameter: Tensor) -> object:
        kind = (parameter.device, parameter.dtype)
        if group["algorithm"] == "adamw":
            return kind
        rows, columns = matrix_shape(parameter)
        return *kind, min(rows, columns), max(rows, columns)

    def _update(self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        update = _adamw if group["algorithm"] == "adamw" else _muon
        update(group, parameters, grads, states)


def _adamw(group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
    adamw(
        locals_of(parameters),
        locals_of(grads),
        locals_of(state["exp_avg"] for state in states),
        locals_of(state["exp_avg_sq"] for state in states),
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _muon(group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
    momentum, lr = group["momentum"], group["lr"]
    buffers = locals_of(state["momentum_buffer"] for state in states)
    grads = locals_of(grads)
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
    updates = [_gathered(update, parameter) for update, parameter in zip(updates, parameters)]

    shapes = [matrix_shape(parameter) for parameter in parameters]
    wide_NRC = torch.stack(
        [
            update.reshape(rows, columns).T if rows > columns else update.reshape(rows, columns)
            for update, (rows, columns) in zip(updates, shapes)
        ]
    )
    dtype = _ns_dtype(group["ns_dtype"], wide_NRC.device)
    out_NRC = orthogonalize(wide_NRC.to(dtype)).to(parameters[0].dtype)
    scaled = [
        (out.T if rows > columns else out).reshape(parameter.shape)
        for parameter, out, (rows, columns) in zip(parameters, out_NRC.unbind(), shapes)
    ]
    torch._foreach_mul_(scaled, [adjustment(group["adjust_lr"], *shape) for shape in shapes])
    scaled = [local(divided_like(update, parameter)) for update, parameter in zip(scaled, parameters)]
    parameters = locals_of(parameters)
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_add_(parameters, scaled, alpha=-lr)


def _gathered(part: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor. ``part`` is this rank's part, and ``like`` has the same sharding."""
    if not is_divided(like):
        return part
    placed = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole(placed)


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a parameter as a matrix: the first dimension, and the product of all others."""
    return parameter.shape[0], parameter.shape[1:].numel()


def adjustment(kind: AdjustLR, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalize(x_NRC: Tensor) -> Tensor:
    """Map each wide matrix U S V^T to approximately U V^T, with singular values between 0.7 and 1.2.

    Five Newton-Schulz steps X <- a X + (b A + c A A) X with A = X X^T, from X / ||X||.
    """
    a, b, c = NS_COEFFICIENTS
    x_NRC = x_NRC / torch.linalg.vector_norm(x_NRC, dim=(-2, -1), keepdim=True).clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    return x_NRC


def _ns_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch version
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


HEAD_NAMES = "names_of_output_head"
"""Attribute of a model that is a pipeline stage: ``head_names`` of the full model."""


def muon_groups(
    model: nn.Module,
    *,
    lr: float | None,
    weight_decay: float | None,
    decay_norms_and_biases: bool = True,
    rules: Sequence[GroupRule] = (),
    head: str | None = None,
    adamw: Group | None = None,
) -> list[Group]:
    """Return ``param_groups`` for Muon, the groups that it orthogonalizes first.

    Hidden matrices use Muon. All others use AdamW: vectors, norms, single rows or columns, embeddings, and the output
    head. The head consists of the parameters whose name matches ``head``; by default the last ``nn.Linear``, unless the
    head is tied to an embedding. ``head=""`` means none. ``adamw`` holds ``lr`` (default 3e-4), ``betas`` and ``eps``
    of the AdamW groups.
    """
    options = {"lr": ADAMW_LR, "betas": (0.9, 0.999), "eps": 1e-8, **(adamw or {})}
    require_rates(adamw_lr=options["lr"], adamw_eps=options["eps"])
    require_betas("adamw_betas", options["betas"])
    to_muon = Role("muon", lr, (("algorithm", "muon"),))
    others = (("algorithm", "adamw"), ("betas", tuple(options["betas"])), ("eps", options["eps"]))
    to_adamw = Role("adamw", options["lr"], others)
    is_hidden = _hidden(model, head)
    groups = param_groups(
        model,
        lr=lr,
        weight_decay=weight_decay,
        decay_norms_and_biases=decay_norms_and_biases,
        rules=rules,
        role_of=lambda parameter: to_muon if is_hidden(parameter) else to_adamw,
    )
    return sorted(groups, key=lambda group: bool(group["algorithm"] != "muon"))


def groups_of_recipe(model: nn.Module, args: dict[str, Any], **shared: Unpack[GroupSettings]) -> list[Group]:
    """Return the ``muon_groups`` of a recipe. Removes the arguments for the groups from ``args``.

    ``adjust_lr="match_rms_adamw"`` is designed for one learning rate, so ``adamw_lr`` is then ``lr`` by default.
    """
    names = {"adamw_lr": "lr", "adamw_betas": "betas", "adamw_eps": "eps"}
    adamw = {names[arg]: args.pop(arg) for arg in names if arg in args}
    if args.get("adjust_lr") == "match_rms_adamw":
        adamw.setdefault("lr", shared["lr"])
    return muon_groups(model, **shared, head=args.pop("head", None), adamw=adamw)


def head_names(model: nn.Module, head: str | None) -> frozenset[str]:
    """Return the names of the parameters of the output head, see ``muon_groups``."""
    named = list(model.named_parameters(remove_duplicate=False))
    if head is None:
        embeddings = _embeddings(model)
        is_tied = any(sum(id(p) == each for _, p in named) > 1 for each in embeddings)
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        heads = {id(linears[-1].weight)} if linears else set()
        heads = heads & embeddings if is_tied else heads  # a stage may have the head without the embedding
        return frozenset(name for name, p in named if id(p) in heads)
    names = frozenset(name for name, _ in named if matches(head, [name]))
    if head and not names:
        raise UsageError(f"head={head!r} matches no parameter", remedy=suggest(head, [name for name, _ in named]))
    return names


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _hidden(model: nn.Module, head: str | None) -> Callable[[nn.Parameter], bool]:
    named = list(model.named_parameters(remove_duplicate=False))
    embeddings = _embeddings(model)
    names = getattr(model, HEAD_NAMES, None)
    names = head_names(model, head) if names is None else names
    heads = {id(parameter) for name, parameter in named if name in names}
    outside = embeddings | heads | norm_parameters(model)
    return lambda parameter: parameter.ndim >= 2 and min(matrix_shape(parameter)) > 1 and id(parameter) not in outside
