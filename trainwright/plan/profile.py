"""The profile of a model's autograd graph, as data: modules, autograd nodes and saved tensors.

``fold`` makes one row of equal blocks, ``blocks.0-11 x 12``, whose numbers are sums over the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
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
    """Modules, the root first and children after their parent; nodes in the order of the forward pass, leaves last.

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

    def freed_bytes(self, module: ModuleProfile) -> int:
        """Return the bytes that activation checkpointing of this module frees: all that it keeps except its inputs.

        Storages that other nodes also keep are not freed. The result is negative if only checkpointing would keep its
        input.
        """
        inside: dict[int, int] = {}
        outside: set[int] = set()
        for node in self.nodes:
            kept = {saved.storage: saved.bytes for saved in node.saved if saved.role == "activations"}
            if within(node.module, module.path):
                inside |= kept
            else:
                outside |= set(kept)
        inputs = {saved.storage: saved.bytes for saved in module.inputs if saved.role == "activations"}
        freed = sum(size for storage, size in inside.items() if storage not in inputs and storage not in outside)
        kept_for_it = (size for storage, size in inputs.items() if storage not in inside and storage not in outside)
        return freed - sum(kept_for_it)

    def with_trace(self, trace: Trace) -> GraphProfile:
        """Return the profile with the FLOPs of one forward and backward pass, and with ``elsewhere_bytes``."""
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


MAX_ROWS_SHOWN = 32
"""The most rows shown when no depth is given."""


@dataclass(frozen=True)
class ModuleRow:
    """The sum over ``count`` equal modules and their submodules.

    ``freed_bytes`` is None for modules that are not called themselves.
    """

    path: str
    name: str
    depth: int
    count: int
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    trainable: int
    tied: tuple[str, ...]
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    freed_bytes: int | None


@dataclass(frozen=True)
class NodeRun:
    """Neighbouring autograd nodes of one module in ``count`` equal blocks. ``inputs``: the runs that feed this one."""

    path: str
    count: int
    nodes: int
    ops: tuple[tuple[str, int], ...]
    saved_bytes: int
    hidden: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Folded:
    """The module tree and the autograd graph of one step down to ``depth``, with equal blocks as one."""

    depth: int
    rows: tuple[ModuleRow, ...]
    runs: tuple[NodeRun, ...]


def fold(profile: GraphProfile, depth: int | None = None) -> Folded:
    """Fold a profile to ``depth`` levels of modules, by default as many as fit on a screen."""
    tree = _Tree(profile)
    rows = tuple(tree.rows())
    deepest = max(row.depth for row in rows)
    if depth is None:
        fits = [d for d in range(1, deepest + 1) if sum(row.depth <= d for row in rows) <= MAX_ROWS_SHOWN]
        depth = max(fits, default=1)
    depth = min(depth, deepest)
    return Folded(depth, tuple(row for row in rows if row.depth <= depth), _runs(profile, tree.names, depth))


class _Tree:
    """The folded modules of a profile. ``names`` maps each path to the path displayed for it."""

    def __init__(self, profile: GraphProfile) -> None:
        self.profile = profile
        self.children = children_of(profile.modules)
        self.names = {"": ""}
        self._signatures: dict[str, int] = {}
        self._nodes_of = _by_module(profile)
        self._groups: list[tuple[str, list[ModuleProfile]]] = [("", [profile.modules[0]])]
        self._walk([profile.modules[0]], "")

    def _walk(self, equal: list[ModuleProfile], shown: str) -> None:
        """Group the children of the ``equal`` modules, which are displayed as ``shown``."""
        first = equal[0]
        for group in _group_equal(self.children.get(first.path, []), self._signature):
            name = group[0].name if len(group) == 1 else f"{group[0].name}-{group[-1].name}"
            path = f"{shown}.{name}" if shown else name
            members = [
                module
                for each in equal
                for module in self.children[each.path]
                if module.name in {child.name for child in group}
            ]
            for member in members:
                self.names[member.path] = path
            self._groups.append((path, members))
            self._walk(members, path)

    def _signature(self, module: ModuleProfile) -> int:
        """Return a hash that is equal for modules with equal children, work and saved tensors."""
        if module.path not in self._signatures:
            below = [(child.name, self._signature(child)) for child in self.children.get(module.path, [])]
            tied = tuple(name.removeprefix(f"{module.path}.") for name in module.tied)
            itself = (module.kind, module.parameters, module.trainable, tied, module.calls, module.output)
            work = (module.forward_flops, module.backward_flops, tuple(self._nodes_of.get(module.path, ())))
            self._signatures[module.path] = hash((itself, work, tuple(below)))
        return self._signatures[module.path]

    def rows(self) -> Iterator[ModuleRow]:
        """Yield one row for each group, parents before children."""
        for path, members in self._groups:
            within_them = [module for each in members for module in self._subtree(each)]
            first = members[0]
            kept = sum(size for module in within_them for _, size, _ in self._nodes_of.get(module.path, ()))
            yield ModuleRow(
                path,
                path.rpartition(".")[2],
                path.count(".") + 1 if path else 0,
                len(members),
                first.kind,
                first.output,
                sum(module.parameters for module in within_them),
                sum(module.trainable for module in within_them),
                first.tied,
                sum(module.forward_flops for module in within_them),
                sum(module.backward_flops for module in within_them),
                kept,
                self._freed(members),
            )

    def _freed(self, members: Sequence[ModuleProfile]) -> int | None:
        first = members[0]
        if not first.path or not first.calls or not self.children.get(first.path):
            return None
        return sum(self.profile.freed_bytes(module) for module in members)

    def _subtree(self, module: ModuleProfile) -> Iterator[ModuleProfile]:
        yield module
        for child in self.children.get(module.path, []):
            yield from self._subtree(child)


