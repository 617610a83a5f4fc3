"""Parameter groups: learning rate and weight decay of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypedDict

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainwright.checkpoint.weights import unwrapped
from trainwright.errors import Problem, UsageError, suggest

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)  # _NormBase: every BatchNorm and InstanceNorm


@dataclass(frozen=True)
class GroupRule:
    """Settings for parameters whose name matches the glob ``match`` (case-sensitive; ``*`` crosses dots).

    ``lr`` replaces the learning rate, ``lr_scale`` multiplies it, ``weight_decay`` replaces the decay, also for norms
    and biases.
    """

    match: str
    lr: float | None = None
    lr_scale: float = 1.0
    weight_decay: float | None = None


Group: TypeAlias = dict[str, Any]
"""One entry of ``param_groups`` of an optimizer: ``params``, and options whose types the optimizer defines."""


class GroupSettings(TypedDict):
    """Arguments of every function that makes parameter groups; see ``param_groups``."""

    lr: float | None
    weight_decay: float | None
    decay_norms_and_biases: bool
    rules: Sequence[GroupRule]


@dataclass(frozen=True)
class Role:
    """A kind of parameters with separate groups: their learning rate, and further entries of their groups."""

    name: str
    lr: float | None
    options: tuple[tuple[str, object], ...] = ()


def param_groups(
    model: nn.Module,
    *,
    lr: float | None,
    weight_decay: float | None,
    decay_norms_and_biases: bool = True,
    rules: Sequence[GroupRule] = (),
    role_of: Callable[[nn.Parameter], Role] | None = None,
) -> list[Group]:
    """Return the trainable parameters of ``model`` in groups with equal (lr, weight_decay, role). Each has a ``name``.

    Without rules and roles this is one group, as in ``Optimizer(model.parameters())``. If ``lr`` or ``weight_decay`` is
    None, groups omit it and the optimizer's default applies. Parameters that are sharded and parameters that are not
    have separate groups, and each device mesh has its own.

    With ``decay_norms_and_biases=False``, parameters with fewer than two dimensions and parameters of norms do not
    decay. Embeddings and the output head do, as in GPT-2 and nanoGPT. The first rule that matches one of a parameter's
    names applies; a tied parameter has several names and is in one group. Parameters keep the model's order. Groups are
    ordered by their first parameter. Frozen parameters are left out.

    In a muP model (``fan_in_ratios()``, as in ``models.gpt``) the learning rate of a weight is divided by the ratio of
    its fan-in to its fan-in in the base model. Its weight decay is multiplied by this ratio, because AdamW multiplies
    learning rate and weight decay.

    Raises:
        UsageError: Nothing is trainable, a rule matches no trainable parameter, or a rule scales a learning rate that
            is not given.
    """
    names = _names(model)
    trainable = [parameter for parameter in names if parameter.requires_grad]
    if not trainable:
        raise UsageError(
            "the model has no trainable parameter", remedy="set requires_grad=True on what should be trained"
        )
    for found in unmatched_rules(model, rules):
        raise UsageError(found.rule, remedy=found.remedy)
    normed = norm_parameters(model)
    ratios = fan_in_ratios(model)
    default = Role("", lr)
    groups: dict[tuple[float | None, float | None, Role, object], Group] = {}
    for parameter in trainable:
        role = role_of(parameter) if role_of else default
        rule = next((each for each in rules if matches(each.match, names[parameter])), GroupRule("*"))
        decays = decay_norms_and_biases or (parameter.ndim >= 2 and id(parameter) not in normed)
        its_decay = weight_decay if decays else 0.0
        if rule.weight_decay is not None:
            its_decay = rule.weight_decay
        ratio = ratios.get(id(parameter), 1.0)
        its_lr = _learning_rate(role, rule, ratio)
        its_decay = its_decay * ratio if its_decay else its_decay
        mesh = getattr(parameter, "device_mesh", None)  # torch cannot update several meshes at once
        key = (its_lr, its_decay, role, mesh)
        if key not in groups:
            named = _group_name(role, its_lr, its_decay, weight_decay)
            options = {"lr": its_lr, "weight_decay": its_decay}
            stated = {name: value for name, value in options.items() if value is not None}
            groups[key] = {"name": named, **stated, **dict(role.options), "params": []}
        groups[key]["params"].append(parameter)
    return list(groups.values())


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter once, in the order of the model, with all of its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def matches(pattern: str, names: Sequence[str]) -> bool:
    """Return True if the glob matches one of the names."""
    return any(fnmatchcase(name, pattern) for name in names)


def fan_in_ratios(model: nn.Module) -> dict[int, float]:
    """Return the fan-in of each weight relative to the base model, by ``id``; empty for a model without muP."""
    ratios: dict[nn.Parameter, float] = getattr(unwrapped(model), "fan_in_ratios", dict)()
    return {id(parameter): ratio for parameter, ratio in ratios.items()}


def _learning_rate(role: Role, rule: GroupRule, ratio: float) -> float | None:
    lr = role.lr if rule.lr is None else rule.lr
    if lr is None and ratio != 1.0:
        what = "muP divides the learning rate of hidden weights, and none is given"
        raise UsageError(what, remedy="give optimizer.lr")
    if lr is None and rule.lr_scale != 1.0:
        raise UsageError(
            f"the group rule {rule.match!r} scales the learning rate, and none is given",
            remedy="give optimizer.lr, or lr in the rule",
        )
    return None if lr is None else lr * rule.lr_scale / ratio


def _group_name(role: Role, lr: float | None, decay: float | None, usual_decay: float | None) -> str:
    parts = [role.name, "no_decay" if decay == 0.0 else "decay"]
    parts += [f"lr={lr:g}"] if lr is not None and lr != role.lr else []
    parts += [f"weight_decay={decay:g}"] if decay is not None and decay not in (0.0, usual_decay) else []
    return " ".join(filter(None, parts))


def unmatched_rules(model: nn.Module, rules: Sequence[GroupRule]) -> Iterator[Problem]:
    """Yield the problems of rules that match no trainable parameter."""
    names = _names(model)
    for number, rule in enumerate(rules):
        path = f"optimizer.groups.{number}.match"
        matched = [parameter for parameter, its_names in names.items() if matches(rule.match, its_names)]
        if any(parameter.requires_grad for parameter in matched):
            continue
        if matched:
            remedy = "drop the rule, or set requires_grad=True on them"
            yield Problem(path, f"the group rule {rule.match!r} matches only frozen parameters", remedy=remedy)
            continue
        known = [name for its_names in names.values() for name in its_names]
        remedy = f"{suggest(rule.match, dict.fromkeys(_globs(known)))} (a rule is a glob on whole names)"
        yield Problem(path, f"the group rule {rule.match!r} matches no parameter", remedy=remedy)


def _globs(names: Sequence[str]) -> Iterator[str]:
    """Yield globs that a mistyped rule may mean: names, their endings ``*.weight`` and beginnings ``blocks.0.*``."""
    for name in names[:1000]:
        parts = name.split(".")
        yield name
        yield from ("*." + ".".join(parts[cut:]) for cut in range(1, len(parts)))
        yield from (".".join(parts[:cut]) + ".*" for cut in range(1, len(parts)))


def norm_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of norm modules."""
    norms = (module for module in model.modules() if isinstance(module, NORMS))
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
