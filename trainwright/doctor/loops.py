"""A model of a training script, from its syntax; the script is never run.

Calls and assignments are put in the order in which they run, each with the loops around it. A value is traced back to
what made it: whether a gradient flows through it, whether it is the unchanged result of a softmax.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Place: TypeAlias = Any
"""A node of the syntax tree, an expression or a statement; which fields it has depends on its class."""
Value: TypeAlias = frozenset[tuple[str, Place]]
"""The marks of a value: what was done to it, and at which node. LIVE: a gradient flows through it to a model."""
NOTHING, LIVE = Value(), ("live", None)
LOOPS, SCOPES = (ast.For, ast.AsyncFor, ast.While), (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
ROLES = {
    "sched": re.compile(r"sched|(LR|Plateau|Restarts)$"),
    "scaler": re.compile(r"scaler", re.I),
    "step": re.compile(r"opt|^(\w*Adam\w*|SGD|RMSprop|Rprop|LBFGS|Adagrad|Lion|Muon)$", re.I),
}
"""The role of an object with a ``.step()``, by the name of its class or its own."""
KINDS = {"clip_grad_norm_": "clip", "clip_grad_value_": "clip", "clip_grad_norm": "clip", "manual_backward": "backward"}
CUTS = {"detach", "detach_", "item", "numpy", "tolist", "float", "int", "tensor", "as_tensor", "from_numpy"}
NO_GRADIENT = {
    "argmax",
    "argmin",
    "size",
    "dim",
    "numel",
    "len",
    "isnan",
    "isfinite",
    "isinf",
    "state_dict",
    "deepcopy",
}
SAME_NUMBERS = {"view", "reshape", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "contiguous", "to"}
LOSS = re.compile(r"cross_entropy|_loss$|Loss$|^(criterion|loss_fn|loss_func)$")
MODEL = re.compile(r"^self$|(^|\.)(model|net|network)$|^self\.(?!log|print|save_hyper|optimizers|lr_sched|trainer)\w+$")


@dataclass(frozen=True)
class SourceEvent:
    """A call or an assignment. ``around``: the statements around it, innermost first, up to its function or file.

    ``at`` is its place in the order of execution; ``loops`` are the loops around it, outermost first.
    """

    node: Place
    kind: str
    owner: str
    at: int
    around: list[Place]
    loops: list[Place]

    def near(self, other: SourceEvent) -> bool:
        """Whether it is in the same function, and in every loop that ``other`` is in."""
        return self.around[-1] is other.around[-1] and self.loops[: len(other.loops)] == other.loops


def calls(node: Place, *names: str) -> list[ast.Call]:
    """Every call below a node, of functions with these last names (all if none is given)."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and (not names or last_name(n) in names)]


def name_of(node: Place) -> str:
    """The dotted name of a name or an attribute, ``self.model.head``; "" for other nodes."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value) or ast.unparse(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: Place) -> set[str]:
    """The dotted names below a node."""
    return {name_of(each) for each in ast.walk(node)} - {""}


def last_name(node: Place) -> str:
    """The last part of the name of a node, or of the function that a call calls."""
    return name_of(getattr(node, "func", node)).rpartition(".")[2]


def owner_of(call: Place) -> str:
    """The name of the object whose method is called: ``opt`` of ``opt.step()``; "" for functions."""
    return name_of(getattr(call.func, "value", None))


def owners(node: Place, *names: str) -> set[str]:
    """The names of the objects whose methods of these names are called below a node."""
    return {owner_of(call) for call in calls(node, *names)} - {""}


def _targets(node: Place) -> list[Place]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []


def marked(value: Value, mark: str) -> list[Place]:
    """The nodes at which a value got this mark."""
    return [what for name, what in value if name == mark]


def _cut(value: Value, where: Place) -> Value:
    """The value without its gradient, if ``where`` is a node that ends it."""
    return value - {LIVE} | {("cut", where)} if where and LIVE in value else value


def _in_order(node: Place) -> Iterator[Place]:
    """The nodes of a tree in the order in which they are evaluated."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


