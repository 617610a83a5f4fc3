"""Attributes and keys that nothing reads, and whose names are nearly those of some that are read."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.doctor.program.facts import NamesFacts, UnreadName
from trainwright.recorder.own_functions import own_functions
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.names import named_modules, named_parameters
from trainwright.state.snapshot import TORCHS_OWN

MEANT = {
    "lr": ("learning_rate", "learningrate", "lrate", "LR"),
    "weight_decay": ("wd", "decay", "l2"),
    "p": ("rate", "prob", "dropout", "dropout_rate", "drop_prob"),
    "requires_grad": ("trainable", "frozen", "requires_gradient", "require_grads"),
    "grad": ("gradient", "grads"),
}
"""Other words that people use for a name."""
OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "params", "param_names", "name")
)
"""Keys of a parameter group that schedulers and torch itself write."""


class NamesProbe(Probe):
    """Looks at checkups at what the loop has set on optimizers, their groups, modules and parameters."""

    name = NamesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject, self._watched = watched.subject, watched
        self._told: NamesFacts | None = None

    def values(self) -> Facts | None:
        found = [
            *(each for optimizer in self._subject.optimizers for each in _of_optimizer(optimizer)),
            *(each for path, module in named_modules(self._subject.roots) for each in _of_module(path, module)),
            *(each for path, p in named_parameters(self._subject.roots) for each in _of_parameter(path, p)),
            *_of_settings(self._watched),
        ]
        objects = len(self._subject.optimizers) + len(self._subject.modules) + len(self._subject.parameters)
        facts = NamesFacts(objects, tuple(found[:16]))
        if facts == self._told:
            return None
        self._told = facts
        return dict(strict(vars(facts)))


def _of_optimizer(optimizer: Optimizer) -> Iterator[UnreadName]:
    kind = type(optimizer).__name__
    keys = [*optimizer.defaults]
    own = {name for name in vars(optimizer) if not name.startswith("_")} - {"defaults", "state", "param_groups"}
    for name in sorted(own - _read_by(type(optimizer), "torch.optim")):
        if (known := nearly(name, keys, itself=True)) is not None:
            yield UnreadName(f"the optimizer ({kind})", name, f'param_groups[...]["{known}"]', _shown(optimizer, name))
    for number, group in enumerate(optimizer.param_groups):
        for name in group.keys() - set(keys) - OF_SCHEDULERS:
            if (known := nearly(name, keys)) is not None:
                value = str(group[name])[:60]
                yield UnreadName(f"group {number} of the optimizer", name, f'"{known}" of the group', value)


def _of_module(path: str, module: nn.Module) -> Iterator[UnreadName]:
    """Of torch's own classes also what their constructor takes; of others only what every module has."""
    own = {name for name in vars(module).keys() - TORCHS_OWN if not name.startswith("_")}
    is_torchs = type(module).__module__.startswith("torch.nn.")
    taken = [n for n in _arguments(type(module)) if n in vars(module)] if is_torchs else []
    for name in sorted(own - set(taken) - _read_by(type(module), "torch.nn.modules.module")):
        known = "requires_grad_()" if name == "requires_grad" else nearly(name, ["training", "requires_grad", *taken])
        if known is not None:
            yield UnreadName(path or type(module).__name__, name, known, _shown(module, name), path)


def _of_parameter(path: str, parameter: torch.Tensor) -> Iterator[UnreadName]:
    for name in sorted(vars(parameter)):
        if (known := nearly(name, ["requires_grad", "grad"])) is not None:
            yield UnreadName(path, name, known, _shown(parameter, name), path.rpartition(".")[0])


def _of_settings(watched: WatchedObjects) -> Iterator[UnreadName]:
    """Of dataclasses in the loop's variables: attributes beside their fields, where a field has its default still."""
    values = {id(each): each for each in watched.values() if is_dataclass(each) and not isinstance(each, type)}
    for value in values.values():
        known = {each.name for each in fields(value)}
        untouched = [each.name for each in fields(value) if _is_at_default(value, each)]
        others = {name for name in getattr(value, "__dict__", {}) if name not in known and not name.startswith("_")}
        near = [(name, field) for name in sorted(others) if (field := nearly(name, untouched)) is not None]
        read = _read_in([watched.values(), watched.subject.roots], watched.code()) if near else set()
        for name, field in near:
            if name not in read:
                yield UnreadName(f"an object ({type(value).__name__})", name, field, _shown(value, name))


def _is_at_default(value: object, field: Field[Any]) -> bool:
    default = field.default
    return isinstance(default, int | float | str | None) and getattr(value, field.name, MISSING) == default


def _read_in(values: Iterable[object], loop: CodeType | None) -> set[str]:
    """The attributes that the loop reads, and the functions that it reaches."""
    codes = [*own_functions(values), *([] if loop is None else [loop])]
    return {name for code in codes for name in _attributes_read(code)}


def _attributes_read(code: CodeType) -> Iterator[str]:
    yield from (str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for inner in (each for each in code.co_consts if isinstance(each, CodeType)):
        yield from _attributes_read(inner)


def _arguments(kind: type) -> list[str]:
    return [*inspect.signature(kind.__init__).parameters]  # type: ignore[misc]


def _read_by(kind: type, besides: str) -> set[str]:
    """Names that the code of a class and of its bases reads, and those that it defines itself."""
    bases = [each for each in kind.__mro__ if each is not object and not each.__module__.startswith(besides)]
    functions = [f for each in bases for f in vars(each).values() if hasattr(f, "__code__")]
    return {name for f in functions for name in f.__code__.co_names} | {name for each in bases for name in vars(each)}


def _shown(owner: object, name: str) -> str:
    return str(getattr(owner, name))[:60]


def nearly(name: str, known: Iterable[str], *, itself: bool = False) -> str | None:
    """The known name that ``name`` is a misspelling of, or another word for; ``itself``: or that it is."""
    for each in known:
        if name == each:
            if itself:
                return each
            continue
        plain, other = (text.lower().replace("_", "") for text in (name, each))
        if plain == other or name in MEANT.get(each, ()) or (len(each) >= 4 and _is_one_edit(name, each)):
            return each
    return None


def _is_one_edit(one: str, other: str) -> bool:
    """Whether a letter more, less, other or swapped with its neighbour makes one of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) > 1:
        return False
    at = next((n for n, (a, b) in enumerate(zip(short, long)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at + 1 : at + 2] + short[at : at + 1] + short[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or swapped == long[at:]
