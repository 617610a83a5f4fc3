"""Remedies for steps that are not finite: without the samples, in fp32, with a guard round the op that broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainwright.replay.experiments.nonfinite import is_finite, loss_scale, num_backward
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

EPS = 1e-6
LOW = -1e4
ALIKE = {"truediv": "div", "rtruediv": "div", "divide": "div", "true_divide": "div", "rdiv": "div", "itruediv": "div"}
"""Other names of the same function."""


@trial("without_these_samples")
def without_samples(bench: ReplaySession, rows: Sequence[int], micro: int | None = None) -> str:
    """The micro-batch without these samples."""
    edit = _without(bench, rows, micro)
    named = _ids(bench, rows, micro)
    return f"without {named}: " + _compared(bench, edit, micro)


@trial("statistics_without_samples")
def statistics_without_samples(bench: ReplaySession, rows: Sequence[int]) -> str:
    """What becomes of the running statistics."""
    found = {}
    for name, edit in (("as it was", Intervention()), ("without", _without(bench, rows, None))):
        with bench.live():
            bench.player.play(bench.segment, edit, upto="forward")
            held = [module._buffers[key] for module, key in bench.player.subject.buffers()]
            found[name] = sum(b is not None and b.is_floating_point() and not bool(b.isfinite().all()) for b in held)
    return f"without {_ids(bench, rows, None)}: {found['without']} buffers not finite; as it was: {found['as it was']}"


@trial("in_fp32")
def in_fp32(bench: ReplaySession) -> str:
    """The whole step, without autocast."""
    return "in fp32: " + _compared(bench, Intervention(dtype="fp32"))


@trial("guarded")
def guarded(bench: ReplaySession, op: str) -> str:
    """The input of every call of ``op`` is kept where it has a value and a slope."""
    if op not in _GUARDS:
        raise NotTried(f"there is no guard for {op}")
    guard, words = _GUARDS[op]
    met = []

    def around(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if ALIKE.get(name, name) == op:
            met.append(name)
            args = guard(name, args)
        return function(*args, **kwargs)

    told = f"with {words}: " + _compared(bench, Intervention(ops=around))
    if not met:
        raise NotTried(f"{op} is called inside of another function")
    return told


@trial("finite_mask")
def finite_mask(bench: ReplaySession) -> str:
    """Infinities and overflowing constants of masks become finite large negative numbers."""

    def around(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name in ("masked_fill", "full", "full_like", "where", "mul", "rmul", "add", "radd", "sub", "rsub", "fill"):
            args, kwargs = [_raised(x) for x in args], {k: _raised(x) for k, x in kwargs.items()}
        if name in ("softmax", "log_softmax", "cross_entropy", "matmul") and isinstance(args[0], Tensor):
            args = [args[0].clamp(min=LOW), *args[1:]]
        return function(*args, **kwargs)

    return "with a finite mask value: " + _compared(bench, Intervention(ops=around))


@trial("valid_targets")
def valid_targets(bench: ReplaySession) -> str:
    """The sum of the losses over max(1, number of valid targets)."""

    def around(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name not in ("cross_entropy", "nll_loss") or kwargs.get("reduction", "mean") != "mean":
            return function(*args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs["target"]
        valid = (target != kwargs.get("ignore_index", -100)).sum()
        return function(*args, **{**kwargs, "reduction": "sum"}) / valid.clamp(min=1)

    return "divided by max(1, valid targets): " + _compared(bench, Intervention(ops=around))


@trial("zero_infinity")
def zero_infinity(bench: ReplaySession) -> str:
    """``ctc_loss(zero_infinity=True)``."""

    def around(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if getattr(function, "__name__", "") == "ctc_loss":
            args, kwargs = args[:6], {**kwargs, "zero_infinity": True}
        return function(*args, **kwargs)

    return "with zero_infinity=True: " + _compared(bench, Intervention(ops=around))


@trial("larger_eps")
def larger_eps(bench: ReplaySession, eps: float = 1e-4) -> str:
    """The update with an ``eps`` that 16 bits hold."""
    quiet = replace(bench.segment, values={k: v for k, v in bench.segment.values.items() if k != "vetoed"})
    lost = []
    for edit in (Intervention(), Intervention(group=lambda step, group: {"eps": eps} if "eps" in group else {})):
        with bench.live():
            after = bench.player.play(quiet, edit, upto="step").after
        lost.append(sum(int((~w.isfinite()).sum()) for w in after.values()))
    return f"with eps={eps:g}: {lost[1]} weights are not finite after the update; as it was: {lost[0]}"


# What a guard does to the arguments of its op


def _above(low: float) -> Callable[[str, Any], Any]:
    return lambda name, args: [args[0].clamp(min=low), *args[1:]]


def _below_overflow(name: str, args: Any) -> Any:
    dtype = args[0].dtype if args[0].dtype.is_floating_point else torch.float32
    return [args[0].clamp(max=float(torch.tensor(torch.finfo(dtype).max).log()) / 4), *args[1:]]


def _no_zero_divisor(name: str, args: Any) -> Any:
    at = 0 if name in ("rtruediv", "rdiv", "reciprocal") else 1
    divisor = args[at]
    if not isinstance(divisor, Tensor):
        return args
    safe = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return [safe if number == at else each for number, each in enumerate(args)]


def _inside(name: str, args: Any) -> Any:
    return [args[0].clamp(-1 + EPS, 1 - EPS), *args[1:]]


_GUARDS: dict[str, tuple[Callable[[str, Any], Any], str]] = {
    "log": (_above(EPS), f"clamp(min={EPS:g}) before log"),
    "log2": (_above(EPS), f"clamp(min={EPS:g}) before log2"),
    "log10": (_above(EPS), f"clamp(min={EPS:g}) before log10"),
    "sqrt": (_above(EPS), f"clamp(min={EPS:g}) before sqrt"),
    "rsqrt": (_above(EPS), f"clamp(min={EPS:g}) before rsqrt"),
    "pow": (_above(EPS), f"clamp(min={EPS:g}) before pow"),
    "exp": (_below_overflow, "a quarter of the largest exponent as the bound of exp"),
    "div": (_no_zero_divisor, "1 in the place of a divisor of 0"),
    "reciprocal": (_no_zero_divisor, "1 in the place of a divisor of 0"),
    "acos": (_inside, "clamp to the inside of [-1, 1] before acos"),
    "asin": (_inside, "clamp to the inside of [-1, 1] before asin"),
    "atanh": (_inside, "clamp to the inside of [-1, 1] before atanh"),
}


def _raised(value: Any) -> Any:
    """A mask's constant: below all logits, and every format holds it with room to add to it."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return max(value, LOW)
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.clamp(min=LOW)
    return value


