"""Remedies of faults of the labels, tried: other targets, a mask, fewer samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.recorder.program import mapped
from trainwright.replay.classified import Classified, classified
from trainwright.replay.experiments.labels import Placed, place, token_inputs, tokens
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial
from trainwright.replay.trials.loss import STEPS, said


def _retargeted(bench: ReplaySession, placed: Placed, other: Tensor, judged: Tensor, told: tuple[str, str]) -> str:
    """Trains with other targets (-1: none) and as it was; judged by the cross-entropy of some of them.

    ``told``: what was done, and the name of the measure.
    """
    measured: dict[bool, list[float]] = {False: [], True: []}

    def around(change: bool) -> Callable[[Any, Any, Any], Any]:
        def run(function: Any, args: Any, kwargs: Any) -> Any:
            asked = classified(getattr(function, "__name__", ""), args, kwargs)
            if asked is None or len(asked.target) != len(placed.at):
                return function(*args, **kwargs)
            measured[change].append(asked.loss(judged.nonzero().flatten(), other))
            return asked.again(other) if change else function(*args, **kwargs)

        return run

    for change in measured:
        bench.train(STEPS, Intervention(ops=around(change)), repeat=True)
    return said(told[0], told[1], *measured.values())


def _places(bench: ReplaySession) -> Placed:
    """Of the first loss that asks for tokens of an input."""
    found: list[Classified] = []

    def around(function: Any, args: Any, kwargs: Any) -> Any:
        if (one := classified(getattr(function, "__name__", ""), args, kwargs)) is not None:
            found.append(one)
        return function(*args, **kwargs)

    played = bench.run(Intervention(ops=around), upto="forward")
    outputs: list[Tensor] = []
    mapped(played.outputs, lambda leaf: outputs.append(leaf) if isinstance(leaf, Tensor) else None)
    for ids in token_inputs(bench):
        for one in found:
            if (placed := place(one, ids, outputs)) is not None:
                return placed
    raise NotTried("no loss over tokens was met")


def _next(placed: Placed) -> Tensor:
    """The next token of the input at each prediction; -1 at the end of a row."""
    length = placed.ids.shape[1]
    following = (placed.at + 1).clamp(max=placed.ids.numel() - 1)
    told: Tensor = placed.ids.flatten()[following].long()
    return told.masked_fill(placed.at % length == length - 1, -1)


@trial("next_token")
def next_token(bench: ReplaySession) -> str:
    """Targets that are the next token."""
    placed = _places(bench)
    following = _next(placed)
    told = ("with targets shifted by one", "cross-entropy of the next token")
    return _retargeted(bench, placed, following, following >= 0, told)


@trial("learned_ends")
def learned_ends(bench: ReplaySession, end: int) -> str:
    """The token that ends a text is a target too where it follows one; judged by the cross-entropy of those."""
    placed = _places(bench)
    target = placed.asked.target
    after_one = torch.cat([target.new_full((1,), -1), target[:-1]]) >= 0
    ends = (_next(placed) == end) & (target < 0) & after_one
    if not bool(ends.any()):
        raise NotTried("this step has no end of a text")
    both = target.masked_fill(ends, end)
    return _retargeted(bench, placed, both, ends, ("with ends among the targets", "cross-entropy of the ends"))


class _Causal(TorchFunctionMode):
    """Attention sees nothing that comes later: where scores of places against places are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name == "scaled_dot_product_attention" and args[0].shape[-2] == args[1].shape[-2]:
            self.used += 1
            kwargs.pop("attn_mask", None)
            return function(*args[:3], **{**kwargs, "is_causal": True})
        if name == "multi_head_attention_forward" and len(args[0]) == len(args[1]):
            self.used += 1
            later = torch.ones(len(args[0]), len(args[0]), dtype=torch.bool, device=args[0].device).triu(1)
            return function(*args, **{**kwargs, "attn_mask": later, "is_causal": False})
        if name == "softmax" and args[0].dim() > 2 and args[0].shape[-1] == args[0].shape[-2] > 1:
            self.used += 1
            later = torch.ones(args[0].shape[-2:], dtype=torch.bool, device=args[0].device).triu(1)
            return function(args[0].masked_fill(later, -torch.inf), *args[1:], **kwargs)
        return function(*args, **kwargs)


@trial("causal_mask")
def causal_mask(bench: ReplaySession) -> str:
    """A causal mask in every attention of a row to itself; judged by whether later tokens are still seen."""

    def sees() -> float:
        return max((told["sees"] for told in tokens(bench)["found"] if told.get("sees") is not None), default=0.0)

    before = sees()
    with _Causal() as mask:
        after = sees()
    if not mask.used:
        raise NotTried("no attention was met that a mask could be given to")
    better = "" if after < 1e-3 else "no better: "
    return (
        f"{better}with a causal mask in {mask.used} calls of attention, scores change by {after:.2g} of their "
        f"deviation when only later tokens do; as it was: {before:.2g}"
    )


@trial("without_samples")
def without_samples(bench: ReplaySession, ids: Sequence[int]) -> str:
    """Without the samples whose labels are doubted; judged by the loss of the others in this batch."""
    known, doubted = bench.ids[0] if bench.ids else None, set(ids)
    if known is None or len(known) != bench.size or len(bench.segment.calls) != 1:
        raise NotTried("the ids of this batch are not known")
    rows = [n for n, each in enumerate(known) if each not in doubted]
    if not 1 < len(rows) < len(known):
        raise NotTried("this batch has no doubted label, or nothing else")
    measured: list[float] = []

    def around(function: Any, args: Any, kwargs: Any) -> Any:
        if (one := classified(getattr(function, "__name__", ""), args, kwargs)) is not None:
            chosen = rows if len(one.target) == len(known) else list(range(len(one.target)))
            measured.append(one.loss(torch.tensor(chosen, device=one.target.device), one.target))
        return function(*args, **kwargs)

    bench.train(STEPS, Intervention(ops=around), repeat=True)
    was, measured[:] = list(measured), []
    bench.train(STEPS, Intervention(ops=around, rows=rows), repeat=True)
    left_out = len(known) - len(rows)
    return said(f"without {left_out} doubted labels", f"loss of the other {len(rows)}", was, list(measured))
