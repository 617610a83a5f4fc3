"""Trials of remedies for what 16-bit dtypes lose: the recorded step with float32 in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.doctor.precision.measure.formats import fp32_shadow, summed_in_16_bit, updates_kept
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial


@trial("loss_scale", steps=5.0)
def loss_scale(session: ReplaySession) -> str:
    """A loss scale that is a power of two."""
    facts = fp32_shadow(session)
    scaled = facts["scaled"]
    if not scaled or facts["gradient_error"] is None:
        raise NotTried("no loss scale keeps the gradients finite")
    return (
        f"with the loss times {scaled['scale']:g}: gradients {scaled['gradient_error']:.1%} away from float32, "
        f"{scaled['lost']:.0%} of their elements lost; as it was: {facts['gradient_error']:.1%}, {facts['lost']:.0%}"
    )


@trial("everything_in_fp32", steps=7.0)
def everything_in_fp32(session: ReplaySession) -> str:
    """The step with everything in float32."""
    facts = fp32_shadow(session)
    return f"in float32: loss {facts['loss_fp32']:.6g}; as it was: {facts['loss']:.6g}"


@trial("loss_in_fp32", steps=5.0)
def loss_in_fp32(session: ReplaySession) -> str:
    """Only the loss in float32: everything after the models."""
    facts = fp32_shadow(session)
    if facts["by_loss"] is None:
        raise NotTried("the gradients are not finite")
    return (
        f"with the loss in float32: loss {facts['loss_in_fp32']:.4g}, and gradients that are {facts['by_loss']:.1%} "
        f"from those of the 16-bit loss; as it was: loss {facts['loss']:.4g}"
    )


@trial("fp32_weights", steps=3.0)
def fp32_weights(session: ReplaySession) -> str:
    """The update with parameters and optimizer state in float32."""

    @contextmanager
    def states_in_fp32() -> Iterator[None]:
        for optimizer in session.optimizers:
            for own in optimizer.state.values():
                own.update({k: v.float() for k, v in own.items() if isinstance(v, Tensor) and v.is_floating_point()})
        yield

    result = session.run(Intervention(dtype="fp32", model=states_in_fp32), upto="step")
    if result.error is not None:
        raise NotTried(str(result.error))
    same = [(result.after[n] == result.before[n])[g != 0] for n, g in result.grads.items() if g is not None]
    still = float(torch.cat(same).float().mean())
    was = updates_kept(session)["still"]
    return f"with weights in float32 the update leaves {still:.1%} of them as they were; as it was: {was:.1%}"


@trial("sum_in_fp32", steps=3.0)
def sum_in_fp32(session: ReplaySession) -> str:
    """The gradients of the micro-batches summed in float32 and rounded once."""
    facts = summed_in_16_bit(session)
    if facts["off"] is None:
        raise NotTried("there is only one micro-batch")
    return f"summed in float32: gradients {facts['rounded_once']:.2%} off by rounding; as it was: {facts['off']:.2%}"
