"""Remedies that a replay tries before they are offered, one function each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.measure.loss_calls import class_dim, is_simplex
from trainwright.doctor.measure.mixed_precision import gradient_distance
from trainwright.doctor.measure.nonfinite import all_finite, num_backward
from trainwright.doctor.measure.nonfinite import loss_scale as recorded_scale
from trainwright.recorder.program import ClipGradients, OptimizerStep
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import UNCHANGED, Intervention, ReplayResult
from trainwright.replay.session import ReplaySession

DEFAULT_STEPS = 24.0  # Duration of a trial in training steps: eight unchanged updates, and eight with the remedy
NUM_UPDATES = 8  # Number of updates on one batch
MAX_STEPS = 32  # Maximum number of recorded steps that are replayed


class NotTried(Exception):
    """A remedy cannot be tried on this step. The message has the reason."""


class RegisteredTrial(NamedTuple):
    """A trial: ``run(session, **args)`` returns text on the outcome, with numbers, or raises NotTried.

    ``steps`` is its approximate duration in training steps.
    """

    run: Callable[..., str]
    steps: float


def course(losses: Sequence[float]) -> str:
    """Returns text on the first and the last of some losses."""
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"


def compare_losses(what: str, was: list[float], now: list[float]) -> str:
    """Returns text on the losses with a change and without. It begins with "no better" if they are not lower."""
    better = "" if math.isfinite(now[-1]) and not now[-1] >= was[-1] else "no better "  # also if ``was`` is NaN
    return f"{better}{what}: loss {course(now)} in {len(now)} steps; unchanged: {course(was)} in {len(was)} steps"


def _compare_updates(session: ReplaySession, what: str, change: Intervention) -> str:
    """Compares updates on this batch with a change and without."""
    was, now = (session.train(NUM_UPDATES, each, repeat=True) for each in (UNCHANGED, change))
    return compare_losses(what, was, now)


def other_lr(session: ReplaySession, factor: float) -> str:
    """Tries updates on this batch with the learning rate times ``factor``."""
    return _compare_updates(session, f"with the learning rate x {factor:g}", Intervention(lr=factor))


def another_rate(session: ReplaySession, lr: float) -> str:
    """Tries updates on this batch with the learning rate ``lr``."""
    if lr <= 0:
        raise NotTried("no other learning rate is known")
    change = Intervention(group=lambda step, group: {"lr": lr})
    return _compare_updates(session, f"with a learning rate of {lr:.3g}", change)


def weight_decay(session: ReplaySession, to: float) -> str:
    """Tries the recorded steps with another weight decay."""
    changed = Intervention(group=lambda step, group: {"weight_decay": to} if "weight_decay" in group else {})
    return compare_losses(f"with a weight decay of {to:g}", session.train(MAX_STEPS), session.train(MAX_STEPS, changed))


def clip_at(session: ReplaySession, at: float) -> str:
    """Tries updates on this batch with gradients clipped at ``at``. Adds a clip before the update if there is none."""
    with _clipped(session, at):
        now = session.train(NUM_UPDATES, Intervention(clip=at), repeat=True)
    return compare_losses(f"with gradients clipped at {at:g}", session.train(NUM_UPDATES, repeat=True), now)


@contextmanager
def _clipped(session: ReplaySession, at: float) -> Iterator[None]:
    program = session.recorded_step.program
    if not any(isinstance(each, ClipGradients) for each in program):
        place = next((index for index, each in enumerate(program) if isinstance(each, OptimizerStep)), None)
        if place is None:
            raise NotTried("the step has no update")
        every = list(range(len(session.replayer.subject.parameters)))
        session.recorded_step.program = [*program[:place], ClipGradients("norm", at, every), *program[place:]]
    try:
        yield
    finally:
        session.recorded_step.program = program


def group_lr(session: ReplaySession, optimizer: int, group: int, lr: float) -> str:
    """Tries updates on this batch with the learning rate ``lr`` for one parameter group."""
    first = id(session.optimizers[optimizer].param_groups[group]["params"][0])

    def change(step: int, live: dict[str, Any]) -> dict[str, Any]:
        return {"lr": lr} if live["params"] and id(live["params"][0]) == first else {}

    return _compare_updates(session, f"with a learning rate of {lr:g} for group {group}", Intervention(group=change))


def with_optimizer(session: ReplaySession, names: list[str]) -> str:
    """Tries updates on this batch with these parameters in the first optimizer."""
    held = session.optimizers[0].param_groups[0]["params"]
    if not held:
        raise NotTried("the optimizer holds no parameters")
    more = [*held, *(session.parameters[name] for name in names)]

    def change(step: int, group: dict[str, Any]) -> dict[str, Any]:
        return {"params": more} if group["params"] and group["params"][0] is held[0] else {}

    return _compare_updates(session, f"with {len(names)} more parameters in the optimizer", Intervention(group=change))


def logits_instead_of_probabilities(session: ReplaySession) -> str:
    """Tries the logarithm of the probabilities as logits. Compares the negative log-likelihood of the targets."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    truth: list[Tensor] = []  # scores for the nll_loss after a log_softmax that received probabilities

    def handler(change: bool) -> OpHandler:
        def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            name, x = function_name(function), args[0] if args else None
            if not isinstance(x, Tensor) or not x.requires_grad or name not in _SCORE_FUNCTIONS:
                return function(*args, **kwargs)
            scores = _scores(name, x, args, kwargs)
            if name == "log_softmax":
                truth[:] = [] if scores is None else [scores.detach()]
            elif scores is not None or (name == "nll_loss" and truth):
                right = truth.pop() if scores is None else scores.detach()
                with torch.no_grad():
                    losses[change].append(float(function(right, *args[1:], **kwargs).mean()))
            return function(scores if change and scores is not None else x, *args[1:], **kwargs)

        return call

    for change in losses:
        session.train(NUM_UPDATES, Intervention(ops=handler(change)), repeat=True)
    was, now = losses[False], losses[True]
    if len(was) < 2 or len(now) < 2:
        raise NotTried("the step could not be replayed")
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    text = f"{better}-log p of the targets {course(now)} in {len(now)} updates on this batch with logits"
    return f"{text}; unchanged: {course(was)}"


