"""The structure of live objects by name and number. A recorded step only runs on objects of its structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.snapshot import LiveObjects


@dataclass(frozen=True)
class Structure:
    """The names of live objects. A bundle only runs on objects of the same structure.

    ``trained`` is ``requires_grad`` of each parameter. ``optimizers`` holds the class of each optimizer, and the
    numbers of the parameters in each of its groups.
    """

    parameters: list[str]
    trained: list[bool]
    modules: list[str]
    buffers: list[str]
    roots: list[str]
    optimizers: list[tuple[str, list[list[int]]]]

    @classmethod
    def of(cls, subject: LiveObjects, names: Sequence[str]) -> Structure:
        """Returns the structure of live objects. ``names`` are the names of ``subject.parameters``."""
        numbers = {id(p): number for number, p in enumerate(subject.parameters)}
        paths = _paths(subject.roots)
        return cls(
            list(names),
            [p.requires_grad for p in subject.parameters],
            [paths[id(module)] for module in subject.modules],
            [f"{paths[id(module)]}.{name}".lstrip(".") for module, name in subject.buffers()],
            [class_name(root) for root in subject.roots],
            [
                (class_name(o), [[numbers[id(p)] for p in group["params"]] for group in o.param_groups])
                for o in subject.optimizers
            ],
        )


def difference(what: str, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Returns text on the first difference between the names of the live objects and those of a bundle."""
    missing, left = [n for n in theirs if n not in ours], [n for n in ours if n not in theirs]
    if missing:
        return f"it has no {what} {missing[0]!r}, as the bundle has"
    return f"the bundle has no {what} {left[0]!r}" if left else f"its {what}s come in another order"


def class_name(value: nn.Module | Optimizer) -> str:
    """Returns the class of ``value`` with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _paths(roots: Sequence[nn.Module]) -> dict[int, str]:
    paths: dict[int, str] = {}
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            paths.setdefault(id(module), ".".join(each for each in (str(number), path) if each))
    return paths
