"""Finds attributes of parameters, modules and optimizers that nothing reads, such as misspelt names."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache

from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.calls import AttributesFacts, IdleAttribute
from trainwright.recorder.probes import Probe, WatchedObjects

REQUIRES_GRAD = "requires_grad"
MIN_NAME_SIMILARITY = 0.88
"""Minimum difflib similarity of a misspelt name: ``require_grad`` and ``requires_grad`` have 0.96."""


class Attributes(Probe):
    """Examines the names of attributes at each examination."""

    name = AttributesFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject

    def facts(self) -> AttributesFacts:
        return AttributesFacts(tuple(self._idle()))

    def _idle(self) -> Iterator[IdleAttribute]:
        named = dict(named_parameters(self._subject.roots))
        idle = {path: name for path, p in named.items() for name in vars(p) if p.requires_grad and _resembles(name)}
        if idle:
            first = next(iter(idle))
            yield IdleAttribute(first, idle[first], REQUIRES_GRAD, len(idle))
        for path, module in named_modules(self._subject.roots):
            inside = sum(p.requires_grad for p in module.parameters())
            for name in vars(module):
                is_set = name == REQUIRES_GRAD or _resembles(name)
                if is_set and vars(module)[name] is False and inside and not _is_read(type(module), name):
                    yield IdleAttribute(path, name, f"{REQUIRES_GRAD}_()", inside)
        for optimizer in self._subject.optimizers:
            if type(optimizer).__module__.startswith("torch.optim"):
                yield from _of_optimizer(optimizer)


@lru_cache(maxsize=4096)  # the same few names at each module and each examination
def _resembles(name: str) -> bool:
    return name != REQUIRES_GRAD and bool(get_close_matches(name, [REQUIRES_GRAD], cutoff=MIN_NAME_SIMILARITY))


def _is_read(kind: type, name: str) -> bool:
    """Returns True if the code of a class, or of one of its bases, contains the name."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [each for base in bases for each in vars(base).values()]
    return any(name in each.__code__.co_names for each in functions if hasattr(each, "__code__"))


def _of_optimizer(optimizer: Optimizer) -> Iterator[IdleAttribute]:
    for name in ("lr", "learning_rate"):
        value = vars(optimizer).get(name)
        if isinstance(value, int | float) and any(group.get("lr") != value for group in optimizer.param_groups):
            yield IdleAttribute(type(optimizer).__name__, name, 'param_groups[...]["lr"]', 1)