_SCORE_FUNCTIONS = frozenset({"cross_entropy", "nll_loss", "kl_div", "log_softmax", "binary_cross_entropy_with_logits"})


def _scores(name: str, argument: Tensor, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns scores or log-probabilities that replace wrong arguments; None if the argument is right."""
    tiny = torch.finfo(argument.dtype).tiny
    if name == "binary_cross_entropy_with_logits":
        inside = bool(((argument >= 0) & (argument <= 1)).all())
        return torch.logit(argument, torch.finfo(argument.dtype).eps) if inside else None
    if is_simplex(argument, class_dim(name, argument, args, kwargs)):
        return argument.clamp_min(tiny).log()
    if name == "nll_loss" and bool((argument > 0).any()):
        return argument.log_softmax(class_dim(name, argument, args, kwargs))
    return None


def loss_scale(session: ReplaySession) -> str:
    """Tries three loss scales. Returns text on the largest one with finite gradients."""
    plain = session.run().grads
    for scale in (2.0**16, 2.0**12, 2.0**8):
        scaled = session.run(Intervention(loss_scale=scale)).grads
        exact = {name: grad.float() / scale for name, grad in scaled.items() if grad is not None}
        if (moved := gradient_distance(plain, exact)) is not None:
            pairs = [(grad, exact[name]) for name, grad in plain.items() if grad is not None and name in exact]
            lost = sum(int(((true != 0) & (grad == 0)).sum()) for grad, true in pairs if not true.is_sparse)
            return (
                f"with the loss times {scale:g}: {lost} elements are no longer 0, and the gradients move by {moved:.1%}"
            )
    raise NotTried("no loss scale keeps the gradients finite")


def fp32_weights(session: ReplaySession) -> str:
    """Tries the update with parameters and optimizer state in float32."""

    @contextmanager
    def states_in_fp32() -> Iterator[None]:
        for optimizer in session.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        state[name] = value.float()
        yield

    still = []
    for intervention in (Intervention(), Intervention(dtype="fp32", model=states_in_fp32)):
        result = session.run(intervention, upto="step")
        if result.error is not None:
            raise NotTried(str(result.error))
        grads = [(name, grad) for name, grad in result.grads.items() if grad is not None and not grad.is_sparse]
        same = [(result.after[name] == result.before[name])[grad != 0] for name, grad in grads]
        still.append(float(torch.cat(same).float().mean()))
    return f"with weights in float32 the update leaves {still[1]:.1%} of them unchanged; in 16 bits: {still[0]:.1%}"


EPS = 1e-6
ALIASES = {"truediv": "div", "rtruediv": "div", "divide": "div", "true_divide": "div", "rdiv": "div", "itruediv": "div"}
"""Other names of the same functions."""
MASK_VALUE = -1e4  # Below all logits. Every dtype represents it with margin for an addition.


def without_these_samples(session: ReplaySession, rows: Sequence[int], micro: int | None = None) -> str:
    """Tries the micro-batch without these samples."""
    intervention = _without(session, rows, micro)
    samples = _ids(session, rows, micro)
    return f"without {samples}: " + _compare(session, intervention, micro)


def in_fp32(session: ReplaySession) -> str:
    """Tries the full step in float32, without autocast."""
    return "in fp32: " + _compare(session, Intervention(dtype="fp32"))


def guarded(session: ReplaySession, op: str) -> str:
    """Tries to clamp the input of every call of ``op`` to its range of finite values and derivatives."""
    if op not in _GUARDS:
        raise NotTried(f"there is no guard for {op}")
    guard, words = _GUARDS[op]
    guarded_calls = []

    def call_guarded(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function).strip("_")
        if ALIASES.get(name, name) == op:
            guarded_calls.append(name)
            args = guard(name, args)
        return function(*args, **kwargs)

    outcome = f"with {words}: " + _compare(session, Intervention(ops=call_guarded))
    if not guarded_calls:
        raise NotTried(f"{op} is called inside of another function")
    return outcome


def finite_mask(session: ReplaySession) -> str:
    """Tries a large finite negative number instead of infinite and overflowing mask constants."""

    def around(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function).strip("_")
        if name in ("masked_fill", "full", "full_like", "where", "mul", "rmul", "add", "radd", "sub", "rsub", "fill"):
            args = tuple(map(_clamp_mask, args))
            kwargs = {key: _clamp_mask(value) for key, value in kwargs.items()}
        if name in ("softmax", "log_softmax", "cross_entropy", "matmul") and isinstance(args[0], Tensor):
            args = (args[0].clamp(min=MASK_VALUE), *args[1:])
        return function(*args, **kwargs)

    return "with a finite mask value: " + _compare(session, Intervention(ops=around))


def valid_targets(session: ReplaySession) -> str:
    """Tries the sum of the losses divided by max(1, number of valid targets)."""

    def around(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        if name not in ("cross_entropy", "nll_loss") or kwargs.get("reduction", "mean") != "mean":
            return function(*args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs["target"]
        valid = (target != kwargs.get("ignore_index", -100)).sum()
        return function(*args, **{**kwargs, "reduction": "sum"}) / valid.clamp(min=1)

    return "divided by max(1, valid targets): " + _compare(session, Intervention(ops=around))


def zero_infinity(session: ReplaySession) -> str:
    """Tries ``ctc_loss(zero_infinity=True)``."""

    def around(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) == "ctc_loss":
            args, kwargs = args[:6], {**kwargs, "zero_infinity": True}
        return function(*args, **kwargs)

    return "with zero_infinity=True: " + _compare(session, Intervention(ops=around))


# Guards. Each returns safe arguments of a call.


_Guard: TypeAlias = Callable[[str, Args], Args]


def _above(low: float) -> _Guard:
    return lambda name, args: (args[0].clamp(min=low), *args[1:])


def _below_overflow(name: str, args: Args) -> Args:
    dtype = args[0].dtype if args[0].dtype.is_floating_point else torch.float32
    return (args[0].clamp(max=float(torch.tensor(torch.finfo(dtype).max, device="cpu").log()) / 4), *args[1:])


def _no_zero_divisor(name: str, args: Args) -> Args:
    at = 0 if name in ("rtruediv", "rdiv", "reciprocal") else 1
    divisor = args[at]
    if not isinstance(divisor, Tensor):
        return args
    safe = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return tuple(safe if number == at else each for number, each in enumerate(args))


def _inside(name: str, args: Args) -> Args:
    return (args[0].clamp(-1 + EPS, 1 - EPS), *args[1:])


_GUARDS: dict[str, tuple[_Guard, str]] = {
    "log": (_above(EPS), f"clamp(min={EPS:g}) before log"),
    "log2": (_above(EPS), f"clamp(min={EPS:g}) before log2"),
    "log10": (_above(EPS), f"clamp(min={EPS:g}) before log10"),
    "sqrt": (_above(EPS), f"clamp(min={EPS:g}) before sqrt"),
    "rsqrt": (_above(EPS), f"clamp(min={EPS:g}) before rsqrt"),
    "pow": (_above(EPS), f"clamp(min={EPS:g}) before pow"),
    "exp": (_below_overflow, "the input of exp bounded by a quarter of the largest exponent"),
    "div": (_no_zero_divisor, "1 instead of a divisor of 0"),
    "reciprocal": (_no_zero_divisor, "1 instead of a divisor of 0"),
    "acos": (_inside, "clamp to the inside of [-1, 1] before acos"),
    "asin": (_inside, "clamp to the inside of [-1, 1] before asin"),
    "atanh": (_inside, "clamp to the inside of [-1, 1] before atanh"),
}


def _clamp_mask(value: object) -> object:
    """Returns a mask constant clamped to at least MASK_VALUE; other values unchanged."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return max(value, MASK_VALUE)
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.clamp(min=MASK_VALUE)
    return value


# Outcomes


def _without(session: ReplaySession, rows: Sequence[int], micro: int | None) -> Intervention:
    if session.size is None:
        raise NotTried("the batch size is not known")
    others = [row for row in range(session.size) if row not in set(rows)]
    if not others:
        raise NotTried("nothing would be left of the batch")
    return Intervention(rows=others, micro=None if micro is None else [micro])


def _ids(session: ReplaySession, rows: Sequence[int], micro: int | None) -> str:
    ids = session.ids[micro or 0] if len(session.ids) > (micro or 0) else None
    if ids is None or len(ids) != session.size:
        return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the batch"
    return f"sample{'s' * (len(rows) > 1)} {', '.join(str(ids[row]) for row in rows)}"


def _compare(session: ReplaySession, intervention: Intervention, micro: int | None = None) -> str:
    scale = 1 / recorded_scale(session.recorded_step)
    was = session.run(
        Intervention(
            loss_scale=scale, micro=None if micro is None or num_backward(session.recorded_step) < 2 else [micro]
        )
    )
    now = session.run(replace(intervention, loss_scale=scale))
    if now.error is not None and was.error is None:
        raise NotTried(str(now.error).partition("\n")[0])
    return f"{_words(now)}; unchanged: {_words(was)}"


def _words(result: ReplayResult) -> str:
    if result.error is not None:
        return f"{type(result.error).__name__}: {result.error}"
    words = f"loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
    return words if all_finite(result) else f"not finite ({words})"


TRIALS: dict[str, RegisteredTrial] = {
    "finite_mask": RegisteredTrial(finite_mask, 3.0),
    "fp32_weights": RegisteredTrial(fp32_weights, 3.0),
    "guarded": RegisteredTrial(guarded, 3.0),
    "in_fp32": RegisteredTrial(in_fp32, 3.0),
    "loss_scale": RegisteredTrial(loss_scale, 3.0),
    "valid_targets": RegisteredTrial(valid_targets, 3.0),
    "without_these_samples": RegisteredTrial(without_these_samples, 3.0),
    "zero_infinity": RegisteredTrial(zero_infinity, 3.0),
    "another_rate": RegisteredTrial(another_rate, DEFAULT_STEPS),
    "clip_at": RegisteredTrial(clip_at, DEFAULT_STEPS),
    "group_lr": RegisteredTrial(group_lr, DEFAULT_STEPS),
    "logits_instead_of_probabilities": RegisteredTrial(logits_instead_of_probabilities, DEFAULT_STEPS),
    "other_lr": RegisteredTrial(other_lr, DEFAULT_STEPS),
    "weight_decay": RegisteredTrial(weight_decay, 43.0),
    "with_optimizer": RegisteredTrial(with_optimizer, DEFAULT_STEPS),
}
"""The trials, by their name in a finding."""
