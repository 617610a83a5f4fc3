"""Sums and lists that a program makes in the wrong place: behind the loop, begun anew in each round, or twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeGuard

from trainwright.doctor.loops import LOOPS, last_name
from trainwright.doctor.program.facts import MisplacedSum
from trainwright.doctor.program.moving import uneven_averages
from trainwright.doctor.program.syntax import (
    GROWS,
    FunctionSyntax,
    ProgramSyntax,
    is_fresh,
    is_number_zero,
    names_read,
    root_of,
    set_to,
    statement_value,
    stored,
    targets_of,
)

DRAWING = ("next", "pop", "popleft", "get", "sample", "step")
"""What gives another value each time."""


def misplaced_sums(program: ProgramSyntax) -> Iterator[MisplacedSum]:
    """In the functions that the loop may reach."""
    for function in program.functions:
        for block in function.blocks:
            yield from _twice(function, block)
            yield from _the_same(function, block)
            yield from _behind(function, block)
        yield from _never_added_to(function)
        yield from _never_set(function)
        yield from _multiplied(function)
        yield from uneven_averages(function)
        for loop in (each for each in function.statements if isinstance(each, ast.For)):
            yield from _begun_in_each_round(function, loop)


def _never_added_to(function: FunctionSyntax) -> Iterator[MisplacedSum]:
    """Of several sums that one line begins, one is only divided, and never added to."""
    for begin in (each for each in function.statements if isinstance(each, ast.Assign) and _is_empty(each)):
        added = {_added_to(each) for each in function.statements} & stored(begin)
        zero = {name for name, value in set_to(begin) if isinstance(value, ast.Constant)}
        for name in sorted(zero - added - function.in_nested):
            is_divided = any(name in names_read(n.left) for n in function.nodes if _is_division(n))
            if added and is_divided and function.assigned(name) == [begin]:
                yield MisplacedSum(kind="never added to", name=name, line=begin.lineno)


def _never_set(function: FunctionSyntax) -> Iterator[MisplacedSum]:
    """What is 0.0 in front of a loop, or a tensor of zeros, is set nowhere else, and is read behind all loops only."""
    loops = [each for each in function.statements if isinstance(each, LOOPS)]
    inside = [node for each in loops for node in ast.walk(each)]
    last = max((each.end_lineno or 0 for each in loops), default=0)
    given = [part for n in function.nodes if isinstance(n, ast.Call) for part in (*n.args, *n.keywords)]
    given = [each.value if isinstance(each, ast.keyword) else each for each in given]
    for begin in (each for each in function.statements if isinstance(each, ast.Assign) and each not in inside):
        names = [name for name, value in set_to(begin) if is_number_zero(value) or _is_zeros(value)]
        for name in (each for each in names if begin.lineno < last and function.assigned(each) == [begin]):
            reads = [n for n in function.nodes if isinstance(n, ast.Name) and n.id == name and n.lineno != begin.lineno]
            is_number = all(not _is_zeros(value) for each, value in set_to(begin) if each == name)
            is_figure = is_number or not any(each in given for each in reads)
            if reads and is_figure and all(each.lineno > last for each in reads) and name not in function.in_nested:
                yield MisplacedSum(kind="never set", name=name, line=begin.lineno)


def _is_empty(begin: ast.Assign) -> bool:
    """Whether it begins several sums and lists."""
    parts = begin.value.elts if isinstance(begin.value, ast.Tuple) else []
    return len(parts) > 1 and all(_is_nought(each) or ast.unparse(each) in ("[]", "{}") for each in parts)


def _is_zeros(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _is_nought(value)


def _is_nought(value: ast.expr) -> bool:
    """``0``, ``0.0``, or a tensor of zeros."""
    if isinstance(value, ast.Call):
        return last_name(value) in ("zeros", "zeros_like")
    return isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value == 0


def _is_division(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _twice(function: FunctionSyntax, block: Sequence[ast.stmt]) -> Iterator[MisplacedSum]:
    """The same is added to the same twice in a row."""
    for one, two in pairwise(block):
        is_equal = ast.dump(one) == ast.dump(two) and names_read(one) & function.of_data and not _is_new_each_time(one)
        if is_equal and (name := _added_to(one)):
            yield MisplacedSum(kind="twice", name=name, line=two.lineno)


def _the_same(function: FunctionSyntax, block: Sequence[ast.stmt]) -> Iterator[MisplacedSum]:
    """Two entries of one dictionary get the same."""
    added: dict[tuple[str, str], str] = {}
    for each in block:
        if not isinstance(each, ast.AugAssign) or not isinstance(each.target, ast.Subscript):
            continue
        place, value = _place_of(each), ast.dump(each.value)
        known = added.setdefault((ast.unparse(each.target.value), value), place)
        if known != place and names_read(each.value) & function.of_data:
            yield MisplacedSum(kind="the same", name=place, line=each.lineno)


def _multiplied(function: FunctionSyntax) -> Iterator[MisplacedSum]:
    """Two sums of one loop are multiplied by each other, or a sum by the number of its terms, and nothing is made of
    the product: those of a correlation are subtracted.
    """
    inner = {id(part) for n in function.nodes if isinstance(n, ast.BinOp) for part in (n.left, n.right)}
    calls = [each for each in function.nodes if isinstance(each, ast.Call) and last_name(each) not in GROWS]
    inner |= {id(part) for each in calls for part in each.args}
    sums = {name for each in function.statements if isinstance(each, ast.AugAssign) and (name := _added_to(each))}
    for each in function.nodes:
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult) and id(each) not in inner:
            left, right = ast.unparse(each.left), ast.unparse(each.right)
            is_count = left.startswith("sum(") and right == f"len({left.removeprefix('sum(')}"
            if is_count or (left in sums and right in sums and left != right and {left, right} & function.of_data):
                yield MisplacedSum(kind="multiplied", name=left, line=each.lineno)


def _is_new_each_time(statement: ast.stmt) -> bool:
    """Whether it gives another value each time: the next of something, a draw, a new object, or what is made of the
    sum itself.
    """
    names = [last_name(each) for each in ast.walk(statement) if isinstance(each, ast.Call)]
    if any(name in DRAWING or name.startswith("rand") or name[:1].isupper() for name in names):
        return True
    value = statement_value(statement)
    reads = [each.id for each in ast.walk(value) if isinstance(each, ast.Name)] if value is not None else []
    return reads.count(_added_to(statement)) > (0 if isinstance(statement, ast.AugAssign) else 1)


def _behind(function: FunctionSyntax, block: Sequence[ast.stmt]) -> Iterator[MisplacedSum]:
    """What each round of a loop makes anew is added behind the loop, once, to what was begun in front of it."""
    for place, loop in enumerate(block):
        if not isinstance(loop, ast.For):
            continue
        begun = {name for each in block[:place] if is_fresh(statement_value(each)) for name in stored(each)}
        elsewhere = {name for each in function.statements if not _is_within(each, loop) for name in stored(each)}
        made = [each for each in ast.walk(loop) if isinstance(each, ast.stmt)]
        carried = {name for each in made for name in stored(each) & names_read(statement_value(each))}
        fresh = {name for each in made for name in stored(each)} - elsewhere - carried - set(function.parameters)
        for each in block[place + 1 :]:
            root, target, read = _added_to(each), _place_of(each), names_read(statement_value(each))
            if root in begun and read & fresh and read & function.of_data:
                others = [one for one in function.statements if one is not each and _place_of(one) == target]
                if not any(_added_to(one) for one in others):
                    yield MisplacedSum(kind="behind", name=target, line=each.lineno)


def _is_within(statement: ast.stmt, loop: ast.For) -> bool:
    return any(each is statement for each in ast.walk(loop))


def _begun_in_each_round(function: FunctionSyntax, loop: ast.For) -> Iterator[MisplacedSum]:
    """What is updated from its own value at the end of each round was set to a constant at its begin."""
    for place, each in enumerate(loop.body):
        names = stored(each) if isinstance(each, ast.Assign) and is_fresh(statement_value(each)) else set()
        for name in sorted(names - function.in_nested):
            if _is_lost(name, loop.body[place + 1 :]) and not _leaves(loop):
                yield MisplacedSum(kind="begun anew", name=name, line=each.lineno)


def _is_lost(name: str, later: Sequence[ast.stmt]) -> bool:
    """Whether a name is updated, and not read afterwards. A list may be kept elsewhere before it grows."""
    last = max((n for n, each in enumerate(later) if _updates(each, name)), default=-1)
    if last < 0 or any(name in names_read(each) | stored(each) for each in later[last + 1 :]):
        return False
    is_list = isinstance(later[last], ast.Expr)
    return not (is_list and any(name in names_read(each) for each in later[:last])) and bool(
        names_read(statement_value(later[last])) - {name}
    )


def _updates(statement: ast.stmt, name: str) -> bool:
    """Whether it adds to it, or makes it anew of its own value."""
    if _added_to(statement) == name:
        return True
    targets = targets_of(statement) if isinstance(statement, ast.Assign) else []
    is_part = len(targets) == 1 and isinstance(targets[0], ast.Subscript) and name in stored(statement)
    is_set = [getattr(each, "id", "") for each in targets] == [name]
    return is_part or (is_set and name in names_read(statement_value(statement)))


def _leaves(loop: ast.For) -> bool:
    return any(isinstance(each, ast.Yield | ast.Return | ast.Break | ast.Continue) for each in ast.walk(loop))


def _added_to(statement: ast.stmt) -> str:
    """The name of what is added to, or put into: of ``totals["loss"] += x``, ``n = n + x`` and ``losses.append(x)``."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        root = root_of(statement.target)
        return root.id if root is not None else ""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        name = next((each.id for each in statement.targets if isinstance(each, ast.Name)), "")
        sides = [getattr(each, "id", "") for each in ast.walk(statement.value)]
        return name if name in sides and isinstance(statement.value.op, ast.Add) else ""
    return next(iter(stored(statement)), "") if isinstance(statement, ast.Expr) else ""


def _place_of(statement: ast.stmt) -> str:
    """As ``_added_to``, and of ``totals["loss"] += x`` all of ``totals["loss"]``."""
    if isinstance(statement, ast.AugAssign):
        return ast.unparse(statement.target)
    return _added_to(statement)
