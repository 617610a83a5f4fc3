"""Equal blocks of a model as one: ``blocks.0-11 x 12``. What is shown of a row is the sum over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from trainwright.plan.profile import GraphProfile, ModuleProfile, children_of

SCREEN = 32
"""Rows that are shown unless a depth is asked for."""


@dataclass(frozen=True)
class Row:
    """``count`` equal modules with all that is in them, summed. ``freed_bytes`` is None if nothing is called as one."""

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
class Run:
    """Neighbouring autograd nodes of one module, in ``count`` equal blocks. ``inputs``: runs it is computed from."""

    path: str
    count: int
    nodes: int
    ops: tuple[tuple[str, int], ...]
    saved_bytes: int
    hidden: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Folded:
    """The module tree and the autograd graph of one step, equal blocks as one, down to ``depth``."""

    depth: int
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]

    def to_json(self) -> dict[str, Any]:
        return {"depth": self.depth, "rows": [asdict(row) for row in self.rows], "runs": [asdict(r) for r in self.runs]}


def fold(anatomy: GraphProfile, depth: int | None = None) -> Folded:
    """Down to ``depth`` levels of modules below the model, by default the deepest that fits on a screen."""
    tree = _Tree(anatomy)
    rows = tuple(tree.rows())
    deepest = max(row.depth for row in rows)
    if depth is None:
        fits = [d for d in range(1, deepest + 1) if sum(row.depth <= d for row in rows) <= SCREEN]
        depth = max(fits, default=1)
    depth = min(depth, deepest)
    return Folded(depth, tuple(row for row in rows if row.depth <= depth), _runs(anatomy, tree.names, depth))


class _Tree:
    """The modules of an anatomy, folded. ``names`` maps each path to the one that it is shown under."""

    def __init__(self, anatomy: GraphProfile) -> None:
        self.anatomy = anatomy
        self.children = children_of(anatomy.parts)
        self.names = {"": ""}
        self._signatures: dict[str, Any] = {}
        self._own = _by_module(anatomy)
        self._groups: list[tuple[str, list[ModuleProfile]]] = [("", [anatomy.parts[0]])]
        self._walk([anatomy.parts[0]], "")

    def _walk(self, alike: list[ModuleProfile], shown: str) -> None:
        """Takes the children of ``alike``, which are equal, group by group."""
        first = alike[0]
        for group in _alike(self.children.get(first.path, []), self._signature):
            name = group[0].name if len(group) == 1 else f"{group[0].name}-{group[-1].name}"
            path = f"{shown}.{name}" if shown else name
            members = [
                part
                for each in alike
                for part in self.children[each.path]
                if part.name in {child.name for child in group}
            ]
            for member in members:
                self.names[member.path] = path
            self._groups.append((path, members))
            self._walk(members, path)

    def _signature(self, part: ModuleProfile) -> Any:
        """Equal for modules that are made of the same, do the same and keep the same."""
        if part.path not in self._signatures:
            below = [(child.name, self._signature(child)) for child in self.children.get(part.path, [])]
            tied = tuple(name.removeprefix(f"{part.path}.") for name in part.tied)
            own = (part.kind, part.parameters, part.trainable, tied, part.calls, part.output)
            work = (part.forward_flops, part.backward_flops, tuple(self._own.get(part.path, ())))
            self._signatures[part.path] = hash((own, work, tuple(below)))
        return self._signatures[part.path]

    def rows(self) -> Iterator[Row]:
        for path, members in self._groups:
            within_them = [part for each in members for part in self._subtree(each)]
            first = members[0]
            kept = sum(size for part in within_them for _, size, _ in self._own.get(part.path, ()))
            yield Row(
                path,
                path.rpartition(".")[2],
                path.count(".") + 1 if path else 0,
                len(members),
                first.kind,
                first.output,
                sum(part.parameters for part in within_them),
                sum(part.trainable for part in within_them),
                first.tied,
                sum(part.forward_flops for part in within_them),
                sum(part.backward_flops for part in within_them),
                kept,
                self._freed(members),
            )

    def _freed(self, members: Sequence[ModuleProfile]) -> int | None:
        first = members[0]
        if not first.path or not first.calls or not self.children.get(first.path):
            return None
        return sum(self.anatomy.freed_bytes(part) for part in members)

    def _subtree(self, part: ModuleProfile) -> Iterator[ModuleProfile]:
        yield part
        for child in self.children.get(part.path, []):
            yield from self._subtree(child)


def _alike(children: Sequence[ModuleProfile], signature: Any) -> Iterator[list[ModuleProfile]]:
    """Neighbours in a list of modules that are equal, together; all others alone."""
    for (_, numbered), group in groupby(children, key=lambda part: (signature(part), part.name.isdigit())):
        members = list(group)
        yield from [members] if numbered else ([part] for part in members)


def _by_module(anatomy: GraphProfile) -> dict[str, list[tuple[str, int, int]]]:
    """The nodes of each module itself: operator, bytes, saved tensors that are computed again."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for node, size in zip(anatomy.nodes, anatomy.fresh_bytes, strict=True):
        found.setdefault(node.module, []).append((node.op, size, node.hidden))
    return found


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring nodes of one module: the ``turn``-th of that module, shown under ``name``."""

    name: str
    turn: int
    nodes: tuple[int, ...]


def _runs(anatomy: GraphProfile, names: dict[str, str], depth: int) -> tuple[Run, ...]:
    """Stretches of equal blocks as one, with the edges between them. Leaves are left out."""
    stretches = list(_stretches(anatomy, names, depth))
    numbers: dict[tuple[str, int], int] = {}
    for stretch in stretches:
        numbers.setdefault((stretch.name, stretch.turn), len(numbers))
    home = {index: place for place, stretch in enumerate(stretches) for index in stretch.nodes}
    number_of = [numbers[stretch.name, stretch.turn] for stretch in stretches]
    alike: list[list[int]] = [[] for _ in numbers]
    for place, number in enumerate(number_of):
        alike[number].append(place)
    found = []
    for places in alike:
        edges = (
            (place, home.get(i)) for place in places for j in stretches[place].nodes for i in anatomy.nodes[j].inputs
        )
        behind = {number_of[to] for place, to in edges if to is not None and to != place}
        found.append(_run(anatomy, [stretches[place] for place in places], tuple(sorted(behind))))
    return tuple(found)


def _run(anatomy: GraphProfile, alike: Sequence[_Stretch], inputs: tuple[int, ...]) -> Run:
    members = [index for stretch in alike for index in stretch.nodes]
    ops = Counter(_short(anatomy.nodes[index].op) for index in alike[0].nodes)
    size = sum(anatomy.fresh_bytes[index] for index in members)
    hidden = sum(anatomy.nodes[index].hidden for index in members)
    return Run(alike[0].name, len(alike), len(members), tuple(ops.items()), size, hidden, inputs)


def _stretches(anatomy: GraphProfile, names: dict[str, str], depth: int) -> Iterator[_Stretch]:
    inner = [(index, _cut(node.module, depth)) for index, node in enumerate(anatomy.nodes) if not node.leaf]
    turns: Counter[str] = Counter()
    for path, group in groupby(inner, key=lambda each: each[1]):
        yield _Stretch(names[path], turns[path], tuple(index for index, _ in group))
        turns[path] += 1


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth]) if path else ""


def _short(op: str) -> str:
    """``AddmmBackward0`` -> ``Addmm``."""
    return op.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward") or op