# What came of it


def _without(bench: ReplaySession, rows: Sequence[int], micro: int | None) -> Intervention:
    if bench.size is None:
        raise NotTried("it is not known how many samples a batch has")
    others = [row for row in range(bench.size) if row not in set(rows)]
    if not others:
        raise NotTried("nothing would be left of the batch")
    return Intervention(rows=others, micro=None if micro is None else [micro])


def _ids(bench: ReplaySession, rows: Sequence[int], micro: int | None) -> str:
    ids = bench.ids[micro or 0] if len(bench.ids) > (micro or 0) else None
    if ids is None or len(ids) != bench.size:
        return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the batch"
    return f"sample{'s' * (len(rows) > 1)} {', '.join(str(ids[row]) for row in rows)}"


def _compared(bench: ReplaySession, edit: Intervention, micro: int | None = None) -> str:
    scale = 1 / loss_scale(bench.segment)
    was = bench.run(
        Intervention(loss_scale=scale, micro=None if micro is None or num_backward(bench.segment) < 2 else [micro])
    )
    now = bench.run(replace(edit, loss_scale=scale))
    if now.error is not None and was.error is None:
        raise NotTried(str(now.error).partition("\n")[0])
    return f"{_words(now)}; as it was: {_words(was)}"


def _words(played: ReplayResult) -> str:
    if played.error is not None:
        return f"{type(played.error).__name__}: {played.error}"
    told = f"loss {played.loss:.4g}, gradient norm {played.grad_norm:.4g}"
    return told if is_finite(played) else f"not finite ({told})"
