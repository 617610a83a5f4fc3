"""Trials of remedies for non-finite steps: without the samples, in float32, with a guard at the operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.measure.nonfinite import all_finite, loss_scale, num_backward
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried

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
    """Tries a finite large negative number for infinities and overflowing mask constants."""

    def around(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function).strip("_")
        if name in ("masked_fill", "full", "full_like", "where", "mul", "rmul", "add", "radd", "sub", "rsub", "fill"):
            args, kwargs = tuple(_clamp_mask(x) for x in args), {k: _clamp_mask(x) for k, x in kwargs.items()}
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
    "exp": (_below_overflow, "a quarter of the largest exponent as the bound of exp"),
    "div": (_no_zero_divisor, "1 instead of a divisor of 0"),
    "reciprocal": (_no_zero_divisor, "1 instead of a divisor of 0"),
    "acos": (_inside, "clamp to the inside of [-1, 1] before acos"),
    "asin": (_inside, "clamp to the inside of [-1, 1] before asin"),
    "atanh": (_inside, "clamp to the inside of [-1, 1] before atanh"),
}


def _clamp_mask(value: object) -> object:
    """Returns a mask constant, at least MASK_VALUE."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return max(value, MASK_VALUE)
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.clamp(min=MASK_VALUE)
    return value


# Texts of outcomes


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
    scale = 1 / loss_scale(session.recorded_step)
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
