"""Trials of remedies for lost 16-bit precision: the recorded step with float32 in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.doctor.measure.mixed_precision import gradient_distance
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried


def loss_scale(session: ReplaySession) -> str:
    """Tries three loss scales, and returns the largest one with finite gradients."""
    plain = session.run().grads
    for scale in (2.0**16, 2.0**12, 2.0**8):
        scaled = session.run(Intervention(loss_scale=scale)).grads
        exact = {name: grad.float() / scale for name, grad in scaled.items() if grad is not None}
        if (moved := gradient_distance(plain, exact)) is not None:
            pairs = [(grad, exact[name]) for name, grad in plain.items() if grad is not None and name in exact]
            lost = sum(int(((true != 0) & (grad == 0)).sum()) for grad, true in pairs if not true.is_sparse)
            return (
                f"with the loss times {scale:g}: {lost} elements are no longer 0, and the gradients move by {moved:.1%}"
            )
    raise NotTried("no loss scale keeps the gradients finite")


def fp32_weights(session: ReplaySession) -> str:
    """Tries the update with parameters and optimizer state in float32."""

    @contextmanager
    def states_in_fp32() -> Iterator[None]:
        for optimizer in session.optimizers:
            for own in optimizer.state.values():
                own.update({k: v.float() for k, v in own.items() if isinstance(v, Tensor) and v.is_floating_point()})
        yield

    still = []
    for intervention in (Intervention(), Intervention(dtype="fp32", model=states_in_fp32)):
        result = session.run(intervention, upto="step")
        if result.error is not None:
            raise NotTried(str(result.error))
        grads = [(name, grad) for name, grad in result.grads.items() if grad is not None and not grad.is_sparse]
        same = [(result.after[name] == result.before[name])[grad != 0] for name, grad in grads]
        still.append(float(torch.cat(same).float().mean()))
    return f"with weights in float32 the update leaves {still[1]:.1%} of them unchanged; in 16 bits: {still[0]:.1%}"
