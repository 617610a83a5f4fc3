"""Reads the source of the models, data sets and loop once, and finds statements that have no effect."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainwright.doctor.facts.wiring import IdleStatement, StatementsFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep

_OF_CONTAINERS = {*dir(set), *dir(list), *dir(dict), *dir(str), *dir(bytearray)}
_AMBIGUOUS = {"log", "put", "scatter", "rename", "apply", "resize", "set", "sub", "map", "bernoulli", "detach"}
"""Names of tensor methods without an effect that have an effect in other classes."""
PURE = {n for n in dir(Tensor) if f"{n}_" in dir(Tensor) and not n.startswith("_")} - _OF_CONTAINERS - _AMBIGUOUS
"""Methods that return a new tensor, because a method of this name plus an underscore changes the tensor in place."""
_WITHOUT_EFFECT = PURE | {"flip", "fliplr", "flipud", "rot90", "roll", "pad", "concatenate", "stack", "where", "copy"}
_WITHOUT_EFFECT |= {"astype", "ascontiguousarray", "reshape", "mean", "std", "min", "max", "size", "clone", "permute"}
_WITHOUT_EFFECT |= {"array", "random", "uniform", "randint", "rand", "randn", "normal", "choice", "beta", "integers"}
_WITHOUT_EFFECT |= {"randrange", "item", "len", "int", "float", "range", "abs", "round", "tuple", "isinstance", "sum"}
"""Functions that change none of their arguments."""
_NOT_CALLED = {"eval", "train", "step", "zero_grad", "backward"}  # methods of torch that a loop calls for their effect
MAX_FUNCTIONS = 256
STEPS_TRACED = 6  # The step after which tracing ends. It begins after the first step.
Names: TypeAlias = Mapping[str, Any]


class Statements(Probe):
    """Reads the functions once, after the first step."""

    name = StatementsFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._found: dict[IdleStatement, CodeType | None] = {}  # the code of its function if it is in a condition
        self._was_run: set[tuple[CodeType, int]] = set()
        self._tracer, self._steps = self._trace, 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps += 1
        if self._steps == 1:
            for function, names in self._functions():
                self._found |= _idle(function, names)
            if any(self._found.values()) and sys.gettrace() is None:  # no debugger and no coverage
                sys.settrace(self._tracer)
        elif self._steps == STEPS_TRACED:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        if sys.gettrace() is self._tracer:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, value: object) -> Any:
        """Traces the functions with a statement in a condition, which may never be true."""
        if event == "line":
            self._was_run.add((frame.f_code, frame.f_lineno))
        return self._tracer if frame.f_code in self._found.values() else None

    def _functions(self) -> Iterator[tuple[FunctionType | CodeType, Names]]:
        """Yields the loop, its callers, and the methods of models, data sets and collate functions; with names."""
        seen: set[CodeType] = set()
        objects: list[object] = [m for root in self._watched.subject.roots for m in root.modules()]
        for loader in self._watched.loaders:
            dataset = getattr(loader, "dataset", None)
            while dataset is not None and not any(dataset is each for each in objects):
                objects.append(dataset)
                dataset = getattr(dataset, "dataset", None)
            objects.append(getattr(loader, "collate_fn", None))
        for frame in self._watched.frames():
            yield frame.f_code, {**frame.f_globals, **frame.f_locals}
        for each in objects:
            for function in (each, *(f for c in type(each).__mro__ for f in vars(c).values())):
                if isinstance(function, FunctionType) and function.__code__ not in seen and len(seen) < MAX_FUNCTIONS:
                    seen.add(function.__code__)
                    yield function, {**function.__globals__, "self": each}

    def facts(self) -> StatementsFacts | None:
        run = [each for each, code in self._found.items() if code is None or (code, each.line) in self._was_run]
        return StatementsFacts(tuple(run)) if self._steps else None


def _tree(function: FunctionType | CodeType) -> ast.Module | None:
    """Returns the syntax tree of a function of the user; None for code of libraries, or without a file."""
    code = function.__code__ if isinstance(function, FunctionType) else function
    if "site-packages" in code.co_filename or code.co_filename.startswith((*_LIBRARIES, "<")):
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


_LIBRARIES = (str(Path(inspect.__file__).parent), str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def _idle(function: FunctionType | CodeType, names: Names) -> dict[IdleStatement, CodeType | None]:
    """Returns the statements without an effect, each with the function's code if it stands in a condition."""
    found: dict[IdleStatement, CodeType | None] = {}
    code = function.__code__ if isinstance(function, FunctionType) else function
    first = code.co_firstlineno - 1 if code.co_name != "<module>" else 0
    tree = _tree(function) or ast.Module(body=[], type_ignores=[])
    itself = tree.body[:1] if code.co_name != "<module>" else []
    inner = [each for each in ast.walk(tree) if isinstance(each, _CONDITIONS) and each not in itself]
    conditional = {id(each) for node in inner for each in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr):
            continue
        value, kind = node.value, ""
        if isinstance(value, ast.Call) and _is_pure(value, names):
            kind = "discarded"
        elif isinstance(value, ast.Attribute) and value.attr in _NOT_CALLED:
            owner = _value(value.value, names)
            kind = "not called" if isinstance(owner, nn.Module | torch.optim.Optimizer | Tensor) else ""
        if kind:
            called = ast.unparse(value.func if isinstance(value, ast.Call) else value)
            place = Path(code.co_filename).name, first + node.lineno
            found[IdleStatement(kind, called, code.co_name, *place)] = code if id(node) in conditional else None
    return found


