"""Attributes that nothing reads: of parameters, modules and optimizers, where another name has the effect."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.calls import AttributesFacts, IdleAttribute
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runs.json_values import Facts, strict

FREEZES = "requires_grad"
CUTOFF = 0.88
"""Similarity of a name and one that it is a misspelling of, by difflib: ``require_grad`` has 0.96."""


class Attributes(Probe):
    """Reads the names of attributes when a step is examined."""

    name = AttributesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject
        self._reported: AttributesFacts | None = None

    def values(self) -> Facts | None:
        facts = AttributesFacts(tuple(self._idle()))
        if facts == self._reported:
            return None
        self._reported = facts
        return dict(strict(vars(facts)))

    def _idle(self) -> Iterator[IdleAttribute]:
        named = dict(named_parameters(self._subject.roots))
        idle = {path: name for path, p in named.items() for name in vars(p) if p.requires_grad and _resembles(name)}
        if idle:
            first = next(iter(idle))
            yield IdleAttribute(first, idle[first], FREEZES, len(idle))
        for path, module in named_modules(self._subject.roots):
            inside = sum(p.requires_grad for p in module.parameters())
            for name in vars(module):
                is_set = name == FREEZES or _resembles(name)
                if is_set and vars(module)[name] is False and inside and not _is_read(type(module), name):
                    yield IdleAttribute(path, name, f"{FREEZES}_()", inside)
        for optimizer in self._subject.optimizers:
            if type(optimizer).__module__.startswith("torch.optim"):
                yield from _of_optimizer(optimizer)


def _resembles(name: str) -> bool:
    return name != FREEZES and bool(get_close_matches(name, [FREEZES], cutoff=CUTOFF))


def _is_read(kind: type, name: str) -> bool:
    """Whether the code of a class, or of one of its bases, mentions the name."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [each for base in bases for each in vars(base).values()]
    return any(name in each.__code__.co_names for each in functions if hasattr(each, "__code__"))


def _of_optimizer(optimizer: Optimizer) -> Iterator[IdleAttribute]:
    for name in ("lr", "learning_rate"):
        value = vars(optimizer).get(name)
        if isinstance(value, int | float) and any(group.get("lr") != value for group in optimizer.param_groups):
            yield IdleAttribute(type(optimizer).__name__, name, 'param_groups[...]["lr"]', 1)
