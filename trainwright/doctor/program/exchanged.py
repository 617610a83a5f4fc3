"""Calls whose arguments have each other's names: two neighbours that changed places."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from itertools import combinations

from trainwright.doctor.loops import name_of
from trainwright.doctor.program.facts import ExchangedArguments
from trainwright.doctor.program.syntax import FunctionSyntax, ProgramSyntax

SHORT = 2
"""Letters of names that say little: p and q of a divergence are exchanged on purpose."""


def exchanged_arguments(program: ProgramSyntax) -> Iterator[ExchangedArguments]:
    """In the functions that the loop may reach, the calls of functions of the same file."""
    for function in program.functions:
        calls = [each for each in function.nodes if isinstance(each, ast.Call)]
        given = [(each, *_given(program, each)) for each in calls]
        orders = {(name_of(call.func), tuple(labels)) for call, _, labels in given}
        for call, parameters, labels in given:
            for i, j in combinations(range(len(labels)), 2):
                other = [*labels]
                other[i], other[j] = labels[j], labels[i]
                is_both_ways = (name_of(call.func), tuple(other)) in orders
                if not is_both_ways and _are_exchanged((labels[i], labels[j]), (parameters[i], parameters[j])):
                    yield ExchangedArguments(
                        function=name_of(call.func),
                        names=(labels[i], labels[j]),
                        parameters=(parameters[i], parameters[j]),
                        line=call.lineno,
                    )


def _given(program: ProgramSyntax, call: ast.Call) -> tuple[Sequence[str], list[str]]:
    """The parameters that the arguments of a call go to, by place, and what these are named; nothing where it is not
    known which function is called.
    """
    if any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) < 2:
        return (), []
    function = program.by_name.get(name_of(call.func)) or _method(program, call)
    if function is None:
        return (), []
    parameters = function.parameters[1:] if function.is_method else function.parameters
    if len(parameters) < len(call.args):
        return (), []
    return parameters, [_label(each) for each in call.args]


def _method(program: ProgramSyntax, call: ast.Call) -> FunctionSyntax | None:
    """The only method of that name; of a call of an object, the only ``forward`` that takes so many arguments."""
    methods = [each for each in program.functions if each.is_method]
    if isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Call):
        found = [each for each in methods if getattr(each.node, "name", "") == call.func.attr]
        if found or name_of(call.func.value) != "self":
            return found[0] if len(found) == 1 else None
    forwards = [each for each in methods if getattr(each.node, "name", "") == "forward"]
    fitting = [each for each in forwards if len(each.parameters) == len(call.args) + 1]
    is_object = not name_of(call.func)[:1].isupper() and not hasattr(builtins, name_of(call.func))
    return fitting[0] if is_object and len(fitting) == 1 else None


def _label(value: ast.expr) -> str:
    """What an argument is named: ``batch["x"]``, ``batch.x`` and ``x.float()`` are x; "" for what has no name."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Attribute):
        return value.attr
    if (
        isinstance(value, ast.Subscript)
        and isinstance(value.slice, ast.Constant)
        and isinstance(value.slice.value, str)
    ):
        return value.slice.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
        return _label(value.func.value)
    return ""


def _are_exchanged(names: tuple[str, str], parameters: tuple[str, str]) -> bool:
    (one, two), (first, second) = names, parameters
    if not one or not two or max(len(one), len(two)) <= SHORT:
        return False
    fits_as_it_is = _fits(one, first) or _fits(two, second)
    return not fits_as_it_is and _fits(one, second) and _fits(two, first)


def _fits(name: str, parameter: str) -> bool:
    """``x_batch`` is an x, and so is x an ``x_batch``."""
    name, parameter = name.lower(), parameter.lower()
    return name == parameter or parameter in name.split("_") or name in parameter.split("_")
