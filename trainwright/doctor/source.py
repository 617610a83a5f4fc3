"""The line of the user's source that a finding is about, from its syntax; the source is never run.

This is the fallback where the recorder did not see which line made the call (``call_lines``). Each check yields the
places that fit its fault. The finding itself comes from the run; where two lines fit, there is no answer.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainwright.doctor.loops import (
    LIVE,
    SCOPES,
    LoopSource,
    Place,
    calls,
    differentiated,
    last_name,
    marked,
    name_of,
    names_in,
    owners,
)

VALIDATION = re.compile(r"(?<![a-z])(val|test|eval|dev(?!ice)|holdout)")
GENERATORS = ("parameters", "filter", "map", "chain")
FRESH = re.compile(r"init|reset|normal_|uniform_|constant_|zeros?_|ones_")


@dataclass(frozen=True)
class Pointer:
    """A line of the user's source, counted as in their file, and its text."""

    line: int
    text: str


Check = Callable[[LoopSource], Iterable[Place]]


def _clip_no_effect(s: LoopSource) -> Iterator[Place]:
    for clip in s.of("clip"):
        near = [e for e in s.of("backward", "step", "zero_grad") if e.near(clip)]
        before, after = [e for e in near if e.at < clip.at] or near, [e for e in near if e.at > clip.at] or near
        if {"backward", "step"} <= {e.kind for e in near} and before[-1].kind != "backward" and after[0].kind != "step":
            yield clip.node


def _not_normalised(s: LoopSource) -> Iterator[Place]:
    """In a single loop ``/ len(y)`` is not the division meant; in an inner loop of micro-batches it could be."""
    for step, b in ((each, b) for each in s.of("step") for b in s.fed(each)):
        inner, over = len(b.loops) > len(step.loops), marked(s.value(differentiated(b)), "over")
        window = inner or (s.period(step) and s.period(step) is not s.period(b))
        divided = [o for o in over if inner or "(" not in o] or any(
            ".grad" in e.owner for e in s.of("=", "div_", "mul_")
        )
        if window and not divided and "accel" not in b.owner:
            yield b.node


def _grads_discarded(s: LoopSource) -> Iterator[Place]:
    for step, z in ((each, z) for each in s.of("step") for z in s.zeroing(each)):
        inner = len(z.loops) > len(step.loops) and any(b.loops == z.loops for b in s.fed(step))
        if inner or (z.loops == step.loops and s.period(step) and not s.period(z)):
            yield z.node


def _leftover_window(s: LoopSource) -> Iterator[Place]:
    for step, window in ((step, s.period(step)) for step in s.of("step") if s.period(step)):
        flushes = [e for e in s.of("step", "zero_grad") if e.loops == step.loops[:-1] and (e.loops or e.at > step.at)]
        if not flushes and not re.search(r" or |len\(", s.condition(window)):
            yield window


def _eval_during_training(s: LoopSource) -> Iterator[Place]:
    """Between functions the order is not known: there it is a fault only if no train() recurs."""
    for e, b in ((e, b) for e in s.of("eval") for b in s.of("backward") if e.owner in s.trained):
        shared = [loop for loop in e.loops if loop in b.loops]
        back = [t for t in s.of("train") if not shared or shared[-1] in t.loops]
        if e.around[-1] is not b.around[-1]:
            bad = not any(t.loops or t.around[-1] in (e.around[-1], b.around[-1]) for t in back)
        elif e.at < b.at:
            bad = not any(e.at < t.at < b.at for t in back)
        else:
            bad = bool(shared) and not any(t.at > e.at or t.at < b.at for t in back)
        yield from [e.node] if bad else []


def _train_during_eval(s: LoopSource) -> Iterator[Place]:
    """A loop over held-out data, or one call of the model without gradients, after train() or after nothing."""
    training = [loop for b in s.of("backward") for loop in b.loops]
    for call in (e for e in s.events if name_of(getattr(e.node, "func", e.node)) in s.trained):
        texts = [getattr(n, "name", "") or name_of(getattr(n, "iter", n)) for n in call.around]
        held_out = s.frozen(call.node) or any(VALIDATION.search(text.lower()) for text in texts)
        mode = [e.kind for e in s.of("train", "eval") if e.at < call.at and e.around[-1] is call.around[-1]]
        if held_out and mode[-1:] != ["eval"] and call.loops[-1:] != training[-1:]:
            yield call.loops[-1] if call.loops and call.loops[-1] not in training else call.node


