"""Makes an optimizer by its name, with the implementation that was fastest when measured."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import wraps

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.optimizer_modes import with_modes
from trainwright.checkpoint.shards import holds_parts, is_divided
from trainwright.errors import Problem, UsageError, import_optional, require_choice, unknown_args
from trainwright.optim.groups import GroupRule, GroupSettings, fan_in_ratios, param_groups
from trainwright.optim.offload import offloaded
from trainwright.optim.user_optimizers import (
    Factory,
    arguments_of,
    as_one,
    makes_own_groups,
    name_of,
    require_plain_step,
    wrong_arguments,
)
from trainwright.plan.layout import why_not_offloaded
from trainwright.recipe import OPTIMIZER_ALIASES, OPTIMIZER_NAMES, OPTIMIZERS
from trainwright.recipe.resolve import import_factory

MUP_OPTIMIZERS = ("adamw", "adam", "adamw8bit", "adamw4bit")
_RESERVED_ARGS = ("params", "lr", "weight_decay", "differentiable")


def make_optimizer(
    name: str | Factory,
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    decay_norms_and_biases: bool = True,
    rules: Sequence[GroupRule] = (),
    args: Mapping[str, object] | None = None,
    offload: bool = False,
) -> Optimizer:
    """Make the optimizer ``name`` over ``param_groups(model, ...)``.

    sgd, adam and adamw run fused on CPU and CUDA unless ``args`` has ``fused`` or ``foreach``: the same update up to
    rounding. Fused was the fastest in every measured case, and can skip an update without a host sync.

    Args:
        name: A short name (docs/reference/catalog.md), or a callable. A callable is called as ``name(groups, lr=lr,
            **args)``; as ``name(parameters, **args)`` if it has no parameter ``lr``; or with the model as the first
            argument if its first parameter is named ``model``. It may return a list of optimizers, which are stepped
            together.
        model: The model to train.
        lr: Base learning rate; None: default of the optimizer.
        weight_decay: Weight decay; None: default of the optimizer.
        decay_norms_and_biases: See ``param_groups``.
        rules: See ``param_groups``.
        args: Further arguments of the optimizer. muon also takes ``adamw_lr`` (3e-4; ``lr`` with
            ``adjust_lr="match_rms_adamw"``), ``adamw_betas``, ``adamw_eps`` and ``head`` (see ``muon_groups``).
        offload: Keep moments and update on the host.

    Returns:
        The optimizer.

    Raises:
        UsageError: Unknown name or argument, a value that the optimizer rejects, or ``offload`` of an optimizer that
            does not benefit.
    """
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in (args or {}).items()}
    if isinstance(name, str) and name in OPTIMIZER_ALIASES:
        import_optional("pytorch_optimizer", needed_for=f"the optimizer {name}")
        name = import_factory(OPTIMIZER_ALIASES[name].factory)
    if isinstance(name, str):
        require_choice("optimizer", name, OPTIMIZER_NAMES)
        lr = OPTIMIZERS[name].lr if lr is None else lr
        weight_decay = OPTIMIZERS[name].weight_decay if weight_decay is None else weight_decay
    shared: GroupSettings = {
        "lr": lr,
        "weight_decay": weight_decay,
        "decay_norms_and_biases": decay_norms_and_biases,
        "rules": rules,
    }
    if callable(name):
        _require_no_groups(name, shared, offload=offload)
        for found in wrong_arguments(name, arguments):
            raise UsageError(found.rule, remedy=found.remedy)
        params, rate = arguments_of(name, model, lambda: param_groups(model, **shared), lr)
        made = as_one(_call(name, params, {**rate, **arguments}, offload=offload), model)
        _require_decay(made, shared)
        return made
    for found in wrong_args(name, arguments):
        raise UsageError(found.rule, remedy=found.remedy)
    if offload and (why := why_not_offloaded(name, arguments)):
        raise UsageError(f"{name} cannot be offloaded: {why}", remedy="set offload to false, or choose adamw")
    if name not in MUP_OPTIMIZERS and fan_in_ratios(model):
        raise UsageError(
            f"init: mup has learning rates for Adam, and {name} is another rule",
            remedy=f"choose {', '.join(MUP_OPTIMIZERS)}, or leave init: mup out",
        )
    row = OPTIMIZERS[name]
    groups = import_factory(row.groups)(model, arguments, **shared) if row.groups else param_groups(model, **shared)
    arguments = {**_implementation(name, model, arguments), **arguments}
    built_in = _call(import_factory(row.factory), groups, {"lr": lr, **arguments}, offload=offload)
    assert isinstance(built_in, Optimizer)
    return built_in


def _require_decay(optimizer: Optimizer, shared: GroupSettings) -> None:
    """Raise UsageError if a weight decay is set for an optimizer without weight decay."""
    stated = {"optimizer.weight_decay": shared["weight_decay"]}
    stated |= {f"optimizer.groups.{i}.weight_decay": rule.weight_decay for i, rule in enumerate(shared["rules"])}
    for part in parts_of(optimizer):
        for path, value in stated.items():
            if value and "weight_decay" not in part.defaults:
                raise UsageError(
                    f"{path} has no effect: {type(part).__name__} has no weight decay",
                    remedy="leave it out, or choose an optimizer that has it, such as adamw",
                )


def accepted_args(name: str) -> list[str]:
    """Return the names that ``args`` may contain for the optimizer ``name``."""
    row = OPTIMIZERS[name]
    accepted = inspect.signature(import_factory(row.factory)).parameters
    return [*(each for each in accepted if each not in _RESERVED_ARGS), *row.group_args]


def wrong_args(name: str, args: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems of arguments that the optimizer ``name`` does not accept."""
    args = list(args)
    twice = [arg for arg in args if arg in ("lr", "weight_decay")]
    for arg in twice:
        remedy = f"set optimizer.{arg}, not optimizer.args.{arg}"
        yield Problem(f"optimizer.args.{arg}", f"{arg} of the optimizer is given twice", remedy=remedy)
    rest = [arg for arg in args if arg not in twice]
    yield from unknown_args(f"the optimizer {name!r}", "optimizer.args", rest, accepted_args(name))


