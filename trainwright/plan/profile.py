"""The profile of a model's autograd graph, as data: modules, autograd nodes and saved tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trainwright.plan.call_trace import Trace

LOSS = "(loss)"
"""The path that stands for operators after the model."""
Role = Literal["weights", "buffers", "inputs", "activations"]


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: its name at the node, and the number, bytes and role of its storage."""

    name: str
    storage: int
    bytes: int
    role: Role


@dataclass(frozen=True)
class Node:
    """One autograd node. ``inputs`` are the nodes that it passes gradients to, in the order of its inputs.

    ``leaf`` is the name of the parameter whose gradient the node accumulates. ``hidden`` counts saved tensors that
    hooks replaced, as activation checkpointing does: they are not kept, and are not in ``saved``.
    """

    op: str
    module: str
    saved: tuple[SavedTensor, ...]
    inputs: tuple[int, ...]
    leaf: str = ""
    hidden: int = 0


@dataclass(frozen=True)
class ModuleProfile:
    """One module. Parameters and FLOPs exclude its children's; a tied weight counts at its first occurrence.

    ``tied`` names the weights that it shares with other modules. ``inputs`` are the tensors that it was called with.
    """

    path: str
    kind: str
    parameters: int
    trainable: int
    tied: tuple[str, ...] = ()
    calls: int = 0
    output: tuple[int, ...] | None = None
    inputs: tuple[SavedTensor, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class GraphProfile:
    """Modules, the root first and children behind their parent; nodes in the order of the forward pass, leaves last.

    ``elsewhere_bytes`` are also kept for backward, but not in a saved tensor, such as workspaces of kernels.
    """

    modules: tuple[ModuleProfile, ...]
    nodes: tuple[Node, ...]
    elsewhere_bytes: int = 0

    @property
    def edges(self) -> int:
        return sum(len(node.inputs) for node in self.nodes)

    @cached_property
    def fresh_bytes(self) -> tuple[int, ...]:
        """For each node the bytes of activations that no earlier node keeps, so that each storage counts once in the
        sum.
        """
        seen: set[int] = set()
        found = []
        for node in self.nodes:
            new = {saved.storage: saved.bytes for saved in node.saved if saved.role == "activations"}
            found.append(sum(size for storage, size in new.items() if storage not in seen))
            seen |= set(new)
        return tuple(found)

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that are kept for the backward pass."""
        return sum(self.fresh_bytes)

    def below(self, path: str) -> list[int]:
        """Return the positions of the nodes that a module and its submodules made."""
        return [index for index, node in enumerate(self.nodes) if within(node.module, path)]

    def freed_bytes(self, module: ModuleProfile) -> int:
        """Return the bytes that activation checkpointing of this module frees: all that it keeps except its inputs.

        Storages that other nodes also keep are not freed. The result is negative if only checkpointing would keep its
        input.
        """
        inside, outside = self._keepers(module.path)
        inputs = {saved.storage: saved.bytes for saved in module.inputs if saved.role == "activations"}
        freed = sum(size for storage, size in inside.items() if storage not in inputs and storage not in outside)
        kept_for_it = (size for storage, size in inputs.items() if storage not in inside and storage not in outside)
        return freed - sum(kept_for_it)

    def _keepers(self, path: str) -> tuple[dict[int, int], set[int]]:
        inside: dict[int, int] = {}
        outside: set[int] = set()
        for node in self.nodes:
            kept = {saved.storage: saved.bytes for saved in node.saved if saved.role == "activations"}
            if within(node.module, path):
                inside |= kept
            else:
                outside |= set(kept)
        return inside, outside

    def with_trace(self, trace: Trace) -> GraphProfile:
        """Return the profile with the FLOPs of one forward and backward pass, and the bytes beside saved tensors."""
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        for each in trace.work:
            if each.phase in ("forward", "backward"):
                (forward if each.phase == "forward" else backward)[each.module] += each.flops
        modules = (
            replace(module, forward_flops=forward[module.path], backward_flops=backward[module.path])
            for module in self.modules
        )
        elsewhere = max(0, sum(trace.kept.values()) - self.saved_bytes)
        return replace(self, modules=tuple(modules), elsewhere_bytes=elsewhere)

    def to_json(self) -> dict[str, object]:
        """Return all modules and nodes. ``edges`` are pairs of positions in ``nodes``: a node and one of its inputs."""
        modules = [
            {
                "path": module.path,
                "class": module.kind,
                "parameters": module.parameters,
                "trainable": module.trainable,
                "tied": list(module.tied),
                "output": None if module.output is None else list(module.output),
                "forward_flops": module.forward_flops,
                "backward_flops": module.backward_flops,
            }
            for module in self.modules
        ]
        nodes = [
            {
                "op": node.op,
                "module": node.module,
                "leaf": node.leaf,
                "saved": [vars(saved) for saved in node.saved],
                "computed_again": node.hidden,
            }
            for node in self.nodes
        ]
        edges = [[index, behind] for index, node in enumerate(self.nodes) for behind in node.inputs]
        return {"modules": modules, "nodes": nodes, "edges": edges, "saved_bytes": self.saved_bytes}


def within(path: str, above: str) -> bool:
    """Return True if the module ``path`` is ``above`` or one of its submodules."""
    return not above or path == above or path.startswith(f"{above}.")


def children_of(modules: Iterable[ModuleProfile]) -> Mapping[str, list[ModuleProfile]]:
    """Return the children of each module, by its path."""
    found: dict[str, list[ModuleProfile]] = {}
    for module in modules:
        if module.path:
            found.setdefault(module.path.rpartition(".")[0], []).append(module)
    return found