def _functional_dropout(s: LoopSource) -> Iterator[Place]:
    for call in calls(s.tree):
        text = s.aliases.get(name_of(call.func).partition(".")[0], "") + "." + name_of(call.func)
        given = {k.arg: ast.unparse(k.value) for k in call.keywords}
        functional = re.search(r"(functional|\bF)\..*dropout[123]?d?$", text)
        always = given.get("training", "True" if len(call.args) < 3 else "") == "True"
        if (functional and always) or not re.search(r"training|^0(\.0*)?$", given.get("dropout_p", "0")):
            yield call


def _unit_mismatch(s: LoopSource) -> Iterator[Place]:
    """Stepped at each batch of the inner loop, or at each micro-batch of a window."""
    steps = [s.period(step) for step in s.of("step")]
    for e in (e for e in s.of("sched") if any(e.loops and e.loops == b.loops for b in s.of("backward"))):
        per_step = re.search("OneCycle|Cyclic|warmup", " ".join(map(last_name, s.made(e.owner))))
        if s.period(e) in (None, *steps) and (not per_step or (any(steps) and not s.period(e))):
            yield e.node


def _never_stepped(s: LoopSource) -> Iterator[Place]:
    """Not where it is passed to anything that may step it."""
    passed = [a for c in calls(s.tree) if last_name(c) != "watch" for a in (*c.args, *c.keywords)]
    used = {n for a in (*passed, *s.returns) for n in names_in(a)} | {e.owner for e in s.of("sched", "step?")}
    for name in s.assigned:
        if s.role(name) == "sched" and name not in used:
            yield from s.made(name)


def _autocast(s: LoopSource) -> Iterator[Place]:
    for step in (step for step in s.of("step") if step.loops):
        for node in step.around[step.around.index(step.loops[-1]) :]:
            for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else []:
                made = [
                    c for c in (item.context_expr, *s.made(name_of(item.context_expr))) if last_name(c) == "autocast"
                ]
                if made and "cache_enabled=False" not in ast.unparse(made[0]):
                    yield node


def _kept(s: LoopSource, *, losses: bool) -> Iterator[Place]:
    """Values with a graph that go into a sum or a list which outlives the batch."""
    backs = s.of("backward")
    ours = {name for b in backs for name in names_in(differentiated(b))}
    for e in s.of("+=", "append", "extend"):
        given = e.node.value if e.kind == "+=" else (e.node.args or [e.node])[0]
        value, renewed = s.value(given), [a for a in s.of("=") if a.owner == e.owner and a.loops and a.loops == e.loops]
        loss = bool(marked(value, "loss")) or name_of(given) in ours or e.kind == "+="
        keeps = LIVE in value and not s.frozen(e.node) and (e.loops or e.owner.startswith("self."))
        if keeps and loss == losses and e.owner not in ours and not renewed and not isinstance(given, ast.List):
            yield e.node


def _same_order(s: LoopSource) -> Iterator[Place]:
    """A seed in the loop over epochs that does not change with it."""
    for e in s.of("manual_seed", "default_rng", "seed", "seed_everything", "set_seed", "Generator"):
        outer = any(b.near(e) and len(b.loops) > len(e.loops) for b in s.of("backward"))
        again = e.kind == "Generator" and any(m.near(e) for m in s.of("manual_seed"))
        varies = {
            name_of(n) for loop in e.loops for n in ast.walk(loop) if isinstance(getattr(n, "ctx", None), ast.Store)
        }
        if e.loops and outer and not again and not any(names_in(a) & varies for a in e.node.args):
            yield e.node


def _reinitialised(s: LoopSource) -> Iterator[Place]:
    loads = {e.owner: e.at for e in reversed(s.of("load_state_dict"))}
    for e in s.of("apply", "init_weights", "reset_parameters", "_init_weights"):
        bodies = [f for f in s.order if isinstance(f, SCOPES[1:]) and f.name in names_in(e.node)]
        fresh = any(FRESH.search(ast.unparse(n)) for n in (e.node, *bodies))
        if fresh and loads.get(e.owner, e.at) < e.at:
            yield e.node


