"""Trials of remedies for faults of the labels: other targets, a causal mask, fewer samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.doctor.data.measure.labels import Placed, place, tensor_leaves, token_inputs, tokens
from trainwright.doctor.remedies.loss import STEPS, compared_measure
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import Classified, classified
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial


def _with_targets(
    session: ReplaySession, placed: Placed, target: Tensor, measured: Tensor, what: str, measure: str
) -> str:
    """Trains with the targets ``target`` (-1: ignored) and as it was.

    Compares the cross-entropy of those of ``target`` that the mask ``measured`` selects.
    """
    losses: dict[bool, list[float]] = {False: [], True: []}

    def handler(change: bool) -> OpHandler:
        def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            loss = classified(function_name(function), args, kwargs)
            if loss is None or len(loss.target) != len(placed.at):
                return function(*args, **kwargs)
            losses[change].append(loss.loss(measured.nonzero().flatten(), target))
            return loss.again(target) if change else function(*args, **kwargs)

        return call

    for change in losses:
        session.train(STEPS, Intervention(ops=handler(change)), repeat=True)
    return compared_measure(what, measure, losses[False], losses[True])


def _places(session: ReplaySession) -> Placed:
    """The first loss whose targets are tokens of an input."""
    losses: list[Classified] = []

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if (loss := classified(function_name(function), args, kwargs)) is not None:
            losses.append(loss)
        return function(*args, **kwargs)

    outputs = tensor_leaves(session.run(Intervention(ops=collect), upto="forward").outputs)
    for ids in token_inputs(session):
        for loss in losses:
            if (placed := place(loss, ids, outputs)) is not None:
                return placed
    raise NotTried("no loss over tokens was found")


def _next(placed: Placed) -> Tensor:
    """The next token of the input at each prediction; -1 at the end of a row."""
    length = placed.ids.shape[1]
    following = (placed.at + 1).clamp(max=placed.ids.numel() - 1)
    tokens_there: Tensor = placed.ids.flatten()[following].long()
    return tokens_there.masked_fill(placed.at % length == length - 1, -1)


@trial("next_token")
def next_token(session: ReplaySession) -> str:
    """Targets that are the next token."""
    placed = _places(session)
    following = _next(placed)
    words = ("with targets shifted by one", "cross-entropy of the next token")
    return _with_targets(session, placed, following, following >= 0, *words)


@trial("learned_ends")
def learned_ends(session: ReplaySession, end: int) -> str:
    """The token that ends a text is also a target where it follows one, measured by the cross-entropy of those ends."""
    placed = _places(session)
    target = placed.loss.target
    after_one = torch.cat([target.new_full((1,), -1), target[:-1]]) >= 0
    ends = (_next(placed) == end) & (target < 0) & after_one
    if not bool(ends.any()):
        raise NotTried("this step has no end of a text")
    both = target.masked_fill(ends, end)
    return _with_targets(session, placed, both, ends, "with ends among the targets", "cross-entropy of the ends")


class _Causal(TorchFunctionMode):
    """Makes every self-attention causal."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def __torch_function__(
        self, function: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        name, kwargs = function_name(function), dict(kwargs or {})
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


@trial("causal_mask", steps=3.0)
def causal_mask(session: ReplaySession) -> str:
    """A causal mask in every self-attention, measured by whether later tokens still change the scores."""

    def sees() -> float:
        return max((facts["sees"] for facts in tokens(session)["found"] if facts.get("sees") is not None), default=0.0)

    before = sees()
    with _Causal() as mask:
        after = sees()
    if not mask.used:
        raise NotTried("no attention was found that takes a mask")
    better = "" if after < 1e-3 else "no better: "
    return (
        f"{better}with a causal mask in {mask.used} calls of attention, scores change by {after:.2g} of their "
        f"deviation when only later tokens do; as it was: {before:.2g}"
    )


@trial("without_samples")
def without_samples(session: ReplaySession, ids: Sequence[int]) -> str:
    """Without the samples whose labels are doubtful, measured by the loss of the others in this batch."""
    known, doubted = session.ids[0] if session.ids else None, set(ids)
    if known is None or len(known) != session.size or len(session.recorded_step.calls) != 1:
        raise NotTried("the ids of this batch are not known")
    rows = [n for n, each in enumerate(known) if each not in doubted]
    if not 1 < len(rows) < len(known):
        raise NotTried("this batch has no doubted label, or nothing else")
    losses: list[float] = []

    def measure(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if (loss := classified(function_name(function), args, kwargs)) is not None:
            chosen = rows if len(loss.target) == len(known) else list(range(len(loss.target)))
            losses.append(loss.loss(torch.tensor(chosen, device=loss.target.device), loss.target))
        return function(*args, **kwargs)

    session.train(STEPS, Intervention(ops=measure), repeat=True)
    was, losses[:] = list(losses), []
    session.train(STEPS, Intervention(ops=measure, rows=rows), repeat=True)
    what = f"without {len(known) - len(rows)} doubted labels"
    return compared_measure(what, f"loss of the other {len(rows)}", was, list(losses))
