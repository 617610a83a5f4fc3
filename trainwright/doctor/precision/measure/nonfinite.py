"""Which op makes a step non-finite, in which module, micro-batch and samples: traced op by op, then confirmed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from trainwright.doctor.precision.measure.formats import has_half_parameters
from trainwright.recorder.program import Backward, Call, Constant, Operation, RecordedStep, mapped
from trainwright.replay.bisect import guilty_rows
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import error_text
from trainwright.replay.mechanism import Range
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult, Upto
from trainwright.replay.session import ReplaySession, without_veto
from trainwright.replay.suspects import Bad, Op
from trainwright.replay.trace import Tracing
from trainwright.runlog.json_values import Facts
from trainwright.state.names import named_roots

MAX_ROWS = 8
"""If this many samples each break the step alone, the fault is not in the samples."""
LOWERED = {
    "addmm": "linear", "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "dot": "matmul", "mv": "matmul",
    "convolution": "conv", "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss",
    "nll_loss_nd": "nll_loss", "native_layer_norm": "layer_norm", "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm", "cudnn_ctc_loss": "ctc_loss", "safe_softmax": "softmax",
}  # fmt: skip
"""Names of ATen ops to the functions that users call, for ops whose function was not recorded."""
COMPOSITE = {"multi_head_attention_forward", "scaled_dot_product_attention"}
"""Functions of several ops that a user would name one by one."""


@experiment("trace", when="incident", steps=4.0)
def trace(session: ReplaySession) -> Facts:
    """The first op that made the step non-finite, or the outcome of the replay if that is finite."""
    scale = loss_scale(session.recorded_step)
    facts: Facts = {"scale": scale, "micro_batches": num_backward(session.recorded_step)}
    is_skip = scale != 1.0 and all(math.isfinite(each) for each in session.recorded_step.losses)
    if is_skip and is_finite(session.run(Intervention(loss_scale=1 / scale))):
        return facts | {"finite_without_scale": True}
    tracing, result = traced(session)
    facts |= {"losses": [float(each) for each in result.losses], "error": error_text(result.error)}
    facts["gradients"] = [name for name, g in result.grads.items() if g is not None and not bool(g.isfinite().all())]
    bad = tracing.first_bad
    if bad is None:
        return facts | {"first": None}
    facts["first"] = _cause(session, tracing, bad) | _samples(session, bad)
    if bad.kind == "op" and bad.op.phase != "update" and _uses_half(session):
        fp32 = session.run(Intervention(dtype="fp32", loss_scale=1 / scale))
        facts["fp32"] = {"losses": [float(each) for each in fp32.losses], "error": error_text(fp32.error)}
        facts["fp32"]["finite"] = is_finite(fp32)
    return facts


def traced(session: ReplaySession) -> tuple[Tracing, ReplayResult]:
    """Runs the step again under ``Tracing``, without the loss scale, and with its update even if that was vetoed."""
    scale = loss_scale(session.recorded_step)
    quiet = without_veto(session.recorded_step)
    with session.live():
        tracing = Tracing(dict(named_roots(session.roots)))
        with tracing:
            intervention = Intervention(loss_scale=1 / scale, ops=tracing.within)
            result = session.replayer.run(quiet, intervention, upto="step" if scale == 1.0 else "backward")
    return tracing, result


def loss_scale(recorded: RecordedStep) -> float:
    """The loss scale of a gradient scaler; 1 without one."""
    scales = {each.scale for each in recorded.program if isinstance(each, Backward)}
    return scales.pop() if len(scales) == 1 else 1.0


def num_backward(recorded: RecordedStep) -> int:
    """The number of backward passes."""
    return sum(isinstance(each, Backward) for each in recorded.program)


def is_finite(result: ReplayResult) -> bool:
    """Whether the losses and the gradients are finite."""
    grads = [g for g in result.grads.values() if g is not None]
    return result.error is None and all(bool(t.isfinite().all()) for t in (*result.losses, *grads))


def _uses_half(session: ReplaySession) -> bool:
    """Whether autocast is on or parameters have a 16-bit dtype."""
    autocast = any(each.autocast[0] for each in session.recorded_step.program if isinstance(each, Call | Operation))
    return autocast or has_half_parameters(session)


def _cause(session: ReplaySession, tracing: Tracing, bad: Bad) -> Facts:
    op = tracing.ops[bad.op.forward_op] if bad.op.phase == "backward" and bad.op.forward_op is not None else bad.op
    group = session.optimizers[0].param_groups[0]
    return {
        "kind": bad.kind,
        "what": bad.what,
        "name": bad.name,
        "reached": bad.reached,
        "op": _user_name(op),
        "kernel": bad.op.name,
        "phase": bad.op.phase,
        "module": bad.op.module,
        "class": _class_of(session, bad.op.module),
        "source": bad.op.source,
        "dtype": _dtype(bad),
        "inputs": [_range(each) for each in bad.op.inputs[:4]],
        "forward_inputs": [_range(each) for each in op.inputs[:4]],
        "output": _range(bad.op.output),
        "fp32_finite": bad.fp32_finite,
        "hidden_by": None if bad.hidden_by is None else _user_name(tracing.ops[bad.hidden_by]),
        "micro_batch": bad.op.micro_batch,
        "eps": group.get("eps") if bad.op.phase == "update" else None,
    }


def _user_name(op: Op) -> str:
    """The name that the user knows: that of the torch function, unless it is composite or only wraps the op."""
    function = (op.function or "").strip("_")
    if function in COMPOSITE or not function:
        return LOWERED.get(op.name, op.name)
    is_functional = hasattr(torch.nn.functional, function)
    return function if is_functional or op.name in LOWERED else op.name


def _dtype(bad: Bad) -> str:
    """The dtype that could not hold the values; that of the output if a cast or a product overflowed."""
    return bad.op.output.dtype if bad.kind == "op" else bad.op.dtype


def _class_of(session: ReplaySession, path: str | None) -> str | None:
    module = None if path is None else session.modules.get(path)
    return None if module is None else type(module).__name__


def _range(values: Range) -> Facts:
    return {
        "dtype": values.dtype,
        "shape": list(values.shape),
        "min": values.min,
        "max": values.max,
        "absmax": values.absmax,
        "nan": values.nan,
        "inf": values.inf,
        "zeros": values.zeros,
    }


# Which samples


def _samples(session: ReplaySession, bad: Bad) -> Facts:
    """The rows that break the step alone, and their sample ids where they are known."""
    ids = _ids_of(session, bad.op.call)
    if bad.op.phase == "update" or bad.kind in ("weight", "state", "gradient"):
        return {"rows": None, "ids": []}
    if bad.what == "no_valid_target" and bad.reached != "buffer":
        return {"rows": None, "ids": list(ids or ())}
    rows = _guilty_rows(session, bad)
    if rows is None:
        return {"rows": None, "ids": []}
    size = session.size
    known = sorted(ids[row] for row in rows) if ids is not None and len(ids) == size else []
    return {"rows": rows, "ids": known, "empty": _empty(session, bad.op.call, rows)}


def _empty(session: ReplaySession, call: int, rows: Sequence[int]) -> float | None:
    """The one value that fills an input of exactly these samples, as padding does; None if there is none."""
    values: list[float] = []

    def collect(leaf: object) -> None:
        if isinstance(leaf, Constant) and leaf.tensor.dim() > 1 and leaf.tensor.shape[0] == session.size:
            flat = leaf.tensor.detach().flatten(1)
            same = (flat == flat[:, :1]).all(1)
            if flat.shape[1] > 1 and bool(same[list(rows)].all()) and int(same.sum()) == len(rows):
                values.append(float(flat[rows[0], 0]))

    mapped((session.recorded_step.calls[call].args, session.recorded_step.calls[call].kwargs), collect)
    return values[0] if values else None


def _ids_of(session: ReplaySession, call: int) -> tuple[int, ...] | None:
    calls = session.recorded_step.calls
    batch = calls[call].batch if call < len(calls) else -1
    return session.ids[batch] if 0 <= batch < len(session.ids) else None


def _guilty_rows(session: ReplaySession, bad: Bad) -> list[int] | None:
    """The rows that break the step alone, confirmed by replays; None where there are too many or it cannot be run."""
    size = session.size
    if not size:
        return None

    def is_bad(rows: Sequence[int]) -> bool:
        return breaks(session, bad, rows)

    try:
        suspected = list(bad.rows or ())
        if 0 < len(suspected) < min(MAX_ROWS, size):
            others = [row for row in range(size) if row not in suspected]
            if all(is_bad([row]) for row in suspected) and not is_bad(others):
                return suspected
        found = guilty_rows(is_bad, size, limit=MAX_ROWS)
    except NotReplayable:
        return None
    return found if 0 < len(found) < MAX_ROWS and len(found) < size else None


def breaks(session: ReplaySession, bad: Bad, rows: Sequence[int]) -> bool:
    """Whether the step is non-finite with only these rows of its micro-batch."""
    micro = [bad.op.micro_batch] if num_backward(session.recorded_step) > 1 else None
    intervention = Intervention(rows=list(rows), micro=micro, loss_scale=1 / loss_scale(session.recorded_step))
    with session.live():
        upto: Upto = "forward" if bad.reached in ("loss", "buffer") else "backward"
        result = session.replayer.run(session.recorded_step, intervention, upto=upto)
        if result.error is not None and len(rows) == 1:  # BatchNorm needs two values
            twice = replace(intervention, rows=[*rows, *rows])
            result = session.replayer.run(session.recorded_step, twice, upto=upto)
        if bad.reached == "buffer":
            return non_finite_buffers(session) > 0
    values = [*result.losses, *(g for g in result.grads.values() if g is not None)]
    return not all(bool(t.isfinite().all()) for t in values)


def non_finite_buffers(session: ReplaySession) -> int:
    """The number of buffers with a value that is not finite. Must be called within ``session.live()``."""
    buffers = [module._buffers[name] for module, name in session.replayer.subject.buffers()]
    return sum(b is not None and b.is_floating_point() and not bool(b.isfinite().all()) for b in buffers)
