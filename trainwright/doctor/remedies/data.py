"""Trials of remedies for faults of the data: replays with changed inputs, targets or attention."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from trainwright.doctor.measure.tokens import examine_tokens
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classified
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.samples import on_column, standardised
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course

NUM_UPDATES = 12


def _compare(session: ReplaySession, what: str, intervention: Intervention) -> str:
    unchanged, changed = session.train(NUM_UPDATES, repeat=True), session.train(NUM_UPDATES, intervention, repeat=True)
    return (
        f"loss of this batch in {NUM_UPDATES} updates on it {what}: {course(changed)}; unchanged: {course(unchanged)}"
    )


def standardized_inputs(session: ReplaySession) -> str:
    """Tries inputs with mean 0 and standard deviation 1."""
    return _compare(session, "with standardized inputs", Intervention(inputs=standardised))


def without_column(session: ReplaySession, column: int) -> str:
    """Tries zeros in one column of the input."""
    return _compare(session, f"without column {column}", Intervention(inputs=on_column(column, torch.zeros_like)))


def ignore_padding(session: ReplaySession, pad: int) -> str:
    """Tries ``ignore_index`` in the loss, measured by the loss of the targets that are not padding."""
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
        session.train(NUM_UPDATES, Intervention(ops=ignoring(change)), repeat=True)
    if not losses[True]:
        raise NotTried("the loss is not a cross-entropy")
    return (
        f"loss of real tokens in {NUM_UPDATES} updates with ignore_index={pad}: {course(losses[True])}; "
        f"unchanged: {course(losses[False])}"
    )


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
    """Tries a causal mask in every self-attention, measured by the effect of later tokens on the scores."""

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
