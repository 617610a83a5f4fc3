"""The functions of a program that its loop may reach, from the syntax of its file; the program is never run.

Of each it is known which names are read, which are assigned where, and which come of the model or of the data.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from trainwright.doctor.loops import last_name, name_of

Function: TypeAlias = ast.FunctionDef | ast.Module
GROWS = ("append", "extend", "add", "appendleft")
"""Methods that put something into a container."""
FRESH = ("zeros", "zeros_like", "ones", "ones_like", "float", "int", "list", "dict", "set", "defaultdict", "tensor")
"""Calls that make a constant or an empty container."""
OPEN = ("locals", "vars", "globals", "eval", "exec", "dir")
"""Functions that may read any name."""
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ROUNDS = 4
"""Functions within functions through which what comes of the data is followed."""


@dataclass
class FunctionSyntax:
    """A function of the program, or the whole file where the loop stands in none.

    ``of_data`` are its names whose values come of the model, the optimizer or the data.
    """

    node: Function
    is_method: bool = False
    of_data: set[str] = field(default_factory=set)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Those of ``ast.walk``, which takes a microsecond for each."""
        return list(ast.walk(self.node))

    @cached_property
    def parameters(self) -> list[str]:
        return [] if isinstance(self.node, ast.Module) else [each.arg for each in self.node.args.args]

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The parameters that a call need not give, and what they are without it."""
        values = [] if isinstance(self.node, ast.Module) else self.node.args.defaults
        return dict(zip(self.parameters[len(self.parameters) - len(values) :], values))

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """Its own, in the order of the source, without those of functions and classes within it."""
        return [each for block in self.blocks for each in block]

    @cached_property
    def blocks(self) -> list[list[ast.stmt]]:
        return list(_blocks(self.node.body))

    @cached_property
    def read(self) -> set[str]:
        """The names that it reads, also within functions of its own; to put into a container is not to read it."""
        written = {id(each) for node in self.nodes if (each := _written(node)) is not None}
        names = [each for each in self.nodes if isinstance(each, ast.Name) and id(each) not in written]
        outer = {name for node in self.nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        return {each.id for each in names if not isinstance(each.ctx, ast.Store)} | outer

    @cached_property
    def in_nested(self) -> set[str]:
        """The names that functions and classes within it read."""
        inner = [n for n in self.nodes if isinstance(n, (*NESTED, ast.ClassDef)) and n is not self.node]
        return {each.id for node in inner for each in ast.walk(node) if isinstance(each, ast.Name)}

    @cached_property
    def is_open(self) -> bool:
        """Whether it looks at its names in a way that the syntax does not show."""
        return any(name_of(each.func) in OPEN for each in self.nodes if isinstance(each, ast.Call))

    def assigned(self, name: str) -> list[ast.stmt]:
        """The statements that set a name, as a whole or a part of it."""
        return [each for each in self.statements if name in stored(each)]


class ProgramSyntax:
    """The file of a loop. ``functions`` are those that it may reach, itself first; ``given``: to the watch."""

    def __init__(self, tree: ast.Module, first_line: int) -> None:
        """``first_line`` is that of the function that holds the loop; 0 where it stands in none."""
        self.tree = tree
        defined = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        nodes = list(ast.walk(tree))
        found = [each for each in nodes if isinstance(each, ast.FunctionDef) and _begins(each) == first_line]
        self.loop = FunctionSyntax(found[0] if found else tree)
        self.functions, waiting, seen = [self.loop], list(self.loop.read), set[str]()
        while waiting:
            node = defined.get(name := waiting.pop())
            if node is None or name in seen or node is self.loop.node:
                continue
            seen.add(name)
            is_class = isinstance(node, ast.ClassDef)
            body = [each for each in node.body if isinstance(each, ast.FunctionDef)] if is_class else [node]
            new = [FunctionSyntax(each, is_class) for each in body if isinstance(each, ast.FunctionDef)]
            self.functions += new
            waiting += [each for function in new for each in function.read]
        self.given = {name for node in self.loop.nodes if isinstance(node, ast.With) for name in _given(node)}
        self.loop.of_data |= self.given
        self._follow_data()

    def _follow_data(self) -> None:
        self.by_name = {name_of_function(each): each for each in self.functions if not each.is_method}
        for _ in range(ROUNDS):
            for function in self.functions:
                self._follow(function)

    @property
    def first_lines(self) -> set[int]:
        """Where its functions begin."""
        return {_begins(each.node) for each in self.functions if isinstance(each.node, ast.FunctionDef)}

    def calls(self, name: str) -> list[tuple[FunctionSyntax, ast.Call]]:
        """The calls of a function by its name, each with the function that it stands in."""
        every = [(f, n) for f in self.functions for n in f.nodes if isinstance(n, ast.Call)]
        return [(function, call) for function, call in every if name_of(call.func) == name]

    def is_only_called(self, name: str) -> bool:
        """Whether a function is called wherever it is named: none takes it as a value."""
        named, called = self._times
        return named[name] == called[name]

    @cached_property
    def _times(self) -> tuple[Counter[str], Counter[str]]:
        """How often each name stands in the file, and is called."""
        nodes = list(ast.walk(self.tree))
        named = Counter(each.id for each in nodes if isinstance(each, ast.Name))
        return named, Counter(name_of(each.func) for each in nodes if isinstance(each, ast.Call))

    def is_watch(self, node: ast.With) -> bool:
        """Whether it is the ``with`` that holds the loop."""
        return any(True for _ in _given(node))

    def _follow(self, function: FunctionSyntax) -> None:
        """Marks what is made of the data, and the parameters of other functions that it is given to."""
        if function.is_method:
            function.of_data |= set(function.parameters)
        for statement in function.statements:
            if names_read(statement_value(statement)) & function.of_data or _makes_loader(statement):
                function.of_data |= stored(statement)
        for call in (each for each in function.nodes if isinstance(each, ast.Call)):
            other = self.by_name.get(name_of(call.func))
            if other is not None:
                given = arguments(call, other)
                other.of_data |= {name for name, value in given if names_read(value) & function.of_data}


class OtherFileSyntax(ProgramSyntax):
    """A file of the user's that holds no loop. ``functions`` are those that the objects of the loop reach."""

    def __init__(self, tree: ast.Module, first_lines: Container[int]) -> None:
        self.tree, self.given = tree, set()
        self.loop = FunctionSyntax(ast.Module([], []))
        nodes = list(ast.walk(tree))
        methods = {id(each) for node in nodes if isinstance(node, ast.ClassDef) for each in node.body}
        found = [each for each in nodes if isinstance(each, ast.FunctionDef) and _begins(each) in first_lines]
        self.functions = [FunctionSyntax(each, id(each) in methods) for each in found]
        for each in self.functions:
            each.of_data |= set(each.parameters)
        self._follow_data()


