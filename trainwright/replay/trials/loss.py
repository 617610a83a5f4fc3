"""Remedies of faults of the loss, tried: the missing or superfluous piece is changed in what the step computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import Call, Operation, RecordedStep, Slot
from trainwright.replay.experiments.loss import PAIRED, class_dim, followed, is_simplex, terms
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

STEPS = 8
Around = Callable[[Any, Any, Any], Any]


def said(what: str, name: str, was: list[float], now: list[float]) -> str:
    """One measure over the same updates, changed and as it was; says so where it is no better."""
    if len(was) < 2 or len(now) < 2:
        raise NotTried("the step could not be run again")
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    return (
        f"{better}{name} {now[0]:.4g} -> {now[-1]:.4g} in {len(now)} updates on this batch {what}; "
        f"as it was: {was[0]:.4g} -> {was[-1]:.4g}"
    )


def _trained(bench: ReplaySession, around: Around) -> None:
    bench.train(STEPS, Intervention(ops=around), repeat=True)


@trial("scores_for_probabilities")
def scores_for_probabilities(bench: ReplaySession) -> str:
    """The logarithm of the probabilities: the loss is then that of the scores before the softmax, to the bit nearly.

    Judged by minus the logarithm of the target's probability, which means the same in both.
    """
    measured: dict[bool, list[float]] = {False: [], True: []}
    truth: list[Tensor] = []  # what log_softmax should have been given, for the nll_loss that follows

    def around(change: bool) -> Around:
        def run(function: Any, args: Any, kwargs: Any) -> Any:
            name, x = getattr(function, "__name__", ""), args[0] if args else None
            if not isinstance(x, Tensor) or not x.requires_grad or name not in _TAKES_SCORES:
                return function(*args, **kwargs)
            scores = _scores(name, x, args, kwargs)
            if name == "log_softmax":
                truth[:] = [] if scores is None else [scores.detach()]
            elif scores is not None or (name == "nll_loss" and truth):
                judged = truth.pop() if scores is None else scores.detach()
                with torch.no_grad():
                    measured[change].append(float(function(judged, *args[1:], **kwargs).mean()))
            return function(scores if change and scores is not None else x, *args[1:], **kwargs)

        return run

    for change in measured:
        _trained(bench, around(change))
    return said("with the scores in place of the probabilities", "-log p of the targets", *measured.values())


_TAKES_SCORES = frozenset({"cross_entropy", "nll_loss", "kl_div", "log_softmax", "binary_cross_entropy_with_logits"})


def _scores(name: str, x: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """Scores or log-probabilities for what should not have been given; None where nothing is wrong with it."""
    tiny = torch.finfo(x.dtype).tiny
    if name == "binary_cross_entropy_with_logits":
        inside = bool(((x >= 0) & (x <= 1)).all())
        return torch.logit(x, torch.finfo(x.dtype).eps) if inside else None
    if is_simplex(x, class_dim(name, x, args, kwargs)):
        return x.clamp_min(tiny).log()
    return x.log_softmax(class_dim(name, x, args, kwargs)) if name == "nll_loss" and bool((x > 0).any()) else None


@trial("second_softmax")
def second_softmax(bench: ReplaySession) -> str:
    """The gradient that the second softmax sends to the scores under the first, with probabilities and with scores."""
    norms: dict[bool, list[float]] = {False: [], True: []}

    def around(change: bool) -> Around:
        def run(function: Any, args: Any, kwargs: Any) -> Any:
            name, x = getattr(function, "__name__", ""), args[0] if args else None
            if name not in ("softmax", "log_softmax") or not isinstance(x, Tensor) or not x.requires_grad:
                return function(*args, **kwargs)
            dim = class_dim(name, x, args, kwargs)
            if not is_simplex(x, dim):
                return function(*args, **kwargs)
            own = x.view_as(x)

            def note(gradient: Tensor) -> None:
                below = x.detach() * (gradient - (x.detach() * gradient).sum(dim, keepdim=True))
                norms[change].append(float(below.double().norm()))

            own.register_hook(note)  # type: ignore[no-untyped-call]
            given = own.clamp_min(torch.finfo(x.dtype).tiny).log() if change else own
            return function(given, *args[1:], **kwargs)

        return run

    for change in norms:
        bench.run(Intervention(ops=around(change)))
    was, now = norms[False], norms[True]
    if not was or not now:
        raise NotTried("no second softmax was met")
    better = "" if now[0] > was[0] else "no better: "
    return (
        f"{better}gradient at the scores through the second softmax {now[0]:.3g} without the first; it was {was[0]:.3g}"
    )


@trial("same_shape")
def same_shape(bench: ReplaySession) -> str:
    """The target in the shape of the prediction, or the other way round; judged by the loss of matching pairs."""
    measured: dict[bool, list[float]] = {False: [], True: []}

    def around(change: bool) -> Around:
        def run(function: Any, args: Any, kwargs: Any) -> Any:
            name = getattr(function, "__name__", "").strip("_")
            pair = [a for a in args[:2] if isinstance(a, Tensor)]
            if name not in PAIRED or len(pair) < 2 or not _would_broadcast(*pair):
                return function(*args, **kwargs)
            other = [pair[0].reshape(pair[1].shape) if pair[0].dim() > pair[1].dim() else pair[0]]
            other += [pair[1].reshape(pair[0].shape) if pair[1].dim() > pair[0].dim() else pair[1]]
            with torch.no_grad():
                matched = function(*[o.detach() for o in other], *args[2:], **kwargs)
                measured[change].append(float(matched.float().square().mean() if name == "sub" else matched.mean()))
            return function(*(other if change else pair), *args[2:], **kwargs)

        return run

    for change in measured:
        _trained(bench, around(change))
    return said("with shapes that match", "loss of each prediction against its own target", *measured.values())


def _would_broadcast(one: Tensor, other: Tensor) -> bool:
    low, high = sorted((one, other), key=lambda each: each.dim())
    return low.dim() != high.dim() and low.numel() == high.numel() and low.dim() > 0 and len(low) == len(high) > 1


@trial("turned_sign")
def turned_sign(bench: ReplaySession) -> str:
    """The gradient the other way; judged by the loss itself, not by what backward was given."""
    was, now = followed(bench, STEPS), followed(bench, STEPS, sign=-1.0)
    return said("with the sign turned", "the loss", was, now)


@trial("targets_in_range")
def targets_in_range(bench: ReplaySession) -> str:
    """Targets scaled to 0 to 1."""

    def scaled(function: Any, args: Any, kwargs: Any) -> Any:
        if getattr(function, "__name__", "").startswith("binary_cross_entropy"):
            given = dict(zip(("input", "target"), args)) | kwargs
            low, high = given["target"].min(), given["target"].max()
            kwargs = {**given, "target": (given["target"] - low) / (high - low).clamp(min=1e-12)}
            args = ()
        return function(*args, **kwargs)

    was, now = bench.train(STEPS, repeat=True), bench.train(STEPS, Intervention(ops=scaled), repeat=True)
    steady = "" if 0 <= now[-1] < now[0] else "no better: "
    return (
        f"{steady}loss {now[0]:.4g} -> {now[-1]:.4g} with targets from 0 to 1; as it was {was[0]:.4g} -> {was[-1]:.4g}"
    )


@trial("balanced_terms")
def balanced_terms(bench: ReplaySession) -> str:
    """The weight of the largest term such that its gradient is of the size of the smallest's; judged by the latter."""
    told = terms(bench)["terms"]
    large = max(told, key=lambda term: term["shared"])
    wanted = [t for t in told if t["shared"] > 0 and abs(t["own"]) >= 0.5]
    small = min(wanted, key=lambda term: term["shared"], default=large)
    if large is small:
        raise NotTried("there is one term only")
    factor = small["shared"] / large["shared"]
    was, now = (
        _with_weight(bench, large["slot"], small["slot"], 1.0),
        _with_weight(bench, large["slot"], small["slot"], factor),
    )
    return said(f"with {factor:.2g} of the weight of {large['name']}", small["name"], was, now)


def _with_weight(bench: ReplaySession, slot: int, watched: int, factor: float) -> list[float]:
    """The value of one term over updates in which another has ``factor`` times its weight."""
    values: list[float] = []

    def note(value: Tensor) -> Tensor:
        values.append(float(value.detach()))
        return value

    off = (False, torch.float32, False)
    weigh = Operation("mul", torch.mul, (Slot(slot), factor), {}, off, [slot])
    look = Operation("note", note, (Slot(watched),), {}, off, [])
    program: list[Any] = []
    for each in bench.segment.program:
        program.append(each)
        made = each.outputs if isinstance(each, Operation | Call) else []
        program += [look] * (watched in made) + [weigh] * (slot in made and factor != 1.0)
    segment: RecordedStep = replace(bench.segment, program=program)
    with bench.live():
        for _ in range(STEPS):
            bench.player.play(segment, AS_IT_WAS)
    return values
