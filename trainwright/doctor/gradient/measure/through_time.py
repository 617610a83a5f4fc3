"""How the gradient changes on its way back through time, or through the repeated uses of one weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

RECURRENT = ("rnn_tanh", "rnn_relu", "lstm", "gru")
BATCH_FIRST = 8
"""The position of ``batch_first`` among the arguments of a recurrent op; with a packed sequence it differs."""
MIN_LENGTH = 8
"""The fewest time steps, or uses of a weight, that show a trend."""


@dataclass
class _Times:
    """Gradients at the inputs of recurrent ops, and gradient norms at the results of every use of a weight."""

    inside: list[Tensor] = field(default_factory=list)
    uses: dict[int, list[Tensor | None]] = field(default_factory=dict)
    calls: int = 0

    def start_call(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.calls += 1
        return args, kwargs

    def collect(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if self.calls > 1:  # one forward pass is enough
            return function(*args, **kwargs)
        name = function_name(function)
        if name in RECURRENT and len(args) > BATCH_FIRST and args[0].dim() == 3:
            x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            batch_first = bool(args[BATCH_FIRST])
            x.register_hook(lambda g: self.inside.append(g.transpose(0, 1) if batch_first else g))
            return function(x, *args[1:], **kwargs)
        result = function(*args, **kwargs)
        weight = next((a for a in args if isinstance(a, nn.Parameter) and a.dim() > 1), None)
        output = result[0] if isinstance(result, tuple) and result else result
        if weight is not None and isinstance(output, Tensor) and output.requires_grad and output.is_floating_point():
            self._note(self.uses.setdefault(id(weight), []), output)
        return result

    def _note(self, norms: list[Tensor | None], output: Tensor) -> None:
        place = len(norms)
        norms.append(None)

        def hook(grad: Tensor) -> None:
            norms[place] = grad.detach().norm()

        output.register_hook(hook)  # type: ignore[no-untyped-call]


@experiment("through_time", when="requested")
def through_time(session: ReplaySession) -> Facts:
    """For each chain its length, and the factor by which the gradient norm grows with each step back in time."""
    times = _Times()
    result = session.run(Intervention(inputs=times.start_call, ops=times.collect))
    chains = [[float(n) for n in grad.flatten(1).norm(dim=1)] for grad in times.inside]
    chains += [[float(n) for n in norms if n is not None] for norms in times.uses.values()]
    trends = [_trend(chain) for chain in chains if len(chain) >= MIN_LENGTH]
    norms_of_matrices = {
        name: float(grad.norm())
        for name, grad in result.grads.items()
        if grad is not None and grad.dim() > 1 and not grad.is_sparse
    }
    return {
        "chains": [each for each in trends if each is not None],
        "grad_norm": result.grad_norm,
        "largest": max(norms_of_matrices, key=lambda name: norms_of_matrices[name], default=None),
    }


def _trend(norms: list[float]) -> dict[str, float] | None:
    """The factor per step back: the slope of a line through the logarithms of all norms that are not 0 or infinite."""
    points = [(t, math.log(n)) for t, n in enumerate(norms) if 0 < n < math.inf]
    if len(points) < MIN_LENGTH:
        return None
    t, y = torch.tensor(points, dtype=torch.float64, device="cpu").unbind(1)
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
