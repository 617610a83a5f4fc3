"""Trials of remedies for faults of the data: recorded steps with inputs, targets or samples that are changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.doctor.measure.tokens import Placed, examine_tokens, place, tensor_leaves, token_inputs
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import Classified, classified
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.samples import on_column, standardised
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course

STEPS = 12


def _compared(session: ReplaySession, what: str, intervention: Intervention) -> str:
    unchanged, changed = session.train(STEPS, repeat=True), session.train(STEPS, intervention, repeat=True)
    return f"loss of this batch in {STEPS} updates on it {what}: {course(changed)}; unchanged: {course(unchanged)}"


def _compared_measure(what: str, name: str, was: Sequence[float], now: Sequence[float]) -> str:
    """One measure over the same updates, unchanged and changed; begins with "no better" if it is not."""
    if len(was) < 2 or len(now) < 2:
        raise NotTried("the step could not be replayed")
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    return f"{better}{name} {course(now)} in {len(now)} updates on this batch {what}; unchanged: {course(was)}"


def standardized_inputs(session: ReplaySession) -> str:
    """Inputs with mean 0 and standard deviation 1."""
    return _compared(session, "with standardized inputs", Intervention(inputs=standardised))


def without_column(session: ReplaySession, column: int) -> str:
    """Zeros in one column of the input."""
    return _compared(session, f"without column {column}", Intervention(inputs=on_column(column, torch.zeros_like)))


def ignore_padding(session: ReplaySession, pad: int) -> str:
    """``ignore_index`` in the loss, measured by the loss of the targets that are not padding."""
    losses: dict[bool, list[float]] = {False: [], True: []}

    def ignoring(change: bool) -> OpHandler:
        def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            loss = classified(function_name(function), args, kwargs)
            if loss is None:
                return function(*args, **kwargs)
            changed = {**kwargs, "ignore_index": pad}
            with torch.no_grad():
                count = int((loss.target != pad).sum()) if loss.is_sum else 1
                losses[change].append(float(function(*args, **changed)) / max(1, count))
            return function(*args, **(changed if change else kwargs))

        return call

    for change in losses:
        session.train(STEPS, Intervention(ops=ignoring(change)), repeat=True)
    if not losses[True]:
        raise NotTried("the loss is not a cross-entropy")
    return (
        f"loss of real tokens in {STEPS} updates with ignore_index={pad}: {course(losses[True])}; "
        f"unchanged: {course(losses[False])}"
    )


def apart_from_evaluation(session: ReplaySession, ids: Sequence[int]) -> str:
    """The recorded step without the samples that the evaluation shares, measured by the loss of those samples."""
    size, own = session.size or 0, session.ids[0] if session.ids else None
    if own is None or len(own) != size or len(session.ids) != 1:
        raise NotTried("which samples this step had is not known")
    shared = [row for row, sample in enumerate(own) if sample in set(ids)]
    others = [row for row in range(size) if row not in set(shared)]
    if not shared or not others:
        raise NotTried("this step has none of the shared samples, or nothing else")
    results = []
    for intervention in (AS_IT_WAS, Intervention(rows=others)):
        with session.live():
            for _ in range(STEPS):
                session.replayer.run(session.recorded_step, intervention)
            results.append(session.replayer.run(session.recorded_step, Intervention(rows=shared), upto="forward").loss)
    return (
        f"after {STEPS} updates without the {len(shared)} shared samples of this batch their loss is {results[1]:.4g}; "
        f"trained on them: {results[0]:.4g}"
    )


def _with_targets(
    session: ReplaySession, placed: Placed, target: Tensor, measured: Tensor, what: str, measure: str
) -> str:
    """Trains with the targets ``target`` (-1: ignored) and unchanged.

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
    return _compared_measure(what, measure, losses[False], losses[True])


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


def next_token(session: ReplaySession) -> str:
    """Targets that are the next token; at the end of a row there is none."""
    placed = _places(session)
    length = placed.ids.shape[1]
    following = (placed.at + 1).clamp(max=placed.ids.numel() - 1)
    tokens: Tensor = placed.ids.flatten()[following].long()
    tokens = tokens.masked_fill(placed.at % length == length - 1, -1)
    words = ("with targets shifted by one", "cross-entropy of the next token")
    return _with_targets(session, placed, tokens, tokens >= 0, *words)


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


def causal_mask(session: ReplaySession) -> str:
    """A causal mask in every self-attention, measured by whether later tokens still change the scores."""

    def sees() -> float:
        return max((each.sees for each in examine_tokens(session).losses if each.sees is not None), default=0.0)

    before = sees()
    with _Causal() as mask:
        after = sees()
    if not mask.used:
        raise NotTried("no attention was found that takes a mask")
    better = "" if after < 1e-3 else "no better: "
    return (
        f"{better}with a causal mask in {mask.used} calls of attention, scores change by {after:.2g} of their "
        f"deviation when only later tokens do; unchanged: {before:.2g}"
    )


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
    return _compared_measure(what, f"loss of the other {len(rows)}", was, list(losses))
