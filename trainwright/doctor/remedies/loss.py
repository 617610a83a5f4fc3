"""Remedies for the arguments of a loss, tried in a replay."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.doctor.measure.loss_calls import class_dim, is_simplex
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course

NUM_UPDATES = 8


def logits_instead_of_probabilities(session: ReplaySession) -> str:
    """Tries the logarithm of the probabilities. Both are compared by the negative log-likelihood of the target."""
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


def _scores(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns scores or log-probabilities that replace wrong arguments; None if the argument is right."""
    tiny = torch.finfo(x.dtype).tiny
    if name == "binary_cross_entropy_with_logits":
        inside = bool(((x >= 0) & (x <= 1)).all())
        return torch.logit(x, torch.finfo(x.dtype).eps) if inside else None
    if is_simplex(x, class_dim(name, x, args, kwargs)):
        return x.clamp_min(tiny).log()
    return x.log_softmax(class_dim(name, x, args, kwargs)) if name == "nll_loss" and bool((x > 0).any()) else None
