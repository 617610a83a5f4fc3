"""The comparisons of a loop with its best value so far, as its source shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.doctor.loops import last_name
from trainwright.doctor.program.bests import KEEPS, TURNED, WORDS
from trainwright.doctor.program.syntax import ProgramSyntax, stored


@dataclass(frozen=True)
class ComparedBest:
    """``if value < best:`` in ``line``, right behind what sets the value; both as ``CallerSource.numbers`` names them.

    ``sign`` says how the value stands to the best one. Where it does, that is set, or weights are kept.
    """

    name: str
    value: str
    sign: str
    line: int


def compared_bests(program: ProgramSyntax) -> Iterator[ComparedBest]:
    """In the function that holds the loop, and in its loops."""
    for block in program.loop.blocks:
        for n, each in enumerate(block):
            if isinstance(each, ast.If) and (found := _compared(each)) is not None:
                inner = [node for one in block[:n] for node in ast.walk(one) if isinstance(node, ast.stmt)]
                before = {name for node in inner for name in stored(node)}
                if _root(found.value) in before and _root(found.name) not in before:
                    yield found


def _compared(branch: ast.If) -> ComparedBest | None:
    test = branch.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in TURNED:
        return None
    sign, sides = TURNED[type(test.ops[0])], (number_name(test.left), number_name(test.comparators[0]))
    are_best = [any(word in side.lower() for word in WORDS) for side in sides]
    if not all(sides) or are_best[0] == are_best[1]:
        return None
    value, name = sides if are_best[1] else sides[::-1]
    sign = sign if are_best[1] else "<" if sign == ">" else ">"
    return ComparedBest(name, value, sign, branch.lineno) if _sets(branch, name) else None


def _sets(branch: ast.If, name: str) -> bool:
    """Whether it is set behind the condition, or weights are kept there."""
    inner = [node for each in branch.body for node in ast.walk(each)]
    is_set = any(isinstance(node, ast.stmt) and _root(name) in stored(node) for node in inner)
    return is_set or any(isinstance(node, ast.Call) and last_name(node) in KEEPS for node in inner)


def number_name(value: ast.expr) -> str:
    """``best``, ``shown.0``, ``metrics.loss``, ``losses[-1]``; "" for anything else."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
        key = ast.unparse(value.slice).strip("'\"")
        return f"{value.value.id}[-1]" if key == "-1" else f"{value.value.id}.{key}"
    return ""


def _root(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]
