"""Moving averages of numbers: ``average = 0.98 * average + 0.02 * value``, whose two parts add up to 1."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterator, Mapping

from trainwright.doctor.loops import name_of
from trainwright.doctor.program.facts import MisplacedSum
from trainwright.doctor.program.syntax import FunctionSyntax

AVERAGES = re.compile(r"(?<![a-z])(avg|averaged?|ema|smooth(ed)?|moving_average|running_(avg|average|mean))(?![a-z])")
"""Names of what is as large as what it averages."""
TRIALS = (0.9, 0.7)
"""What the names in the shares stand for: they add up to 1 whatever they are."""
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def uneven_averages(function: FunctionSyntax) -> Iterator[MisplacedSum]:
    """Those that are set to shares of themselves and of another value which are not 1 together."""
    for each in function.statements:
        if isinstance(each, ast.Assign) and AVERAGES.search(
            name := name_of(each.targets[0]).rpartition(".")[2].lower()
        ):
            for node in _branches(each.value):
                if isinstance(node, ast.BinOp) and _is_uneven(name_of(each.targets[0]), node):
                    yield MisplacedSum(kind="shares", name=name, line=each.lineno)


def _branches(value: ast.expr) -> list[ast.expr]:
    """What it may be: of ``value if first else sum`` both."""
    return [*_branches(value.body), *_branches(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _is_uneven(name: str, sum_of: ast.BinOp) -> bool:
    if not isinstance(sum_of.op, ast.Add | ast.Sub):
        return False
    one, other = _factors(sum_of.left), _factors(sum_of.right)
    if [name_of(each) for each in other].count(name) == 1 and isinstance(sum_of.op, ast.Add):
        one, other = other, one
    own = [each for each in one if name_of(each) != name]
    if len(one) - len(own) != 1 or not own or any(name in map(name_of, ast.walk(each)) for each in (*own, *other)):
        return False
    names = {name_of(node) for each in own for node in ast.walk(each)} - {""}
    if any(
        isinstance(node, ast.Div) for each in other if not isinstance(each, ast.Constant) for node in ast.walk(each)
    ):
        return False  # the share of the new value may be in its divisor
    shares = [each for each in other if {name_of(node) for node in ast.walk(each)} - {""} <= names]
    if len(shares) == len(other):
        return False  # no value is left
    for trial in TRIALS:
        kept = _value(own, dict.fromkeys(names, trial))
        new = _value(shares, dict.fromkeys(names, trial))
        if kept is None or new is None or not 0.0 < kept < 1.0:
            return False
        new = new if isinstance(sum_of.op, ast.Add) else -new
        if math.isclose(kept + new, 1.0, rel_tol=1e-6):
            return False
    return True


def _factors(product: ast.expr) -> list[ast.expr]:
    if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
        return [*_factors(product.left), *_factors(product.right)]
    return [product]


def _value(factors: list[ast.expr], names: Mapping[str, float]) -> float | None:
    """Their product; None where one is no number."""
    values = [_number(each, names) for each in factors]
    return None if None in values else math.prod(each for each in values if each is not None)


def _number(value: ast.expr, names: Mapping[str, float]) -> float | None:
    if isinstance(value, ast.Constant):
        number = value.value
        return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None
    if isinstance(value, ast.BinOp) and type(value.op) in SIGNS:
        sides = _number(value.left, names), _number(value.right, names)
        if sides[0] is None or sides[1] is None or (isinstance(value.op, ast.Div) and not sides[1]):
            return None
        return float(SIGNS[type(value.op)](*sides))
    return names.get(name_of(value))
