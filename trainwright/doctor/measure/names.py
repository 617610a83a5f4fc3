"""Attributes and keys that nothing reads, and whose names resemble some that are read."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.doctor.facts.calls import NamesFacts, UnreadName
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
"""Other words for a name."""
OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "params", "param_names", "name")
)
"""Keys of a parameter group that schedulers and torch itself write."""


class Names(Probe):
    """At examinations, reads what the loop has set on optimizers, their groups, modules and parameters."""

    name = NamesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject
        self._reported: NamesFacts | None = None

    def values(self) -> Facts | None:
        subject = self._subject
        found = [
            *(each for optimizer in subject.optimizers for each in _of_optimizer(optimizer)),
            *(each for path, module in named_modules(subject.roots) for each in _of_module(path, module)),
            *(each for path, p in named_parameters(subject.roots) for each in _of_parameter(path, p)),
        ]
        objects = len(subject.optimizers) + len(subject.modules) + len(subject.parameters)
        facts = NamesFacts(objects, tuple(found[:16]))
        if facts == self._reported:
            return None
        self._reported = facts
        return dict(strict(vars(facts)))


def _of_optimizer(optimizer: Optimizer) -> Iterator[UnreadName]:
    keys = [*optimizer.defaults]
    own = {name for name in vars(optimizer) if not name.startswith("_")} - {"defaults", "state", "param_groups"}
    for name in sorted(own - _read_by(type(optimizer), "torch.optim")):
        if (known := nearly(name, keys, itself=True)) is not None:
            owner = f"the optimizer ({type(optimizer).__name__})"
            yield UnreadName(owner, name, f'param_groups[...]["{known}"]', _shown(optimizer, name))
    for number, group in enumerate(optimizer.param_groups):
        for name in group.keys() - {*keys} - OF_SCHEDULERS:
            if (known := nearly(name, keys)) is not None:
                yield UnreadName(
                    f"group {number} of the optimizer", name, f'"{known}" of the group', str(group[name])[:60]
                )


def _of_module(path: str, module: nn.Module) -> Iterator[UnreadName]:
    """Of torch's own classes also what their constructor takes; of others only what every module has."""
    own = {name for name in vars(module).keys() - TORCHS_OWN if not name.startswith("_")}
    is_torchs = type(module).__module__.startswith("torch.nn.")
    arguments = inspect.signature(type(module).__init__).parameters
    taken = [name for name in arguments if name in vars(module)] if is_torchs else []
    for name in sorted(own - {*taken} - _read_by(type(module), "torch.nn.modules.module")):
        known = "requires_grad_()" if name == "requires_grad" else nearly(name, ["training", "requires_grad", *taken])
        if known is not None:
            yield UnreadName(path or type(module).__name__, name, known, _shown(module, name), path)


def _of_parameter(path: str, parameter: torch.Tensor) -> Iterator[UnreadName]:
    for name in sorted(vars(parameter)):
        if (known := nearly(name, ["requires_grad", "grad"])) is not None:
            yield UnreadName(path, name, known, _shown(parameter, name), path.rpartition(".")[0])


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
        if (
            plain == other
            or name in MEANT.get(each, ())
            or (len(each) >= 4 and get_close_matches(name, [each], cutoff=0.88))
        ):
            return each
    return None