def _implementation(name: str, model: nn.Module, args: Mapping[str, object]) -> dict[str, bool]:
    """Return ``fused`` wherever torch supports it. The rule is fixed, so that all starts of a recipe choose the same.

    The rule follows from measurements on two cores with torch 2.13, 7 to 30 interleaved rounds. AdamW, time of the full
    step relative to torch's default loop, foreach / fused:

        model                          two threads    one thread
        MLP of 6 thousand parameters   0.99 / 0.73    0.99 / 0.76
        MLP of 1.3 M                   0.71 / 0.50    0.76 / 0.57
        GPT 2x96                       1.00 / 0.96    0.96 / 0.95
        GPT 4x128                      1.02 / 0.89    0.97 / 0.90    (in separate processes 1.00 / 0.97)
        GPT 6x256                      1.01 / 0.87    1.04 / 0.86

    SGD, step() alone in ms, loop / foreach / fused: MLP 0.086 / 0.089 / 0.063, GPT 1.01 / 0.94 / 0.67.
    """
    if not OPTIMIZERS[name].fused or "fused" in args or "foreach" in args:
        return {}
    if name == "sgd" and holds_parts(model):  # torch has no fused SGD for tensors that ranks divide
        return {"foreach": True}
    # torch's fused SGD starts its buffers from uninitialized memory, see with_momentum_buffers
    dampened = bool(args.get("dampening"))
    fits = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    return {"fused": True} if fits and not dampened and not args.get("capturable") else {}


def _require_no_groups(factory: Factory, shared: GroupSettings, *, offload: bool) -> None:
    """Raise UsageError for settings of groups, or offload, if the factory makes its own groups and ignores them."""
    if not makes_own_groups(factory):
        return
    stated = {
        "weight_decay": shared["weight_decay"],
        "decay_norms_and_biases": not shared["decay_norms_and_biases"],
        "rules": shared["rules"],
        "offload": offload,
    }
    for key, value in stated.items():
        if value:
            path = "optimizer.groups" if key == "rules" else f"optimizer.{key}"
            raise UsageError(
                f"{path} has no effect: {name_of(factory)} makes its groups itself",
                remedy="set it there, or give the function a parameter lr, so that it gets groups",
            )


def _call(
    factory: Factory, params: ParamsT | nn.Module, options: Mapping[str, object], *, offload: bool
) -> Optimizer | Sequence[Optimizer]:
    @wraps(factory)
    def checked(params: ParamsT, **arguments: object) -> Optimizer:
        optimizer = with_momentum_buffers(require_plain_step(factory(params, **arguments)))
        if with_modes(optimizer):
            raise UsageError(
                f"{name_of(factory)} averages the weights itself and cannot be offloaded",
                remedy="set optimizer.offload to false",
            )
        return optimizer

    try:
        if offload:
            assert not isinstance(params, nn.Module)
            return offloaded(checked)(params, **options)
        made = factory(params, **options)
        for each in made if isinstance(made, list | tuple) else [made]:
            with_momentum_buffers(require_plain_step(each))
        return made
    except UsageError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # torch rejects bad values with any of these
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UsageError(
            f"{name_of(factory)} refuses its arguments ({arguments}): {error}",
            remedy="change the argument that it names",
        ) from error


def with_momentum_buffers(optimizer: Optimizer) -> Optimizer:
    """Create the momentum buffers of a fused SGD as zeros; return ``optimizer``.

    torch 2.13 allocates them in the first step by ``empty_like``. If ``found_inf`` skips that step they stay
    uninitialized, and the second step uses them. With zeros the first step is b = momentum * 0 + g, the same as torch's
    b = g. (Not with dampening, where torch's first step differs.) Applies also if ranks divide the weights: their SGD
    is not fused, but its checkpoints must fit a run in one process.
    """
    if isinstance(optimizer, torch.optim.SGD):
        stands_for_fused = any(is_divided(group["params"][0]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            if (group["fused"] or stands_for_fused) and group["momentum"] and not group["dampening"]:
                for parameter in group["params"]:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    return optimizer
