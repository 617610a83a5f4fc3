"""Optimizers of the user: instances, or made by a class, a partial or a function."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import CodeType
from typing import TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainwright.checkpoint.chained_optimizer import ChainedOptimizer, parts_of
from trainwright.errors import Problem, UsageError, unknown_args
from trainwright.recipe import OPTIMIZERS
from trainwright.recipe.resolve import parameters_of

Factory: TypeAlias = Callable[..., Optimizer | Sequence[Optimizer]]


def takes(factory: Callable[..., object], name: str) -> bool:
    """Return True if a callable has a parameter of that name, any keyword argument, or no known signature."""
    parameters = parameters_of(factory)
    return not parameters or name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def takes_first(factory: Callable[..., object], name: str) -> bool:
    """Return True if the first parameter of a callable has that name."""
    return next(iter(parameters_of(factory)), None) == name


def name_of(factory: Callable[..., object]) -> str:
    """Return the name of a factory in messages."""
    return str(getattr(factory, "__name__", None) or getattr(getattr(factory, "func", factory), "__name__", "it"))


def wrong_arguments(factory: Callable[..., object], args: Iterable[str]) -> list[Problem]:
    """Return the problems of ``optimizer.args`` that a factory does not accept."""
    parameters = list(parameters_of(factory).values())
    named = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    is_open = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    read = _names_read(factory) if is_open else frozenset()
    accepted = [name for name in named if name not in ("lr", "weight_decay", "differentiable")]
    left = [] if read is None else [name for name in args if name not in read]
    return unknown_args(name_of(factory), "optimizer.args", left, accepted)


def _names_read(factory: Callable[..., object]) -> frozenset[str] | None:
    """Return the names of ``**kwargs`` that a class may read: all strings in its code. None: any name.

    Optimizers of pytorch_optimizer take ``**kwargs`` and ignore unknown ones, so that a misspelled setting would have
    no effect.
    """
    if not isinstance(factory, type):
        return None
    found: set[str] = set()
    for base in factory.__mro__[: factory.__mro__.index(Optimizer)] if Optimizer in factory.__mro__ else ():
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
            if code is None:
                continue
            if name == "__init__" and any(each.opname == "CALL_FUNCTION_EX" for each in dis.get_instructions(code)):
                return None  # the class passes its kwargs on
            found |= _texts_in(code)
    return frozenset(found) if found else None


def _texts_in(code: CodeType) -> set[str]:
    inside = [_texts_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {each for each in code.co_consts if isinstance(each, str)}.union(*inside)


def makes_own_groups(factory: Callable[..., object]) -> bool:
    """Return True if the factory gets the model, or parameters without a rate, so that it sets rates and decays."""
    return takes_first(factory, "model") or not takes(factory, "lr")


def arguments_of(
    factory: Factory, model: nn.Module, groups: Callable[[], ParamsT], lr: float | None
) -> tuple[ParamsT | nn.Module, Mapping[str, float]]:
    """Return the arguments of a factory.

    The first argument is the model if the factory's first parameter is named ``model``. It is ``groups()`` if the
    factory accepts ``lr``, else a list of the trained parameters. ``lr`` is passed if it is accepted and set.
    """
    takes_lr = takes(factory, "lr")
    rate = {"lr": lr} if takes_lr and lr is not None else {}
    if takes_first(factory, "model"):
        return model, rate
    return groups() if takes_lr else [p for p in model.parameters() if p.requires_grad], rate


def as_one(optimizers: object, model: nn.Module, loss: object = None, *, closures: bool = False) -> Optimizer:
    """Return an optimizer, or several that are stepped together, over parameters of the model (and of the loss).

    ``closures``: accept optimizers that need a closure.

    Raises:
        UsageError: An optimizer cannot be stepped in this way, a parameter is not the model's (or the loss's), or a
            parameter is in two optimizers.
    """
    parts = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    require = require_optimizer if closures else require_plain_step
    flat = [each for part in parts for each in parts_of(require(part))]
    if not flat:
        raise UsageError("the list of optimizers is empty", remedy="give one optimizer at least, or its name")
    _require_disjoint(flat)
    _require_of(flat, model, loss)
    return flat[0] if len(flat) == 1 else ChainedOptimizer(flat)


def not_trained(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters that are in no group."""
    held = {id(p) for p in _parameters(optimizer)}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]


def require_optimizer(optimizer: object) -> Optimizer:
    """Return the optimizer. Raises UsageError for any other object."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}",
            remedy="give a torch.optim.Optimizer, a list of them, or what makes one",
        )
    return optimizer


def require_plain_step(value: object) -> Optimizer:
    """Return the optimizer. Raises UsageError for any other object, and if step needs a closure, as in LBFGS."""
    optimizer = require_optimizer(value)
    needed = [
        name
        for name, each in list(inspect.signature(type(optimizer).step).parameters.items())[1:]  # schedulers wrap step
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)}: it computes the loss again within a step",
            remedy="give a step of your own that calls it, tw.fit(..., advance=step), see docs/how-to/custom-step.md; "
            f"or choose an optimizer whose step() needs nothing, such as {', '.join(OPTIMIZERS)}",
        )
    return optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _require_disjoint(parts: Sequence[Optimizer]) -> None:
    ids = [id(p) for part in parts for p in _parameters(part)]
    if len(set(ids)) < len(ids):
        twice = len(ids) - len(set(ids))
        raise UsageError(
            f"{twice} parameters are in two optimizers, which would both move them",
            remedy="give each parameter to one of them",
        )


def _require_of(parts: Sequence[Optimizer], model: nn.Module, loss: object) -> None:
    of_loss = {id(p) for p in loss.parameters()} if isinstance(loss, nn.Module) else set()
    known = {*map(id, model.parameters()), *of_loss}
    unknown = [p for p in chain.from_iterable(map(_parameters, parts)) if id(p) not in known]
    if unknown:
        raise UsageError(
            f"{len(unknown)} parameters of the optimizer are not those of the model, the first of shape "
            f"{tuple(unknown[0].shape)}",
            remedy="make it from the parameters of the model that is trained; where the recipe changes the model "
            "(lora, several ranks), give a class or a partial: functools.partial(torch.optim.SGD, momentum=0.9)",
        )
    if sum(any(id(p) in of_loss for p in _parameters(part)) for part in parts) > 1:
        raise UsageError(
            "two optimizers have parameters of the loss", remedy="give the parameters of the loss to one of them"
        )