def _stale_params(s: LoopSource) -> Iterator[Place]:
    for built in (e for e in s.of("=") if s.role(e.owner) == "step"):
        for model in owners(built.node, "parameters", "named_parameters"):
            again = max(e.at for e in s.of("=") if e.owner == built.owner)
            for e in (e for e in s.events if again < e.at):
                call = getattr(e.node, "value", None)
                whole = e.kind == "=" and e.owner == model and isinstance(call, ast.Call)
                copied = whole and (last_name(call) == "deepcopy" or model not in names_in(call))
                part = e.kind == "=" and e.owner.startswith(model + ".") and last_name(call)[:1].isupper()
                if (
                    copied
                    or part
                    or (e.kind == "load_state_dict" and e.owner == model and "assign=True" in ast.unparse(e.node))
                ):
                    yield e.node


def _empty_iterable(s: LoopSource) -> Iterator[Place]:
    """A generator that something else, or the iteration before, has used up."""
    for clip in (e for e in s.of("clip") if e.node.args):
        name = name_of(clip.node.args[0])
        uses = [n for n in s.order if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        for e in (e for e in s.of("=") if name and e.owner == name and len(s.assigned[name]) == 1):
            lazy = isinstance(e.node.value, ast.GeneratorExp) or last_name(e.node.value) in GENERATORS
            if lazy and (len(uses) > 1 or len(clip.loops) > len(e.loops)):
                yield e.node


def _missing_zero_grad(s: LoopSource) -> Iterator[Place]:
    for step in s.of("step"):
        yield from [] if s.zeroing(step) else [b.node for b in s.fed(step)]


def _zero_grad_before_step(s: LoopSource) -> Iterator[Place]:
    """Not one in an ``if`` that the step is not in: it belongs to steps that are skipped, as after a NaN."""
    for step in s.of("step"):
        last = [b.at for b in s.fed(step)][-1:]
        for z in s.zeroing(step):
            if last and last[0] < z.at < step.at and all(n in step.around for n in z.around if isinstance(n, ast.If)):
                yield z.node


def _step_never_called(s: LoopSource) -> Iterator[Place]:
    stepped = {e.owner for e in s.of("step", "step?")}
    if not stepped:
        yield from (b.node for b in s.of("backward"))
    elif "" not in stepped and not s.of("step?"):
        yield from (z.node for z in s.of("zero_grad") if s.role(z.owner) == "step" and z.owner not in stepped)


def _clip_before_unscale(s: LoopSource) -> Iterator[Place]:
    for clip in (e for e in s.of("clip") if "accel" not in e.owner):
        backs = [b.at for b in s.of("backward") if b.at < clip.at and b.around[-1] is clip.around[-1]]
        scaled = any(e.at < clip.at and e.around[-1] is clip.around[-1] for e in s.of("scale"))
        if backs and scaled and not any(backs[-1] < e.at < clip.at for e in s.of("unscale_")):
            yield clip.node


def _cut_at_loss(s: LoopSource) -> Iterator[Place]:
    for value in s.losses():
        yield from [] if LIVE in value else marked(value, "cut")


def _cut_in_model(s: LoopSource) -> Iterator[Place]:
    """With several optimizers a detach between two models is intended."""
    results = [s.value(r.value) for r in s.returns if getattr(s.around(r)[-1], "name", "") == "forward"]
    for value in results + (s.losses() if len({e.owner for e in s.of("step")}) < 2 else []):
        yield from marked(value, "inner")
    for value in results:
        yield from [] if LIVE in value else marked(value, "cut")


def _softmax_into(*losses: str) -> Check:
    def check(s: LoopSource) -> Iterator[Place]:
        for e in s.of(*losses):
            yield from marked(s.value(e.node.args[0]), "soft") if e.node.args else []

    return check


def _wrong_sign(s: LoopSource) -> Iterator[Place]:
    for value in s.losses():
        yield from marked(value, "minus")
    for b in s.of("backward"):
        negated = [n for n in ast.walk(b.node) if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub)]
        yield from [n for n in negated if name_of(n.operand)]
    yield from [c for c in calls(s.tree) for k in c.keywords if ast.unparse(k) == "maximize=True"]