_CONDITIONS = (ast.If, ast.IfExp, ast.Try, ast.FunctionDef)  # also a function inside of a function


def _value(node: ast.AST, names: Names) -> object:
    """Returns the object that an expression names; None if it is not known before the call."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value(node.value, names)
    if isinstance(owner, nn.Module) and node.attr in owner._modules:
        return owner._modules[node.attr]
    return None if owner is None else inspect.getattr_static(owner, node.attr, None)


def _is_pure(call: ast.Call, names: Names, depth: int = 3) -> bool:
    """Returns True if the call of a function or layer has no effect but its result."""
    if any(each.arg in ("out", "inplace", None) for each in call.keywords) or not (call.args or call.keywords):
        return False
    target = _value(call.func, names)
    if isinstance(target, nn.Module):  # a layer without state, such as a dropout
        has_state = isinstance(target, _NormBase | nn.Sequential)
        return type(target).__module__.startswith("torch.nn.modules") and not has_state
    if isinstance(target, FunctionType):
        return bool(depth) and _returns_only(target, {**target.__globals__, "self": names.get("self")}, depth)
    owner = _value(call.func.value, names) if isinstance(call.func, ast.Attribute) else ""
    is_library = isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] in ("torch", "numpy")
    return _last_name(call) in PURE and (is_library or owner is None)


def _returns_only(function: FunctionType, names: Names, depth: int) -> bool:
    """Returns True if a function returns a value, assigns only to its own variables, and calls only such functions."""
    if (tree := _tree(function)) is None:
        return False
    nodes = list(ast.walk(tree))
    stores = [each for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store | ast.Del)]
    statements = [each.value for each in nodes if isinstance(each, ast.Expr)]
    return (
        any(isinstance(each, ast.Return) and each.value is not None for each in nodes)
        and all(isinstance(each, ast.Name | ast.Tuple) for each in stores)
        and all(isinstance(each, ast.Constant) for each in statements)  # docstrings
        and not any(isinstance(each, _EFFECTS) for each in nodes)
        and all(
            _last_name(each) in _WITHOUT_EFFECT or _is_pure(each, names, depth - 1)
            for each in nodes
            if isinstance(each, ast.Call)
        )
    )


_EFFECTS = (ast.AugAssign, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.With, ast.Raise)


def _last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