class LoopSource:
    """The names and values of a source; ``events``: its calls and assignments in the order in which they run."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree, self.order = tree, {node: place for place, node in enumerate(_in_order(tree))}
        self.parent = {child: node for node in self.order for child in ast.iter_child_nodes(node)}
        imports = [(n, a) for n in self.order if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
        self.aliases = {a.asname or a.name: f"{getattr(n, 'module', '') or ''}.{a.name}" for n, a in imports}
        self.returns = [n for n in self.order if isinstance(n, ast.Return) and n.value]
        self.assigned: dict[str, list[tuple[Place, Place]]] = {}
        for n, target in ((node, target) for node in self.order for target in _targets(node)):
            names = getattr(target, "elts", [target])
            for name, value in zip(names, n.value.elts if isinstance(n.value, ast.Tuple) else [n.value] * len(names)):
                self.assigned.setdefault(name_of(name), []).append((n, value))
        self.models = owners(tree, "train", "eval", "parameters", "named_parameters")
        self.zeroed = owners(tree, "zero_grad") - self.models
        optimizers = [value for name in self.assigned if self.role(name) == "step" for value in self.made(name)]
        self.trained = set().union(*(owners(v, "parameters", "named_parameters") for v in optimizers)) or self.models
        self.memo: dict[Place, Value] = {}
        self.events = [event for n in self.order for event in self.read(n)]

    def of(self, *kinds: str) -> list[SourceEvent]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def around(self, node: Place) -> list[Place]:
        """A node and the nodes around it, up to its function or the file."""
        found = [node]
        while not isinstance(found[-1], SCOPES):
            found.append(self.parent[found[-1]])
        return found

    def made(self, name: str) -> list[ast.Call]:
        """The calls whose results are assigned to a name."""
        return [value for _, value in self.assigned.get(name, []) if isinstance(value, ast.Call)]

    def read(self, node: Place) -> Iterator[SourceEvent]:
        """The events of one node: a call, or one for each target of an assignment."""
        found = [self.called(node)] if isinstance(node, ast.Call) else []
        for name in map(name_of, _targets(node)):
            sides = map(name_of, (getattr(node.value, "left", None), getattr(node.value, "right", None)))
            adds = isinstance(getattr(node, "op", getattr(node.value, "op", None)), ast.Add)
            adds &= isinstance(node, ast.AugAssign) or name in sides
            zeroes = name.endswith(".grad") and isinstance(node.value, ast.Constant)
            found.append(("zero_grad" if zeroes else "+=" if adds else "=", name))
        for kind, owner in found:
            around, head = self.around(node), owner.partition(".")[0] if kind in ("step", "zero_grad") else ""
            # a loop over optimizers or parameters is not a loop over batches
            turns = [(n, turn) for n in around if head for turn in (n, *getattr(n, "generators", []))]
            each = [n for n, turn in turns if name_of(getattr(turn, "target", None)) == head]
            loops = [n for n in around[::-1] if isinstance(n, LOOPS) and n not in each]
            yield SourceEvent(node, kind, "" if each else owner, self.order[node], around, loops)

    def called(self, node: ast.Call) -> tuple[str, str]:
        """The kind and the owner of a call."""
        kind, owner = self.kind(node), owner_of(node)
        role = self.role(owner)
        if kind == "step":
            return ("step", name_of(node.args[0])) if role == "scaler" and node.args else (role or "step?", owner)
        off = kind == "train" and [getattr(a, "value", True) for a in node.args] == [False]
        return "zero_grad" if kind == "zero_" and owner.endswith(".grad") else "eval" if off else kind, owner

    def kind(self, call: ast.Call) -> str:
        """The name of what is called, without import aliases; of an object its class (criterion: CrossEntropyLoss)."""
        func: Place = call.func.func if isinstance(call.func, ast.Call) else call.func
        made = [last_name(maker) for maker in self.made(name_of(func))]
        name = self.aliases.get(name_of(func), "").rpartition(".")[2] or (made or [last_name(func)])[-1]
        return KINDS.get(name, name)

    def role(self, name: str) -> str:
        """The role of an object with a ``.step()``: sched, scaler, step (an optimizer), or "" if unknown."""
        words = [*map(last_name, self.made(name)), name.rpartition(".")[2]]
        known = [role for word in words for role, pattern in ROLES.items() if pattern.search(word)]
        return known[0] if known else "step" if name in self.zeroed else ""

    def frozen(self, node: Place) -> Place:
        """The ``no_grad`` around a node; None if there is none."""
        above = self.around(node)
        contexts = [item.context_expr for n in above if isinstance(n, ast.With) for item in n.items]
        contexts += getattr(above[-1], "decorator_list", [])
        return next((c for c in contexts if {"no_grad", "inference_mode"} & {last_name(n) for n in ast.walk(c)}), None)

    def value(self, node: Place) -> Value:
        """The marks of the value of an expression."""
        if node not in self.memo:
            self.memo[node] = NOTHING  # until it is known: a name may depend on itself
            read = self.of_name if name_of(node) else self.of_call if isinstance(node, ast.Call) else self.of_expression
            self.memo[node] = read(node)
        return self.memo[node]

    def of_name(self, node: Place) -> Value:
        """By the last assignment above it in the same function. The arguments of forward count as live."""
        name, scope = name_of(node), self.around(node)[-1]
        above = [p for p in self.assigned.get(name, []) if self.around(p[0])[-1] is scope]
        above = [(s, v) for s, v in above if self.order[s] < self.order[node]]
        if above:
            statement, value = max(above, key=lambda pair: self.order[pair[0]])
            augmented = isinstance(statement, ast.AugAssign)
            both = self.value(value) | (self.value(statement.target) if augmented else NOTHING)
            divided = {("over", ast.unparse(value))} if augmented and isinstance(statement.op, ast.Div) else NOTHING
            return _cut(both | divided, self.frozen(statement))
        if isinstance(node, ast.Attribute):
            return _cut(self.value(node.value), node if node.attr == "data" else None)
        is_input = getattr(scope, "name", "") == "forward" and name in {a.arg for a in scope.args.args[1:]}
        return Value({LIVE}) if is_input else NOTHING

    def of_expression(self, node: Place) -> Value:
        """The marks of its parts; an operation on a softmax makes it something else."""
        parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
        inside = NOTHING.union(*(self.value(n) for n in parts if isinstance(n, ast.expr)))
        changed = Value(mark for mark in inside if mark[0] != "soft")
        match node:
            case ast.Subscript():
                return inside
            case ast.Compare() | ast.Lambda():
                return NOTHING
            case ast.BinOp(op=ast.Div()):
                return changed | {("over", ast.unparse(node.right))}
            case ast.UnaryOp(op=ast.USub()) if marked(inside, "loss") or "loss" in name_of(node.operand).lower():
                return changed | {("minus", node)}
        return changed

    def of_call(self, call: Place) -> Value:
        """By the function that is called and the marks of its arguments."""
        kind, name, arguments = self.kind(call), name_of(call.func), [*call.args, *(k.value for k in call.keywords)]
        inputs = NOTHING.union(*map(self.value, arguments))
        inside = inputs | (self.value(call.func.value) if isinstance(call.func, ast.Attribute) else NOTHING)
        changed = Value(mark for mark in inside if mark[0] != "soft")
        if kind in NO_GRADIENT or kind in SAME_NUMBERS:
            return inside if kind in SAME_NUMBERS else NOTHING
        if kind in CUTS or LOSS.search(kind):
            return _cut(changed, call) if kind in CUTS else changed | {("loss", call)}
        if kind in ("softmax", "Softmax") or (kind in ("div", "div_") and arguments):
            return changed | {("soft", call) if "soft" in kind.lower() else ("over", ast.unparse(arguments[0]))}
        if name in self.models or MODEL.search(name):
            inner = marked(inputs, "inner") + ([] if LIVE in inputs else marked(inputs, "cut"))
            output = Value({LIVE, *(("inner", n) for n in inner), *(("soft", n) for n in self.ends(name))})
            return _cut(output, self.frozen(call))
        return changed

    def ends(self, name: str) -> list[Place]:
        """The softmax that a model ends with: the last of a Sequential, one added to it, or what forward returns."""
        added = [c for c in calls(self.tree, "add_module", "append") if owner_of(c) == name]
        found = [c.args[-1] for c in added + [c for c in self.made(name) if last_name(c) == "Sequential"] if c.args]
        makers = {last_name(maker) for maker in self.made(name)}
        for result in self.returns:
            forward = self.around(result)[-1]
            if getattr(forward, "name", "") == "forward" and (
                not makers or getattr(self.parent[forward], "name", "") in makers
            ):
                found += marked(self.value(result.value), "soft")
        return [n for n in found if isinstance(n, ast.Call) and self.kind(n) in ("softmax", "Softmax")]

    def fed(self, step: SourceEvent) -> list[SourceEvent]:
        """The backward calls whose gradients an optimizer step uses."""
        since = max((e.at for e in self.of("step") if e.at < step.at and e.around[-1] is step.around[-1]), default=-1)
        return [b for b in self.of("backward") if since < b.at < step.at and b.near(step)]

    def zeroing(self, step: SourceEvent) -> list[SourceEvent]:
        """The zero_grad calls in the loops of a step: of its optimizer, of its model, or of an unknown object."""
        made = " ".join(map(ast.unparse, self.made(step.owner)))
        near = [z for z in self.of("zero_grad") if z.near(step)]
        own = [z for z in near if not z.owner or not step.owner or z.owner == step.owner]
        return own + [z for z in near if self.role(z.owner) != "step" and (not made or f"{z.owner}." in made)]

    def period(self, event: SourceEvent) -> Place:
        """The innermost ``if ... % A`` between an event and its loop."""
        inner = event.around[: event.around.index(event.loops[-1])] if event.loops else event.around
        return next((n for n in inner if isinstance(n, ast.If) and "%" in self.condition(n)), None)

    def condition(self, node: Place) -> str:
        """The condition as text, followed by the values that its names were assigned."""
        named = [value for name in names_in(node.test) for _, value in self.assigned.get(name, [])]
        return " ; ".join(map(ast.unparse, [node.test, *named]))

    def losses(self) -> list[Value]:
        """The values that are differentiated: by backward(), or by the framework that calls training_step."""
        whole = [
            r for r in self.returns if getattr(self.around(r)[-1], "name", "") in ("training_step", "compute_loss")
        ]
        return [self.value(node) for node in (*map(differentiated, self.of("backward")), *(r.value for r in whole))]


def differentiated(backward: SourceEvent) -> Place:
    """The expression that backward is called on."""
    call = backward.node
    return call.args[0] if call.args else getattr(call.func, "value", call)