def _model_copies(s: LoopSource) -> Iterator[Place]:
    for e in s.events:
        stored = isinstance(e.node, ast.Assign) and isinstance(e.node.targets[0], ast.Subscript) and e.loops
        if (stored or e.kind in ("append", "insert")) and calls(e.node, "deepcopy"):
            yield e.node


def _graph_in_sum(s: LoopSource) -> Iterator[Place]:
    return _kept(s, losses=True)


def _outputs_in_list(s: LoopSource) -> Iterator[Place]:
    return _kept(s, losses=False)


CHECKS: dict[str, Check] = {
    "opt.missing_zero_grad": _missing_zero_grad,
    "opt.zero_grad_before_step": _zero_grad_before_step,
    "opt.step_never_called": _step_never_called,
    "grad.clip_before_unscale": _clip_before_unscale,
    "grad.clip_no_effect": _clip_no_effect,
    "accum.not_normalised": _not_normalised,
    "accum.grads_discarded": _grads_discarded,
    "accum.leftover_window": _leftover_window,
    "grad.graph_cut_at_loss": _cut_at_loss,
    "grad.graph_cut": _cut_in_model,
    "loss.softmax_before_ce": _softmax_into("cross_entropy", "CrossEntropyLoss"),
    "loss.nll_on_probs": _softmax_into("nll_loss", "NLLLoss"),
    "loss.wrong_sign": _wrong_sign,
    "mode.eval_during_training": _eval_during_training,
    "mode.train_during_eval": _train_during_eval,
    "mode.functional_dropout": _functional_dropout,
    "sched.unit_mismatch": _unit_mismatch,
    "sched.never_stepped": _never_stepped,
    "prec.autocast_stale_cache": _autocast,
    "mem.graph_retained_by_scalar": _graph_in_sum,
    "mem.outputs_accumulated": _outputs_in_list,
    "mem.model_copies": _model_copies,
    "data.same_order_every_epoch": _same_order,
    "ckpt.reinitialised": _reinitialised,
    "opt.stale_params": _stale_params,
    "grad.clip_empty_iterable": _empty_iterable,
}
"""By the code of the finding: the places in the source that fit it."""


def point_at(code: str, source: str, *, first_line: int = 1) -> Pointer | None:
    """The line of ``source`` (a file or a function, which starts at ``first_line`` of its file) that ``code`` is about.

    None where the source cannot be read, shows nothing of that code, or shows it in two places.
    """
    tree = _parsed(source)
    if code not in CHECKS or tree is None:
        return None
    try:
        lines = {_line(node) for node in CHECKS[code](LoopSource(tree))}
    except RecursionError:  # an expression with a thousand nested levels
        return None
    if len(lines) != 1:
        return None
    line = lines.pop()
    return Pointer(first_line + line - 1, re.split(r"\r\n|\r|\n", source)[line - 1].strip())


def _parsed(source: str) -> ast.Module | None:
    """The syntax tree, also of the body of a nested function, which is indented as a whole; None if it has errors."""
    for text, shift in ((source, 0), (textwrap.dedent(source), 0), (f"if True:\n{source}", -1)):
        try:
            with _without_warnings():  # of the user's own "\d"
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree) if shift else ():
            if isinstance(node, ast.expr | ast.stmt):
                node.lineno, node.end_lineno = node.lineno + shift, (node.end_lineno or node.lineno) + shift
        return tree
    return None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Not by ``warnings.catch_warnings``: after it Python shows each warning of the whole process once more."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    ignored = ("ignore", None, Warning, None, 0)
    filters.insert(0, ignored)
    try:
        yield
    finally:
        filters.remove(ignored)


def _line(node: Place) -> int:
    """The line of a node; of a call that of its name, as a chain of methods may span several lines."""
    place: Place = getattr(node, "func", node)
    return int((place.end_lineno if isinstance(place, ast.Attribute) else None) or place.lineno)
