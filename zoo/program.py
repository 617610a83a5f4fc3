"""The source of a host as something to be changed: its statements and expressions, and edits of its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Simple = ast.Expr | ast.Assign | ast.AugAssign
LIBRARIES = {"torch", "nn", "F", "math", "copy", "io", "self"}
TOUCHED = {
    "resume": r"load_state_dict|torch\.(load|save)|checkpoint|\bbest\b|\bkept = |\bstate\b.*state_dict|BytesIO",
    "schedule": r"scheduler|lr_at|schedule\(|\[.lr.\]|LambdaLR",
    "clip": r"clip_grad",
    "precision": r"scaler|autocast|float16",
    "backward": r"\.backward\(|zero_grad",
    "optimizer": r"optimizer|param_groups|\bp\.requires_grad",
    "mode": r"\.(train|eval)\(\)",
    "average": r"average",
    "evaluation": r"evaluate|val_|held_out|shown|accuracy|distance\(",
    "loss": r"loss|criterion",
}
"""What a statement of the loop is about, by its text; the first that fits. What fits none is about the data."""
SCOPES = {
    "evaluation": r"^evaluate|accuracy|^distance",
    "loss": r"loss|nce|penalty",
    "schedule": r"^schedule|^lr_at",
    "average": r"average",
    "optimizer": r"^param_groups",
    "model": r"^adapt|^time_features",
    "data": r"^collate|^augment|^discounted|^play|^add_noise|^noise_schedule",
}


@dataclass(frozen=True)
class Edit:
    """``text`` in place of what stands from ``first`` to ``last``, both (line, column) as ``ast`` counts them."""

    first: tuple[int, int]
    last: tuple[int, int]
    text: str


Change = tuple[Edit, ...]


class Program:
    """A host's source; ``lines`` keep their numbers as far as an edit lets them."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, path.read_text()
        self.lines = self.source.splitlines(keepends=True)
        self.tree = ast.parse(self.source)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def text(self, node: ast.AST) -> str:
        """What stands there, which is ASCII."""
        (top, left), (bottom, right) = start(node), end(node)
        if top == bottom:
            return self.lines[top - 1][left:right]
        return "".join([self.lines[top - 1][left:], *self.lines[top : bottom - 1], self.lines[bottom - 1][:right]])

    def changed(self, change: Change) -> str:
        """The source after the edits."""
        lines = list(self.lines)
        for edit in sorted(change, key=lambda each: each.first, reverse=True):
            (top, left), (bottom, right) = edit.first, edit.last
            head, tail = lines[top - 1][:left], lines[bottom - 1][right:]
            lines[top - 1 : bottom] = [head + edit.text + tail]
        return "".join(lines)

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """What may be changed, in the order of the source.

        Not imports, types, names of things, the call of the watch, and what is reported at the end.
        """
        return list(self._live(self.tree))

    def _live(self, node: ast.AST) -> Iterator[ast.AST]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "bases", "ctx", "op", "ops"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self._is_fixed(child):
                    yield child
                    yield from self._live(child)

    def _is_fixed(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, ast.Return):
            return any(isinstance(each, ast.Name) and each.id == "Report" for each in ast.walk(node))
        is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_doc or (isinstance(node, ast.Call) and self.text(node.func) == "watch")

    def of(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in self.nodes if isinstance(node, kinds))

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def blocks(self) -> Sequence[list[ast.stmt]]:
        """Runs of statements at one level."""
        live = set(self.nodes)
        found = []
        for node in (self.tree, *self.nodes):
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
                    found.append([each for each in block if each in live])
        return found

    @cached_property
    def statements(self) -> Sequence[Simple]:
        """Simple statements within functions."""
        return [each for block in self.blocks for each in block if isinstance(each, Simple)]

    @cached_property
    def optional(self) -> Sequence[Simple]:
        """Statements without which every name still has a value."""
        return [each for each in self.statements if not self.fresh(each)]

    def fresh(self, node: ast.AST) -> set[str]:
        """Names that only this statement of its function gives a value to, and attributes that a constructor sets."""
        stored = self.stores(node)
        scope = self.scope(node)
        if scope is None or isinstance(node, ast.AugAssign):
            return set()
        elsewhere = {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
        inside = set(ast.walk(node))
        elsewhere |= {each.id for each in ast.walk(scope) if _is_store(each) and each not in inside}
        own = {
            self.text(each) for each in inside if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        }
        return (stored - elsewhere) | (own if scope.name == "__init__" else set())

    @staticmethod
    def stores(node: ast.AST) -> set[str]:
        return {each.id for each in ast.walk(node) if _is_store(each)}

    @staticmethod
    def loads(node: ast.AST) -> set[str]:
        return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}

    @cached_property
    def values(self) -> Sequence[ast.expr]:
        """Expressions that may well be tensors: what is assigned, returned, handed on or reckoned with."""
        found = []
        for node in self.nodes:
            if not isinstance(node, ast.Name | ast.Call | ast.BinOp | ast.Subscript) or not self._is_value(node):
                continue
            found.append(node)
        return found

    def _is_value(self, node: ast.expr) -> bool:
        scope, parent = self.scope(node), self.parents[node]
        if scope is None or scope.name == "__init__" or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return False
        if isinstance(node, ast.Name) and node.id in LIBRARIES:
            return False
        if isinstance(node, ast.Call) and isinstance(parent, ast.Expr):
            return False
        return isinstance(parent, ast.Assign | ast.Return | ast.AugAssign | ast.Call | ast.BinOp) and not (
            isinstance(parent, ast.Call) and parent.func is node
        )

    def scope(self, node: ast.AST) -> Function | None:
        """The function that a node stands in."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Function):
                return node
        return None

    def loop(self, node: ast.AST) -> ast.For | None:
        """The innermost loop that a node stands in, of its own function."""
        while node in self.parents and not isinstance(node := self.parents[node], Function):
            if isinstance(node, ast.For):
                return node
        return None

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node]
        return node

    def module_class(self, node: ast.AST) -> str | None:
        """The name of the class that a node stands in."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.ClassDef):
                return node.name
        return None

    def touched(self, line: int) -> str:
        """What the statement at a line is about: model, data, or a word of TOUCHED."""
        inner = [
            each for each in ast.walk(self.tree)
            if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or line)
        ]  # fmt: skip
        node = max(inner, key=lambda each: (each.lineno, -(each.end_lineno or 0)))
        name = self.module_class(node)
        if name is not None:
            bases = next(each for each in self.tree.body if isinstance(each, ast.ClassDef) and each.name == name).bases
            text = " ".join(map(self.text, bases))
            return "data" if "Dataset" in text else "model" if "Module" in text else "average"
        scope = self.scope(node)
        found = [kind for kind, words in SCOPES.items() if scope is not None and re.search(words, scope.name)]
        text = self.text(node).splitlines()[0] if isinstance(node, ast.For | ast.With | ast.If) else self.text(node)
        found += [kind for kind, words in TOUCHED.items() if re.search(words, text)]
        return (found or ["data"])[0]


def _is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def start(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def instead(node: ast.AST, text: str) -> Change:
    """``text`` in place of a node."""
    return (Edit(start(node), end(node), text),)
