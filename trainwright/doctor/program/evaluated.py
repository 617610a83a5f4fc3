"""The calls of a loop that evaluate its model, from its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from trainwright.doctor.loops import calls, name_of
from trainwright.doctor.program.syntax import (
    FunctionSyntax,
    ProgramSyntax,
    is_number_zero,
    root_of,
    set_to,
    statement_value,
    stored,
)

NO_GRADIENTS = ("no_grad", "inference_mode")
DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)


def evaluations(program: ProgramSyntax) -> list[ast.Call]:
    """The calls of functions without gradients that are given what the watch was given, or what was made of it before:
    a copy, or the average of its weights.
    """
    found = [each for each in program.loop.nodes if isinstance(each, ast.With) and program.is_watch(each)]
    own = [(each, program.by_name.get(name_of(each.func))) for block in found for each in calls(block)]
    known = program.given | {name for block in found for name in _made_before(block, program)}
    return [
        call for call, function in own
        if function is not None and _is_without_gradients(function) and _arguments(call) & known
    ]  # fmt: skip


def _made_before(block: ast.With, program: ProgramSyntax) -> Iterator[str]:
    """The names that calls which are given what the watch is given set before it."""
    for statement in program.loop.statements:
        value = statement_value(statement)
        if value is None or statement.lineno > block.lineno:
            continue
        if any(_arguments(each) & program.given for each in calls(value)):
            yield from stored(statement)


def _arguments(call: ast.Call) -> set[str]:
    """The names that a call is given, or whose attributes it is given."""
    roots = [root_of(each) for each in (*call.args, *(each.value for each in call.keywords))]
    return {each.id for each in roots if each is not None}


def _is_without_gradients(function: FunctionSyntax) -> bool:
    above = [*getattr(function.node, "decorator_list", [])]
    above += [item.context_expr for each in function.node.body if isinstance(each, ast.With) for item in each.items]
    return any(name_of(getattr(each, "func", each)).rpartition(".")[2] in NO_GRADIENTS for each in above)


def figures(program: ProgramSyntax, evaluated: Sequence[ast.Call]) -> list[str]:
    """The names that are 0.0 until one of the calls sets them."""
    set_by = [each for each in program.loop.statements if isinstance(each, ast.Assign) and each.value in evaluated]
    names = [name for each in set_by for name in stored(each)]
    begun = [each for each in program.loop.statements if isinstance(each, ast.Assign) and each not in set_by]
    zero = [name for each in begun for name, value in set_to(each) if is_number_zero(value)]
    return sorted(set(names) & set(zero))


def periods(program: ProgramSyntax, evaluated: Sequence[ast.Call], numbers: Mapping[str, float]) -> Iterator[int]:
    """The whole numbers that something is divided by in the conditions around the calls, where they are known."""
    for each in program.loop.nodes:
        if isinstance(each, ast.If) and any(call is node for call in evaluated for node in ast.walk(each)):
            divisions = [n for n in ast.walk(each.test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
            for division in divisions:
                by = (
                    division.right.value
                    if isinstance(division.right, ast.Constant)
                    else numbers.get(name_of(division.right))
                )
                if isinstance(by, int | float):
                    yield int(by)


def worked_with(program: ProgramSyntax) -> list[str]:
    """The names of the loop that something is made of: by a division, or by a function of the program."""
    nodes = program.loop.nodes
    divisions = [n for n in nodes if isinstance(n, ast.BinOp | ast.AugAssign) and isinstance(n.op, DIVISIONS)]
    own = [n for n in nodes if isinstance(n, ast.Call) and name_of(n.func) in program.by_name]
    given = [part for call in own for part in (*call.args, *(each.value for each in call.keywords))]
    return sorted({each.id for node in (*divisions, *given) for each in ast.walk(node) if isinstance(each, ast.Name)})