def _group_equal(
    children: Sequence[ModuleProfile], signature: Callable[[ModuleProfile], int]
) -> Iterator[list[ModuleProfile]]:
    """Group equal neighbours in a list of modules; all others are groups of one."""
    for (_, numbered), group in groupby(children, key=lambda module: (signature(module), module.name.isdigit())):
        members = list(group)
        yield from [members] if numbered else ([module] for module in members)


def _by_module(profile: GraphProfile) -> dict[str, list[tuple[str, int, int]]]:
    """Return each module's own nodes, without its children's: operator, bytes, number of tensors replaced by hooks."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for node, size in zip(profile.nodes, profile.fresh_bytes, strict=True):
        found.setdefault(node.module, []).append((node.op, size, node.hidden))
    return found


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring nodes of one module, displayed as ``name``. ``turn`` numbers the module's stretches from 0."""

    name: str
    turn: int
    nodes: tuple[int, ...]


def _runs(profile: GraphProfile, names: dict[str, str], depth: int) -> tuple[NodeRun, ...]:
    """Fold the stretches of equal blocks, with the edges between them. Gradient accumulators are left out."""
    groups: dict[tuple[str, int], list[_Stretch]] = {}
    for stretch in _stretches(profile, names, depth):
        groups.setdefault((stretch.name, stretch.turn), []).append(stretch)
    number = {key: position for position, key in enumerate(groups)}
    home = {index: stretch for equal in groups.values() for stretch in equal for index in stretch.nodes}
    found = []
    for equal in groups.values():
        edges = ((each, home.get(i)) for each in equal for node in each.nodes for i in profile.nodes[node].inputs)
        behind = {number[to.name, to.turn] for each, to in edges if to is not None and to is not each}
        found.append(_run(profile, equal, tuple(sorted(behind))))
    return tuple(found)


def _run(profile: GraphProfile, equal: Sequence[_Stretch], inputs: tuple[int, ...]) -> NodeRun:
    members = [index for stretch in equal for index in stretch.nodes]
    ops = Counter(_short(profile.nodes[index].op) for index in equal[0].nodes)
    size = sum(profile.fresh_bytes[index] for index in members)
    hidden = sum(profile.nodes[index].hidden for index in members)
    return NodeRun(equal[0].name, len(equal), len(members), tuple(ops.items()), size, hidden, inputs)


def _stretches(profile: GraphProfile, names: dict[str, str], depth: int) -> Iterator[_Stretch]:
    inner = [(index, _cut(node.module, depth)) for index, node in enumerate(profile.nodes) if not node.leaf]
    turns: Counter[str] = Counter()
    for path, group in groupby(inner, key=lambda each: each[1]):
        yield _Stretch(names[path], turns[path], tuple(index for index, _ in group))
        turns[path] += 1


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth]) if path else ""


def _short(op: str) -> str:
    """Return ``Addmm`` for ``AddmmBackward0``."""
    return op.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward") or op
