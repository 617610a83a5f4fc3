"""Replays of the first step: units that always stay equal, and weights that are too large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.layers import FirstLossFacts, SymmetryFacts
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.classified import classes_in
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

LARGE_WEIGHT_RATIO = 2.5  # Weights above this multiple of the usual scale are too large


class _Outputs(StepInspector):
    """Collects the outputs of the models, with their graph, and the class counts of cross-entropies."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.outputs: list[Tensor] = []
        self.classes: list[int] = []

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if not self.stack and not in_backward:
            self.outputs += [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if not self.stack and name != "nll_loss" and (classes := classes_in(name, args, kwargs)) is not None:
            self.classes.append(classes)


@replay(SymmetryFacts, when="first", steps=1.0)
def symmetry(session: ReplaySession) -> SymmetryFacts:
    """Finds units with equal weights and equal gradients for any loss. They always stay equal.

    The gradient is taken of a randomly weighted sum of the outputs. The gradient of a cross-entropy sums to zero behind
    equal columns.
    """
    alike: dict[str, float] = {}
    with session.live():
        inspector = _Outputs(session)
        inspector.run(upto="forward")
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, generator=generator, device="cpu").to(t) for t in inspector.outputs]
        named = [(n, p) for n, p in session.parameters.items() if p.requires_grad and p.dim() >= 2 and p.shape[0] > 1]
        if not named:
            return SymmetryFacts(alike={})
        grads = torch.autograd.grad(inspector.outputs, [p for _, p in named], weights, allow_unused=True)
        for (name, parameter), grad in zip(named, grads):
            if grad is not None and not grad.is_sparse and (share := _fraction_equal(parameter.detach(), grad)) > 0:
                alike[name] = share
    return SymmetryFacts(alike=alike)


def _fraction_equal(weight: Tensor, grad: Tensor) -> float:
    """Returns the fraction of rows that equal the first one both in the weight and in its gradient."""
    both = []
    for each in (weight, grad):
        rows = each.float().flatten(1)
        size = rows.abs().max()
        if each is grad and not float(size) > 0:
            return 0.0
        both.append(((rows - rows[:1]).abs().amax(1) <= 1e-4 * size) & (each is not grad or rows.abs().amax(1) > 0))
    share = (both[0] & both[1])[1:].float().mean()
    return float(share)


@replay(FirstLossFacts, when="first", steps=0.5, latest=4)
def first_loss_rescaled(session: ReplaySession) -> FirstLossFacts:
    """Returns the first loss, and the loss with weights of the usual scale."""
    inspector = _Outputs(session)
    with session.live():
        loss = inspector.run(upto="forward").loss
        large = {name: gain for name, gain in _gains(session).items() if gain > LARGE_WEIGHT_RATIO}
    rescaled = math.nan
    if large:
        rescaled = session.run(Intervention(model=lambda: smaller(session, large)), upto="forward").loss
    inputs = [x.float() for x in session.inputs if x.is_floating_point() and x.numel()]
    return FirstLossFacts(
        loss=loss,
        classes=next(iter(inspector.classes), 0),
        input_size=max((float(x.pow(2).mean().sqrt()) for x in inputs), default=0.0),
        large=large,
        rescaled=rescaled,
    )


def _gains(session: ReplaySession) -> dict[str, float]:
    """Returns the standard deviation of each weight matrix times the root of its fan-in, which is usually about 1."""
    names = {id(p): n for n, p in session.parameters.items()}
    gains = {}
    for module in session.modules.values():
        for parameter in (
            module.parameters(recurse=False) if not isinstance(module, nn.Embedding | nn.EmbeddingBag) else ()
        ):
            if parameter.dim() >= 2 and id(parameter) in names:
                fan_in = parameter[0].numel()
                gains[names[id(parameter)]] = float(parameter.detach().float().std()) * math.sqrt(fan_in)
    return gains


@contextmanager
def smaller(session: ReplaySession, gains: Mapping[str, float]) -> Iterator[None]:
    """Context in which these weights are divided by their gains. The end of the replay restores them."""
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            if name in gains:
                parameter.data.div_(gains[name])
    yield
