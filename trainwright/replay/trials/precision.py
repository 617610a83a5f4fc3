"""Remedies for what 16-bit numbers lose: the recorded step with more bits in the one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.replay.experiments.precision import fp32_shadow, summed_in_16_bit, updates_kept
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial


@trial("loss_scale")
def loss_scale(bench: ReplaySession) -> str:
    """The loss times a power of two, and the gradients divided by it."""
    told = fp32_shadow(bench)
    scaled = told["scaled"]
    if not scaled or told["gradient_error"] is None:
        raise NotTried("no loss scale keeps the gradients finite")
    return (
        f"with the loss times {scaled['scale']:g}: gradients {scaled['gradient_error']:.1%} away from float32, "
        f"{scaled['lost']:.0%} of their elements lost; as it was: {told['gradient_error']:.1%}, {told['lost']:.0%}"
    )


@trial("everything_in_fp32")
def everything_in_fp32(bench: ReplaySession) -> str:
    """The step with every 16-bit value in float32."""
    told = fp32_shadow(bench)
    return f"in float32: loss {told['loss_fp32']:.6g}; as it was: {told['loss']:.6g}"


@trial("loss_in_fp32")
def loss_in_fp32(bench: ReplaySession) -> str:
    """Only what comes after the models in float32."""
    told = fp32_shadow(bench)
    if told["by_loss"] is None:
        raise NotTried("the gradients are not finite")
    return (
        f"with the loss in float32: loss {told['loss_in_fp32']:.4g}, and gradients that are {told['by_loss']:.1%} "
        f"from those of the 16-bit loss; as it was: loss {told['loss']:.4g}"
    )


@trial("fp32_weights")
def fp32_weights(bench: ReplaySession) -> str:
    """The update on weights, and with a state, in float32."""

    @contextmanager
    def states_in_fp32() -> Iterator[None]:
        for optimizer in bench.optimizers:
            for own in optimizer.state.values():
                own.update({k: v.float() for k, v in own.items() if isinstance(v, Tensor) and v.is_floating_point()})
        yield

    played = bench.run(Intervention(dtype="fp32", model=states_in_fp32), upto="step")
    if played.error is not None:
        raise NotTried(str(played.error))
    same = [(played.after[n] == played.before[n])[g != 0] for n, g in played.grads.items() if g is not None]
    still = float(torch.cat(same).float().mean())
    was = updates_kept(bench)["still"]
    return f"with weights in float32 the update leaves {still:.1%} of them as they were; as it was: {was:.1%}"


@trial("sum_in_fp32")
def sum_in_fp32(bench: ReplaySession) -> str:
    """The gradients of the micro-batches added up in float32 and rounded once."""
    told = summed_in_16_bit(bench)
    if told["off"] is None:
        raise NotTried("there is only one micro-batch")
    return f"summed in float32: gradients {told['rounded_once']:.2%} off by rounding; as it was: {told['off']:.2%}"
