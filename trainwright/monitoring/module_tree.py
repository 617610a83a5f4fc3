"""The modules of a model as a tree of plain values (names, classes and parameters), for the page of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn
from torch.nn.parameter import is_lazy

MAX_MODULES = 2000
"""Maximum number of modules in a tree. The tree of a larger model has fewer levels."""
MAX_DEPTH = 32


@dataclass(frozen=True)
class ModuleNode:
    """A module and its submodules. ``count`` equal modules follow each other, from ``name`` to ``last``.

    ``parameters`` is the number of parameters of one of these modules. Shared parameters count in each module.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    children: tuple[ModuleNode, ...] = ()
    count: int = 1
    last: str = ""

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "children": [each.to_json() for each in self.children]}


def module_tree(model: nn.Module) -> ModuleNode:
    """Return the tree of ``model``. Equal neighbours, as the blocks of a transformer, are one node with a count."""
    return _node("", model, _depth_of(model))


def model_facts(models: Sequence[nn.Module], references: Mapping[str, float] = MappingProxyType({})) -> object:
    """Return the content of model.json: the trees, and reference losses by name, such as that of a bigram model."""
    return {"modules": [module_tree(model).to_json() for model in models], "reference_losses": dict(references)}


def _depth_of(model: nn.Module) -> int:
    """Return the number of levels with at most MAX_MODULES modules."""
    level = [model]
    depth = 0
    seen = 1
    while level and seen <= MAX_MODULES and depth < MAX_DEPTH:
        level = [child for module in level for child in module.children()]
        depth, seen = depth + 1, seen + len(level)
    return depth - 1 if seen > MAX_MODULES else depth


def _node(name: str, module: nn.Module, depth: int) -> ModuleNode:
    own = [each for each in module.parameters() if not is_lazy(each)]
    children = tuple(_joined(_node(*child, depth - 1) for child in module.named_children())) if depth > 0 else ()
    trained = sum(each.numel() for each in own if each.requires_grad)
    return ModuleNode(name, type(module).__name__, sum(each.numel() for each in own), trained, children)


def _joined(nodes: Iterator[ModuleNode]) -> Iterator[ModuleNode]:
    held: ModuleNode | None = None
    for node in nodes:
        if held is not None and replace(held, name=node.name, count=1, last="") == node:
            held = replace(held, count=held.count + 1, last=node.name)
            continue
        if held is not None:
            yield held
        held = node
    if held is not None:
        yield held
