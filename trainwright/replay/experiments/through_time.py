"""How the gradient changes on its way back through time, or through a weight that is used again and again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

RECURRENT = ("rnn_tanh", "rnn_relu", "lstm", "gru")
BATCH_FIRST = 8
"""The place of ``batch_first`` among the arguments of a recurrent op; a packed sequence has another one."""
LEAST = 8
"""Times a weight has to be used for a trend."""


@dataclass
class _Times:
    """Gradient norms by time index: of what goes into a recurrent op, and of what comes out of a weight's every use."""

    inside: list[Tensor] = field(default_factory=list)
    uses: dict[int, list[Tensor | None]] = field(default_factory=dict)
    calls: int = 0

    def called(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return args, kwargs

    def around(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.calls > 1:  # one forward pass is enough
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in RECURRENT and len(args) > BATCH_FIRST and args[0].dim() == 3:
            x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            batch_first = bool(args[BATCH_FIRST])
            x.register_hook(lambda g: self.inside.append(g.transpose(0, 1) if batch_first else g))
            return function(x, *args[1:], **kwargs)
        result = function(*args, **kwargs)
        weight = next((a for a in args if isinstance(a, nn.Parameter) and a.dim() > 1), None)
        made = result[0] if isinstance(result, tuple) and result else result
        if weight is not None and isinstance(made, Tensor) and made.requires_grad and made.is_floating_point():
            self._note(self.uses.setdefault(id(weight), []), made)
        return result

    def _note(self, norms: list[Tensor | None], made: Tensor) -> None:
        place = len(norms)
        norms.append(None)

        def hook(grad: Tensor) -> None:
            norms[place] = grad.detach().norm()

        made.register_hook(hook)  # type: ignore[no-untyped-call]


@experiment("through_time", when="asked")
def through_time(bench: ReplaySession) -> dict[str, Any]:
    """For each chain its length, and by what the gradient grows with every step back in time."""
    times = _Times()
    played = bench.run(Intervention(inputs=times.called, ops=times.around))
    chains = [[float(n) for n in grad.flatten(1).norm(dim=1)] for grad in times.inside]
    chains += [[float(n) for n in norms if n is not None] for norms in times.uses.values()]
    told = [_trend(chain) for chain in chains if len(chain) >= LEAST]
    recurrent = {
        name: float(grad.norm())
        for name, grad in played.grads.items()
        if grad is not None and grad.dim() > 1 and not grad.is_sparse
    }
    return {
        "chains": [each for each in told if each is not None],
        "grad_norm": played.grad_norm,
        "largest": max(recurrent, key=lambda name: recurrent[name], default=None),
    }


def _trend(norms: list[float]) -> dict[str, float] | None:
    """A line through the logarithms of all norms that are neither zero nor infinite, as a factor for each step back."""
    points = [(t, math.log(n)) for t, n in enumerate(norms) if 0 < n < math.inf]
    if len(points) < LEAST:
        return None
    t, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    t, centred = t - t.mean(), y - y.mean()
    slope = float((t * centred).sum() / t.square().sum())
    fit = float((t * centred).sum() / (t.norm() * centred.norm()).clamp_min(1e-30))
    return {
        "length": len(norms),
        "factor": math.exp(min(-slope, 50.0)),
        "first": norms[0],
        "last": norms[-1],
        "fit": fit,
    }
