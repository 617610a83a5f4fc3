"""The operators of mutation: each takes a program and yields changes of its text."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from zoo.program import Change, Edit, Program, Simple, end, instead, start

Operator = Callable[[Program], Iterator[Change]]
OPERATORS: dict[str, Operator] = {}
COPY = '__import__("copy").deepcopy'
DIMS = {"softmax", "log_softmax", "mean", "sum", "argmax", "cat", "stack", "chunk", "split", "flatten", "squeeze"}
DIMS |= {"unsqueeze", "std", "cumprod", "normalize", "cumsum", "max", "min", "dim"}
FACTORS = ("0.1", "10", "1000")


def operator(function: Operator) -> Operator:
    """Registers an operator by its name."""
    OPERATORS[function.__name__] = function
    return function


# --- statements ---------------------------------------------------------------------------------------------------


@operator
def drop(p: Program) -> Iterator[Change]:
    for each in p.optional:
        yield instead(each, "pass")


@operator
def double(p: Program) -> Iterator[Change]:
    for each in p.optional:
        yield instead(each, f"{p.text(each)}; {p.text(each)}")


@operator
def swap(p: Program) -> Iterator[Change]:
    """Two neighbours, where the second does not need what only the first provides."""
    for block in p.blocks:
        for one, two in pairwise(block):
            if isinstance(one, Simple) and isinstance(two, Simple) and not p.fresh(one) & p.loads(two):
                yield (*instead(one, p.text(two)), *instead(two, p.text(one)))


@operator
def order(p: Program) -> Iterator[Change]:
    """A statement goes to the end or to the begin of its block, two places away at least."""
    for block in p.blocks:
        simple = [each for each in block if isinstance(each, Simple)]
        for i, each in enumerate(simple):
            later, earlier = simple[i + 1 :], simple[:i]
            if len(later) > 1 and not any(p.fresh(each) & p.loads(other) for other in later):
                yield (*instead(each, "pass"), *_after(p, later[-1], each))
            if len(earlier) > 1 and not any(p.fresh(other) & p.loads(each) for other in earlier):
                yield (*_before(p, earlier[0], each), *instead(each, "pass"))


@operator
def out_of_loop(p: Program) -> Iterator[Change]:
    """Behind the loop, or in front of it."""
    for each in p.optional:
        loop = p.parents[each]
        if isinstance(loop, ast.For):
            yield (*instead(each, "pass"), *_after(p, loop, each))
            if not p.loads(each) & {name for other in loop.body for name in p.fresh(other)} | p.stores(loop.target):
                yield (*_before(p, loop, each), *instead(each, "pass"))


@operator
def into_loop(p: Program) -> Iterator[Change]:
    """What stands beside a loop goes into it."""
    for block in p.blocks:
        for one, two in pairwise(block):
            if isinstance(one, Simple) and isinstance(two, ast.For):
                yield (*instead(one, p.text(one)), *_before(p, two.body[0], one))
            if isinstance(two, Simple) and isinstance(one, ast.For) and not p.fresh(two):
                yield (*_after(p, one.body[-1], two), *instead(two, "pass"))


def _after(p: Program, place: ast.AST, moved: Simple) -> Change:
    return (Edit(end(place), end(place), f"\n{' ' * place.col_offset}{p.text(moved)}"),)


def _before(p: Program, place: ast.AST, moved: Simple) -> Change:
    return (Edit(start(place), start(place), f"{p.text(moved)}\n{' ' * place.col_offset}"),)


# --- values -------------------------------------------------------------------------------------------------------


@operator
def detach(p: Program) -> Iterator[Change]:
    for each in p.values:
        yield instead(each, f"({p.text(each)}).detach()")


@operator
def attach(p: Program) -> Iterator[Change]:
    """The graph is kept where it was cut."""
    for call in p.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("detach", "item") and not call.args:
            yield instead(call, p.text(call.func.value))
        if p.text(call) == "torch.no_grad()":
            yield instead(call, "torch.enable_grad()")


@operator
def rescale(p: Program) -> Iterator[Change]:
    for i, each in enumerate(p.values):
        yield instead(each, f"({p.text(each)}) * {FACTORS[i % 3]}")


@operator
def rescale_number(p: Program) -> Iterator[Change]:
    for number in p.of(ast.Constant):
        if isinstance(number.value, float):
            for factor in FACTORS:
                yield instead(number, f"({p.text(number)} * {factor})")


@operator
def dtype(p: Program) -> Iterator[Change]:
    """Through a narrower type and back."""
    kinds = ("torch.float16", "torch.bfloat16", "torch.int64")
    for i, each in enumerate(p.values):
        yield instead(each, f"({p.text(each)}).to({kinds[i % 3]}).float()")


@operator
def dtype_name(p: Program) -> Iterator[Change]:
    """Another type where one is named."""
    other = {"float": "half", "float16": "bfloat16", "bfloat16": "float16", "long": "float"}
    for each in p.of(ast.Attribute):
        if each.attr in other and not isinstance(each.ctx, ast.Store):
            yield instead(each, f"{p.text(each.value)}.{other[each.attr]}")


@operator
def negate(p: Program) -> Iterator[Change]:
    for each in p.of(ast.UnaryOp):
        if isinstance(each.op, ast.USub | ast.Invert) and not isinstance(each.operand, ast.Constant):
            yield instead(each, p.text(each.operand))
    for each in p.values:
        yield instead(each, f"-({p.text(each)})")


@operator
def arithmetic(p: Program) -> Iterator[Change]:
    """Another sign; brackets around a side are lost with it."""
    signs = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.MatMult: "*"}
    for each in p.of(ast.BinOp):
        if sign := signs.get(type(each.op)):
            yield instead(each, f"({p.text(each.left)} {sign} {p.text(each.right)})")
    for each in p.of(ast.AugAssign):
        if sign := signs.get(type(each.op)):
            yield instead(each, f"{p.text(each.target)} {sign}= {p.text(each.value)}")


@operator
def term(p: Program) -> Iterator[Change]:
    """One side of a sum or a product is lost."""
    for each in p.of(ast.BinOp):
        if not isinstance(each.op, ast.MatMult) and not isinstance(each.right, ast.List):
            yield instead(each, f"({p.text(each.left)})")
            yield instead(each, f"({p.text(each.right)})")


@operator
def uncall(p: Program) -> Iterator[Change]:
    """``f(x)`` or ``x.f()`` is only ``x``."""
    for call in p.calls:
        if isinstance(p.parents[call], ast.Expr) or p.scope(call) is None:
            continue
        if call.args and not isinstance(call.args[0], ast.Starred | ast.Constant):
            yield instead(call, f"({p.text(call.args[0])})")
        if isinstance(call.func, ast.Attribute) and p.text(call.func.value) not in ("torch", "nn", "F", "math", "self"):
            yield instead(call, f"({p.text(call.func.value)})")


@operator
def axis(p: Program) -> Iterator[Change]:
    for call in p.calls:
        name = p.text(call.func).rpartition(".")[2]
        if name not in DIMS:
            continue
        given = [each.value for each in call.keywords if each.arg == "dim"]
        on_tensor = isinstance(call.func, ast.Attribute) and p.text(call.func.value) not in ("torch", "F")
        given += call.args[:1] if on_tensor else call.args[1:2]
        for number in given:
            if re.fullmatch(r"-?\d", p.text(number)):
                yield from (instead(number, other) for other in ("0", "1", "-1") if other != p.text(number))


@operator
def reshape(p: Program) -> Iterator[Change]:
    """Dimensions in another order, or not exchanged."""
    for node in p.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
            yield instead(node, p.text(node.value))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = p.text(node.func.value), node.func.attr
        if name in ("transpose", "permute", "t", "squeeze", "unsqueeze"):
            yield instead(node, owner)
        if name == "transpose":
            yield instead(node, f"{owner}.reshape({owner}.shape[0], {owner}.shape[2], {owner}.shape[1], -1)")
        if name in ("view", "reshape") and len(node.args) > 1:
            texts = [p.text(each) for each in node.args]
            for i in range(len(texts) - 1):
                other = [*texts[:i], texts[i + 1], texts[i], *texts[i + 2 :]]
                yield instead(node, f"{owner}.{name}({', '.join(other)})")


@operator
def reduction(p: Program) -> Iterator[Change]:
    other = {"mean": "sum", "sum": "mean"}
    for node in p.nodes:
        if isinstance(node, ast.Attribute) and node.attr in other:
            yield instead(node, f"{p.text(node.value)}.{other[node.attr]}")
        if isinstance(node, ast.Constant) and node.value in other:
            yield instead(node, repr(other[node.value]))
        if isinstance(node, ast.Call) and re.search(r"cross_entropy|_loss$|Loss$", p.text(node.func)):
            is_torch = p.text(node.func).startswith(("F.", "nn."))
            if is_torch and not any(each.arg == "reduction" for each in node.keywords):
                yield instead(node, p.text(node)[:-1] + (", " if node.args else "") + 'reduction="sum")')


# --- places and counts --------------------------------------------------------------------------------------------


@operator
def shift(p: Program) -> Iterator[Change]:
    """The bounds of a slice."""
    for each in p.of(ast.Slice):
        low, high = (p.text(bound) if bound else "" for bound in (each.lower, each.upper))
        if low:
            yield instead(each, f"{low} + 1:{high}")
            yield instead(each, f":{high}" if high else ":-1")
        if high:
            yield instead(each, f"{low}:{high} - 1")
            yield instead(each, f"{low}:" if low else "1:")


@operator
def off_by_one(p: Program) -> Iterator[Change]:
    """A whole number, and where a comparison includes its bound."""
    for node in p.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and p.scope(node) is not None:
            parent = p.parents[node]
            is_dim = isinstance(parent, ast.keyword) and parent.arg == "dim"
            if not is_dim and not isinstance(parent, ast.UnaryOp):
                yield instead(node, str(node.value + 1))
                yield instead(node, str(node.value - 1))
        if isinstance(node, ast.Compare):
            other = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
            if other:
                yield instead(node, f"{p.text(node.left)} {other} {p.text(node.comparators[0])}")
        if isinstance(node, ast.Call) and p.text(node.func) in ("range", "torch.arange") and len(node.args) == 1:
            yield instead(node, f"{p.text(node.func)}(1, {p.text(node.args[0])})")


@operator
def condition(p: Program) -> Iterator[Change]:
    for node in p.nodes:
        if isinstance(node, ast.If | ast.IfExp):
            yield instead(node.test, f"not ({p.text(node.test)})")
            yield instead(node.test, "True")
            yield instead(node.test, "False")
        if isinstance(node, ast.Compare):
            other = {ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">", ast.Gt: "<", ast.LtE: ">", ast.GtE: "<"}
            if sign := other.get(type(node.ops[0])):
                yield instead(node, f"{p.text(node.left)} {sign} {p.text(node.comparators[0])}")


@operator
def flag(p: Program) -> Iterator[Change]:
    for each in p.of(ast.keyword):
        if isinstance(each.value, ast.Constant) and isinstance(each.value.value, bool):
            yield instead(each.value, str(not each.value.value))
    for call in p.calls:
        if call.args and isinstance(call.args[-1], ast.Constant) and isinstance(call.args[-1].value, bool):
            yield instead(call.args[-1], str(not call.args[-1].value))


@operator
def constant(p: Program) -> Iterator[Change]:
    """A number that is handed to a constructor or a function by name, or stands first in one."""
    for call in p.calls:
        for given in (*call.args, *(each.value for each in call.keywords if each.arg != "dim")):
            if isinstance(given, ast.Constant) and isinstance(given.value, float):
                yield instead(given, "0.0")
                if 0 < given.value < 1:
                    yield instead(given, f"{1 - given.value:g}")
            if isinstance(given, ast.Constant) and type(given.value) is int and given.value > 1:
                yield instead(given, "1")
            if isinstance(given, ast.Tuple) and all(isinstance(each, ast.Constant) for each in given.elts):
                yield instead(given, f"({', '.join(p.text(each) for each in reversed(given.elts))})")


# --- objects ------------------------------------------------------------------------------------------------------


@operator
def alias(p: Program) -> Iterator[Change]:
    """A copy is the thing itself."""
    for call in p.calls:
        name = p.text(call.func).rpartition(".")[2]
        if name in ("deepcopy", "list") and call.args:
            yield instead(call, p.text(call.args[0]))
        if name in ("clone", "copy", "item") and isinstance(call.func, ast.Attribute) and not call.args:
            yield instead(call, p.text(call.func.value))
        if name in ("zeros_like", "ones_like", "randn_like", "empty_like"):
            yield instead(call, p.text(call.args[0]))


@operator
def stale_copy(p: Program) -> Iterator[Change]:
    """A copy in place of the thing itself."""
    for call in p.calls:
        if p.scope(call) is None or isinstance(p.parents[call], ast.withitem):
            continue
        for given in call.args:
            if isinstance(given, ast.Name) and given.id not in ("self", "_") and not _is_local_loss(given):
                yield instead(given, f"{COPY}({given.id})")
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            owner = call.func.value
            if owner.id not in ("torch", "nn", "F", "math", "self", "losses", "io", "copy"):
                yield instead(owner, f"{COPY}({owner.id})")


def _is_local_loss(name: ast.Name) -> bool:
    """A tensor of the graph cannot be copied."""
    return bool(re.search(r"loss|logits|fake", name.id))


@operator
def stale(p: Program) -> Iterator[Change]:
    """What each round makes anew is made in the first round only."""
    for each in p.of(ast.For):
        if p.scope(each) is not None and isinstance(each.iter, ast.Name):
            yield instead(each.iter, f"[next(iter({each.iter.id}))] * len({each.iter.id})")
    for each in p.statements:
        named = isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name | ast.Tuple)
        if named and p.loop(each) is not None:
            name = sorted(p.stores(each))[0]
            yield instead(each, f"if {name!r} not in locals(): {p.text(each)}")


@operator
def freeze(p: Program) -> Iterator[Change]:
    for call in p.calls:
        name = p.text(call.func)
        made = name.startswith("nn.") and name[3:4].isupper() and name != "nn.Parameter" and "Loss" not in name
        if made or (p.module_class(call) is None and re.fullmatch(r"[A-Z]\w+", name) and _is_module(p, name)):
            yield instead(call, f"{p.text(call)}.requires_grad_(False)")
        if name == "nn.Parameter":
            yield instead(call, f"nn.Parameter({p.text(call.args[0])}, requires_grad=False)")
        if name.endswith(".parameters") and not call.args:
            yield instead(call, f"list({p.text(call)})[1:]")
            yield instead(call, f"list({p.text(call)})[:-1]")


def _is_module(p: Program, name: str) -> bool:
    classes = [each for each in p.tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    return any("Module" in p.text(base) for each in classes for base in each.bases)


@operator
def wrong_object(p: Program) -> Iterator[Change]:
    """Another name of the same kind: made side by side, or by the same function."""
    for node in p.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and (scope := p.scope(node)):
            kinds = _kinds(p, scope)
            kind = next((each for each in kinds if node.id in each), [])
            yield from (instead(node, other) for other in kind if other != node.id)
        if isinstance(node, ast.Attribute) and p.text(node.value) == "self" and isinstance(node.ctx, ast.Load):
            made = [each for each in _made_alike(p, node) if node.attr in each]
            yield from (instead(node, f"self.{other}") for kind in made for other in kind if other != node.attr)


def _kinds(p: Program, scope: ast.AST) -> list[list[str]]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for i, each in enumerate(ast.walk(scope)):
        if isinstance(each, ast.Tuple) and all(isinstance(one, ast.Name) for one in each.elts):
            if isinstance(each.ctx, ast.Store):
                kinds[f"tuple {i}"] += [one.id for one in each.elts]
        elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and len(each.targets) == 1:
            if isinstance(each.targets[0], ast.Name):
                kinds[p.text(each.value.func)].append(each.targets[0].id)
        elif isinstance(each, ast.arguments):
            for one in each.args:
                if one.annotation is not None:
                    kinds[f"argument {p.text(one.annotation)}"].append(one.arg)
    return [sorted(set(names)) for names in kinds.values() if len(set(names)) > 1]


def _made_alike(p: Program, node: ast.AST) -> list[list[str]]:
    """Attributes of the class that the same constructor makes."""
    while not isinstance(node, ast.ClassDef):
        if node not in p.parents:
            return []
        node = p.parents[node]
    made: dict[str, list[str]] = defaultdict(list)
    for each in ast.walk(node):
        if not isinstance(each, ast.Assign):
            continue
        if isinstance(each.targets[0], ast.Attribute) and isinstance(each.value, ast.Call):
            made[p.text(each.value.func)].append(each.targets[0].attr)
        if isinstance(each.targets[0], ast.Tuple):
            names = [one.attr for one in each.targets[0].elts if isinstance(one, ast.Attribute)]
            made[f"line {each.lineno}"] += names
    return [names for names in made.values() if len(names) > 1]


# --- calls --------------------------------------------------------------------------------------------------------


@operator
def mode(p: Program) -> Iterator[Change]:
    """Training in place of evaluation and the other way round."""
    other = {"train": "eval", "eval": "train"}
    for call in p.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in other and not call.args:
            yield instead(call, f"{p.text(call.func.value)}.{other[call.func.attr]}()")


@operator
def default(p: Program) -> Iterator[Change]:
    """An argument that is given by name is forgotten."""
    for call in p.calls:
        for i, each in enumerate(call.keywords):
            if each.arg is not None:
                kept = [*map(p.text, call.args), *(p.text(one) for j, one in enumerate(call.keywords) if j != i)]
                yield instead(call, f"{p.text(call.func)}({', '.join(kept)})")


@operator
def arguments(p: Program) -> Iterator[Change]:
    """Two neighbours in a call change places."""
    for call in p.calls:
        for one, two in zip(call.args, call.args[1:]):
            if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                yield (*instead(one, p.text(two)), *instead(two, p.text(one)))


@operator
def typo(p: Program) -> Iterator[Change]:
    """What is set has another name than what is read."""
    for each in p.of(ast.Attribute, ast.Subscript):
        if not isinstance(each.ctx, ast.Store):
            continue
        if isinstance(each, ast.Attribute) and p.text(each.value) != "self":
            yield instead(each, f"{p.text(each.value)}.{each.attr}s")
        if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant):
            yield instead(each.slice, repr(f"{each.slice.value}s"))
    for each in p.of(ast.Dict):
        for key in each.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield instead(key, repr(f"{key.value}_"))
