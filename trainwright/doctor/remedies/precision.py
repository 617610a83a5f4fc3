"""Trials of remedies for what 16-bit dtypes lose: the recorded step with float32 in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from trainwright.doctor.measure.formats import gradient_distance, measure_loss_in_fp32
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.mechanism import HALF_DTYPES
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried

EXACT_POSITIONS = 256


def loss_scale(session: ReplaySession) -> str:
    """The largest of three loss scales for which the gradients are finite."""
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


def everything_in_fp32(session: ReplaySession) -> str:
    """The step with everything in float32."""
    plain, exact = session.run(), session.run(Intervention(dtype="fp32"))
    return f"in float32: loss {exact.loss:.6g}; unchanged: {plain.loss:.6g}"


def loss_in_fp32(session: ReplaySession) -> str:
    """Only the loss in float32: everything after the models."""
    facts = measure_loss_in_fp32(session)
    if facts.error is None:
        raise NotTried("the gradients are not finite")
    return (
        f"with the loss in float32: loss {facts.loss_in_fp32:.4g}, and gradients that are {facts.error:.1%} from those "
        f"of the 16-bit loss; unchanged: loss {facts.loss:.4g}"
    )


def fp32_weights(session: ReplaySession) -> str:
    """The update with parameters and optimizer state in float32."""

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


def positions_in_fp32(session: ReplaySession) -> str:
    """Whole numbers above 256 are not rounded to 16 bits."""
    device = session.replayer.subject.parameters[0].device.type
    num, alike = 0, [0]

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        nonlocal num
        name, was_on = function_name(function), torch.is_autocast_enabled(device)
        if name in ("sin", "cos") and isinstance(args[0], Tensor) and args[0].dim() > 1:
            rows = args[0].detach().flatten(0, -2)
            alike.append(int((rows[1:] == rows[:-1]).all(1).sum()))
        narrow = name in ("bfloat16", "half") or any(each in HALF_DTYPES for each in [*args, *kwargs.values()])
        if narrow and name == "arange":
            num += 1
            return function(*args, **{**kwargs, "dtype": torch.float32})
        if narrow and isinstance(args[0], Tensor) and _are_positions(args[0]):
            num += 1
            return args[0].float()
        with torch.autocast(device, enabled=False) if was_on else nullcontext():
            if name in ("matmul", "__matmul__", "outer", "einsum", "bmm", "mul") and any(
                not t.requires_grad and _are_positions(t) for t in tensors_of(args, 2)
            ):
                num += was_on
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    session.run(Intervention(ops=ops), upto="forward")
    if num == 0:
        raise NotTried("no rounding of positions was found")
    return f"{num} roundings left out: {max(alike)} positions have the angles of their neighbour"


def _are_positions(x: Tensor) -> bool:
    if x.requires_grad or x.numel() <= EXACT_POSITIONS or x.is_complex():
        return False
    values = x.detach().double()
    return bool((values == values.round()).all()) and float(values.max()) > EXACT_POSITIONS
