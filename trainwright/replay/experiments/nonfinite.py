"""Which op of a non-finite step broke it, in which module, micro-batch and samples: seen op by op, then confirmed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trainwright.recorder.program import Backward, Call, Constant, Operation, RecordedStep, mapped
from trainwright.replay.bisect import guilty
from trainwright.replay.experiments import experiment
from trainwright.replay.mechanism import Range
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.replay.suspects import Bad, Op
from trainwright.replay.trace import Tracing

MANY = 8
"""So many samples or more that each break the step alone: it is not theirs."""
LOWERED = {
    "addmm": "linear", "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "dot": "matmul", "mv": "matmul",
    "convolution": "conv", "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss",
    "nll_loss_nd": "nll_loss", "native_layer_norm": "layer_norm", "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm", "cudnn_ctc_loss": "ctc_loss", "safe_softmax": "softmax",
}  # fmt: skip
"""What torch makes of the functions that users call: where the function was not seen, it is called so."""
WHOLE = {"multi_head_attention_forward", "scaled_dot_product_attention"}
"""Functions that hold more than one op a user would name."""


@experiment("trace", when="incident")
def trace(bench: ReplaySession) -> dict[str, Any]:
    """The first op that did harm; or how the step comes out now, if it is finite when it is run again."""
    scale = loss_scale(bench.segment)
    told: dict[str, Any] = {"scale": scale, "micro_batches": num_backward(bench.segment)}
    is_skip = scale != 1.0 and all(math.isfinite(each) for each in bench.segment.losses)
    if is_skip and is_finite(bench.run(Intervention(loss_scale=1 / scale))):
        return told | {"finite_without_scale": True}
    seen, played = traced(bench)
    told |= {"losses": [float(each) for each in played.losses], "error": _words(played.error)}
    told["gradients"] = [name for name, g in played.grads.items() if g is not None and not bool(g.isfinite().all())]
    if seen.first_bad is None:
        return told | {"first": None}
    told["first"] = _told(bench, seen, seen.first_bad)
    told["first"] |= _samples(bench, seen.first_bad)
    if seen.first_bad.kind == "op" and seen.first_bad.op.phase != "update" and _is_narrow(bench):
        told["fp32"] = _outcome(bench.run(Intervention(dtype="fp32", loss_scale=1 / scale)))
    return told


def traced(bench: ReplaySession) -> tuple[Tracing, ReplayResult]:
    """The step once more, without a loss scale, with every op seen, and its update also where it was vetoed."""
    roots = {str(number): root for number, root in enumerate(bench.roots)}
    scale = loss_scale(bench.segment)
    quiet = replace(bench.segment, values={k: v for k, v in bench.segment.values.items() if k != "vetoed"})
    with bench.live():
        seen = Tracing(roots)
        with seen:
            edit = Intervention(loss_scale=1 / scale, ops=seen.within)
            played = bench.player.play(quiet, edit, upto="step" if scale == 1.0 else "backward")
    return seen, played


def loss_scale(segment: RecordedStep) -> float:
    """The factor of a gradient scaler, 1 without one."""
    scales = {each.scale for each in segment.program if isinstance(each, Backward)}
    return scales.pop() if len(scales) == 1 else 1.0


def num_backward(segment: RecordedStep) -> int:
    return sum(isinstance(each, Backward) for each in segment.program)


def is_finite(played: ReplayResult) -> bool:
    """Whether losses and gradients are numbers."""
    grads = [g for g in played.grads.values() if g is not None]
    return played.error is None and all(bool(t.isfinite().all()) for t in (*played.losses, *grads))


def _outcome(played: ReplayResult) -> dict[str, Any]:
    return {
        "losses": [float(each) for each in played.losses],
        "finite": is_finite(played),
        "error": _words(played.error),
    }


def _words(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _is_narrow(bench: ReplaySession) -> bool:
    """Whether 16-bit numbers are used: by autocast or by the weights."""
    autocast = any(each.autocast[0] for each in bench.segment.program if isinstance(each, Call | Operation))
    return autocast or any(p.dtype in (torch.float16, torch.bfloat16) for p in bench.player.subject.parameters)


# What is told of it


def _told(bench: ReplaySession, seen: Tracing, bad: Bad) -> dict[str, Any]:
    op = seen.ops[bad.op.forward_op] if bad.op.phase == "backward" and bad.op.forward_op is not None else bad.op
    hidden_by = None if bad.hidden_by is None else _called(seen.ops[bad.hidden_by])
    group = bench.optimizers[0].param_groups[0]
    return {
        "kind": bad.kind,
        "what": bad.what,
        "name": bad.name,
        "reached": bad.reached,
        "op": _called(op),
        "kernel": bad.op.name,
        "phase": bad.op.phase,
        "module": bad.op.module,
        "class": _class_of(bench, bad.op.module),
        "source": bad.op.source,
        "dtype": _dtype(bad),
        "inputs": [_range(each) for each in bad.op.inputs[:4]],
        "forward_inputs": [_range(each) for each in op.inputs[:4]],
        "output": _range(bad.op.output),
        "fp32_finite": bad.fp32_finite,
        "hidden_by": hidden_by,
        "call": bad.op.call,
        "micro_batch": bad.op.micro_batch,
        "eps": group.get("eps") if bad.op.phase == "update" else None,
    }


def _called(op: Op) -> str:
    """The name by which the user knows it: of the torch function, unless that holds several, or only wraps the op."""
    function = (op.function or "").strip("_")
    if function in WHOLE or not function:
        return LOWERED.get(op.name, op.name)
    is_functional = hasattr(torch.nn.functional, function)
    return function if is_functional or op.name in LOWERED else op.name


def _dtype(bad: Bad) -> str:
    """The format that could not hold it: of the output where a cast or a product in 16 bit overflowed."""
    return bad.op.output.dtype if bad.kind == "op" else bad.op.dtype


def _class_of(bench: ReplaySession, path: str | None) -> str | None:
    module = None if path is None else bench.modules.get(path)
    return None if module is None else type(module).__name__


def _range(held: Range) -> dict[str, Any]:
    return {
        "dtype": held.dtype,
        "shape": list(held.shape),
        "min": held.min,
        "max": held.max,
        "absmax": held.absmax,
        "nan": held.nan,
        "inf": held.inf,
        "zeros": held.zeros,
    }


# Which samples


def _samples(bench: ReplaySession, bad: Bad) -> dict[str, Any]:
    """The rows that break the step alone, and their ids where the batch they are of is known."""
    ids = _ids_of(bench, bad.op.call)
    if bad.op.phase == "update" or bad.kind in ("weight", "state", "gradient"):
        return {"rows": None, "ids": []}
    if bad.what == "no_valid_target" and bad.reached != "buffer":
        return {"rows": None, "ids": list(ids or ())}
    rows = _guilty_rows(bench, bad)
    if rows is None:
        return {"rows": None, "ids": []}
    size = bench.size
    known = sorted(ids[row] for row in rows) if ids is not None and len(ids) == size else []
    return {"rows": rows, "ids": known, "empty": _empty(bench, bad.op.call, rows)}


def _empty(bench: ReplaySession, call: int, rows: Sequence[int]) -> float | None:
    """The value that fills an input of just these samples from end to end, as padding does; None if there is none."""
    found: list[float] = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, Constant) and leaf.tensor.dim() > 1 and leaf.tensor.shape[0] == bench.size:
            flat = leaf.tensor.detach().flatten(1)
            same = (flat == flat[:, :1]).all(1)
            if flat.shape[1] > 1 and bool(same[list(rows)].all()) and int(same.sum()) == len(rows):
                found.append(float(flat[rows[0], 0]))

    mapped((bench.segment.calls[call].args, bench.segment.calls[call].kwargs), look)
    return found[0] if found else None


def _ids_of(bench: ReplaySession, call: int) -> tuple[int, ...] | None:
    calls = bench.segment.calls
    batch = calls[call].batch if call < len(calls) else -1
    return bench.ids[batch] if 0 <= batch < len(bench.ids) else None


def _guilty_rows(bench: ReplaySession, bad: Bad) -> list[int] | None:
    """Confirmed by running the step with them alone; None where that cannot be done or too many are."""
    size = bench.size
    if not size:
        return None

    def is_bad(rows: Sequence[int]) -> bool:
        return breaks(bench, bad, rows)

    try:
        suspected = list(bad.rows or ())
        if 0 < len(suspected) < min(MANY, size):
            others = [row for row in range(size) if row not in suspected]
            if all(is_bad([row]) for row in suspected) and not is_bad(others):
                return suspected
        found = guilty(is_bad, size, limit=MANY)
    except NotReplayable:
        return None
    return found if 0 < len(found) < MANY and len(found) < size else None


def breaks(bench: ReplaySession, bad: Bad, rows: Sequence[int]) -> bool:
    """Whether the step is non-finite again with these rows of its micro-batch alone."""
    micro = [bad.op.micro_batch] if num_backward(bench.segment) > 1 else None
    edit = Intervention(rows=list(rows), micro=micro, loss_scale=1 / loss_scale(bench.segment))
    with bench.live():
        upto: Any = "forward" if bad.reached in ("loss", "buffer") else "backward"
        played = bench.player.play(bench.segment, edit, upto=upto)
        if played.error is not None and len(rows) == 1:  # BatchNorm wants two values
            played = bench.player.play(bench.segment, replace(edit, rows=[*rows, *rows]), upto=upto)
        if bad.reached == "buffer":
            held = [module._buffers[name] for module, name in bench.player.subject.buffers()]
            return any(b is not None and b.is_floating_point() and not bool(b.isfinite().all()) for b in held)
    values = [*played.losses, *(g for g in played.grads.values() if g is not None)]
    return not all(bool(t.isfinite().all()) for t in values)