def name_of_function(function: FunctionSyntax) -> str:
    return getattr(function.node, "name", "")


def arguments(call: ast.Call, function: FunctionSyntax) -> Iterator[tuple[str, ast.expr]]:
    """What a call gives to which parameter, by place or by name."""
    yield from zip(function.parameters, call.args)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg is not None)


def stored(statement: ast.stmt) -> set[str]:
    """The names that a statement sets, or puts something into: not those of the statements within it."""
    if isinstance(statement, ast.Expr):
        return {grown.id} if (grown := _written(statement.value)) is not None else set()
    targets = targets_of(statement)
    names = [n for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Store)} | {
        each.id for each in map(_container, targets) if each is not None
    }


def targets_of(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return [part for each in statement.targets for part in getattr(each, "elts", [each])]
    if isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.For):
        return [statement.target]
    if isinstance(statement, ast.With):
        return [each.optional_vars for each in statement.items if each.optional_vars is not None]
    return []


def set_to(begin: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement sets, each with its value."""
    names, values = targets_of(begin), getattr(begin.value, "elts", [begin.value])
    single = [begin.value] * len(names) if len(values) != len(names) else values
    yield from ((each.id, value) for each, value in zip(names, single) if isinstance(each, ast.Name))


def is_number_zero(value: ast.expr) -> bool:
    """``0.0``, or several of them; a whole number may be a code that is returned."""
    parts = getattr(value, "elts", [value])
    return bool(parts) and all(isinstance(n, ast.Constant) and n.value == 0 and type(n.value) is float for n in parts)


def statement_value(statement: ast.stmt) -> ast.expr | None:
    """What a statement sets names to, iterates over or puts into a container."""
    if isinstance(statement, ast.With):
        return statement.items[0].context_expr
    if isinstance(statement, ast.For):
        return statement.iter
    return statement.value if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr) else None


def names_read(node: ast.AST | None) -> set[str]:
    """The names that are read in a node; of a statement also in those within it."""
    if node is None:
        return set()
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def root_of(node: ast.AST | None) -> ast.Name | None:
    """``totals`` of ``totals["loss"]``; None for what begins with no name."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def is_fresh(value: ast.expr | None) -> bool:
    """Whether it is a constant or an empty container: what a sum begins with."""
    if isinstance(value, ast.Call):
        return last_name(value) in FRESH
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.Dict):
        return all(is_fresh(each) for each in value.values)
    if isinstance(value, ast.List | ast.Tuple):
        return all(is_fresh(each) for each in value.elts)
    return isinstance(value, ast.Constant)


def _written(node: ast.AST) -> ast.Name | None:
    """The name of what is put into: of ``losses.append(x)`` as a statement, and of ``totals["loss"] += x``."""
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in GROWS:
        return call.func.value if isinstance(call.func.value, ast.Name) else None
    return _container(node) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else None


def _container(node: ast.AST) -> ast.Name | None:
    """``totals`` of ``totals["loss"]``, and of no attribute: that belongs to an object."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _blocks(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """A list of statements, and those within them, outermost first."""
    yield body
    for each in body:
        if isinstance(each, (*NESTED, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(each, name, None):
                yield from _blocks(inner)
        for handler in getattr(each, "handlers", ()):
            yield from _blocks(handler.body)


def _begins(function: ast.FunctionDef) -> int:
    """As a code object counts: with its first decorator."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _given(node: ast.With) -> Iterator[str]:
    """What ``with tw.watch(model, optimizer):`` names."""
    for item in node.items:
        if isinstance(item.context_expr, ast.Call) and "watch" in last_name(item.context_expr).lower():
            yield from names_read(item.context_expr) - {name_of(item.context_expr.func).partition(".")[0]}


def _makes_loader(statement: ast.stmt) -> bool:
    value = statement_value(statement)
    return isinstance(value, ast.Call) and last_name(value) == "DataLoader"
