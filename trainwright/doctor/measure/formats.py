"""Measures the loss of precision by 16-bit dtypes: the dtypes of a forward pass, and the loss in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainwright.doctor.facts.precision import Aliased, Emptied, FormatFacts, LossInFp32Facts
from trainwright.recorder.plain_tensors import is_plain
from trainwright.recorder.program import mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import function_name
from trainwright.replay.mechanism import HALF_DTYPES
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

CASTS = frozenset({"half", "bfloat16", "to", "type", "type_as"})
MAX_MICRO_BATCHES = 4  # Maximum number of micro-batches of a step that are compared
EXACT_POSITIONS = 256  # bfloat16 represents all integers up to this one
MAX_ANGLES = 2**24
Grads = Mapping[str, Tensor | None]


def measure_formats(session: ReplaySession) -> FormatFacts:
    """Returns the dtypes of all results of a forward pass and its loss, and the results that underflow in float16."""
    modules = ModuleStack(session.modules)
    dtypes: set[torch.dtype] = set()
    loss_ops: dict[str, None] = {}
    emptied: list[Emptied] = []
    aliased: list[Aliased] = []

    def look(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        name, results = function_name(function), [result] if isinstance(result, Tensor) else tensors_of(result)
        dtypes.update(each.dtype for each in results)
        if modules.innermost is None and results and any(t.dtype in HALF_DTYPES for t in tensors_of(args)):
            loss_ops[name] = None
        if name in ("sin", "cos") and (found := _aliased(args[0], modules.innermost or "")) is not None:
            aliased.append(found)
        if isinstance(result, Tensor) and result.dtype == torch.float16 and not result.any() and is_plain(result):
            exact = in_fp32(function, args, kwargs)
            if isinstance(exact, Tensor) and bool((exact != 0).any()):
                emptied.append(Emptied(name, modules.innermost, float(exact.detach().abs().max())))
        return result

    session.run(Intervention(ops=look, model=modules.following), upto="forward")
    return FormatFacts(
        dtype=min((str(each).removeprefix("torch.") for each in dtypes.intersection(HALF_DTYPES)), default=""),
        loss_ops=tuple(loss_ops)[:8],
        emptied=tuple(emptied[:4]),
        aliased=tuple(aliased[:4]),
    )


def has_half_parameters(session: ReplaySession) -> bool:
    """Returns True if a parameter has a 16-bit dtype."""
    return any(p.dtype in HALF_DTYPES for p in session.replayer.subject.parameters)


def _aliased(angles: object, module: str) -> Aliased | None:
    """Returns angles if a tenth of the positions far from 0 have those of their neighbour along a dimension."""
    if not isinstance(angles, Tensor) or not angles.is_floating_point() or angles.requires_grad:
        return None
    if not EXACT_POSITIONS < angles.numel() <= MAX_ANGLES:
        return None
    rows = angles.detach().float()
    rows = rows[:, None] if rows.dim() == 1 else rows.flatten(0, -2)
    for table in (rows, rows.T):
        far = table.abs().amax(1) >= EXACT_POSITIONS
        if len(table) > EXACT_POSITIONS and bool(far.any()):
            same = int(((table[1:] == table[:-1]).all(1) & far[1:]).sum())
            dtype = str(angles.dtype).removeprefix("torch.")
            return Aliased(module, dtype, int(far.sum()), same) if 10 * same >= int(far.sum()) else None
    return None


def in_fp32(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Calls a torch function with its arguments in float32."""
    device = next((t.device.type for t in tensors_of(args)), "cpu")
    with torch.autocast(device, enabled=False):
        if function_name(function) in CASTS:
            result = function(*args, **kwargs)
            is_cast = isinstance(result, Tensor) and result.dtype in HALF_DTYPES and args[0].is_floating_point()
            return args[0].float() if is_cast else result
        if "dtype" in kwargs:
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in kwargs.items()}
        return function(*mapped(args, _widen), **mapped(kwargs, _widen))


def _widen(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def measure_loss_in_fp32(session: ReplaySession) -> LossInFp32Facts:
    """Returns the difference of the gradients to those of the same outputs with the loss in float32."""
    modules = ModuleStack(session.modules)
    micro = range(MAX_MICRO_BATCHES) if len(session.recorded_step.losses) > MAX_MICRO_BATCHES else None

    def widened(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        return function(*args, **kwargs) if modules.innermost is not None else in_fp32(function, args, kwargs)

    plain = session.run(Intervention(micro=micro))
    exact = session.run(Intervention(ops=widened, model=modules.following, micro=micro))
    if exact.error is not None:
        raise exact.error
    return LossInFp32Facts(loss=plain.loss, loss_in_fp32=exact.loss, error=gradient_distance(plain.grads, exact.grads))


def gradient_distance(grads: Grads, exact: Grads) -> float | None:
    """Returns the relative error of all gradients together; None if one is not finite or there are none."""
    error = norm = 0.0  # sums of squares
    for name, true in exact.items():
        grad = grads.get(name)
        if true is not None and grad is not None and not true.is_sparse:
            error += float((grad.double() - true.double()).square().sum())
            norm += float(true.double().square().sum())
    return (error / norm) ** 0.5 if norm > 0 and math.isfinite(error) and math.isfinite(norm) else None


formats = replay(FormatFacts, when="first", steps=0.5, value=1.5)(measure_formats)
loss_in_fp32 = replay(LossInFp32Facts, when="requested", steps=2.6)(measure_loss_in_fp32)
