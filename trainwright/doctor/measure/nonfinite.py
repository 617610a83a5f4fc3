"""Finds the cause of a non-finite step: observed in the live loop, and traced by operation in a replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules, named_parameters, named_roots
from trainwright.doctor.facts.precision import BadInput, FirstNonfinite, SeenNonfinite, TraceFacts, ValueRange
from trainwright.doctor.measure.mixed_precision import has_half_parameters
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Backward, Call, Constant, Operation, RecordedStep, constants_of, mapped
from trainwright.recorder.ranks import local_part
from trainwright.recorder.user_types import TorchFunction
from trainwright.replay.bisect import failing_rows
from trainwright.replay.experiments import replay
from trainwright.replay.mechanism import Range
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult, Upto
from trainwright.replay.session import ReplaySession, without_veto
from trainwright.replay.suspects import Bad, Op
from trainwright.replay.trace import Tracing

MAX_NAMES = 64
SMALLEST_FP16_EPS = 3e-8  # Smaller values are 0 in float16
MAX_ROWS = 8  # If this many samples each make the step non-finite alone, the fault is not in the samples
LOWERED = {
    "addmm": "linear", "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "dot": "matmul", "mv": "matmul",
    "convolution": "conv", "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss",
    "nll_loss_nd": "nll_loss", "native_layer_norm": "layer_norm", "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm", "cudnn_ctc_loss": "ctc_loss", "safe_softmax": "softmax",
}  # fmt: skip
"""Function names for ATen operations whose torch function was not recorded."""
COMPOSITE = {"multi_head_attention_forward", "scaled_dot_product_attention"}
"""Composite functions. Their individual operations are reported."""


class NonfiniteListener(Probe):
    """Reads tensors only after a norm or a loss was not finite, and marks such a step as non-finite.

    A forward pass in train mode without a backward pass changes the running statistics of BatchNorm. These are
    therefore also read after a step with such a pass, and at every examination.
    """

    name = SeenNonfinite.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        subject = watched.subject
        self._parameters = list(subject.parameters)
        self._names = {id(p): name for name, p in named_parameters(subject.roots)}
        paths = {module: path for path, module in named_modules(subject.roots)}
        self._statistics = [(paths[m], m, n) for m, n in subject.buffers() if n.startswith("running_")]
        self._before_clip: list[str] | None = None
        self._newest = 0
        self._poisoned: set[str] = set()
        self._facts: SeenNonfinite | None = None

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        if norm is not None and norm.is_cpu and self._before_clip is None and not math.isfinite(norm):
            self._before_clip = self._bad_gradients()

    def on_closed(self, step: RecordedStep) -> None:
        self._newest = step.step

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        before, self._before_clip = self._before_clip, None
        is_vetoed = step.values.get("vetoed") in ("gradients", "update")
        if before is not None or is_vetoed or not numbers.are_finite:
            now = self._bad_gradients() if step.step == self._newest else []  # else the gradients are from another step
            bad = now if before is None else before
            dtypes = [p.dtype for p in self._parameters if bad and self._names.get(id(p)) == bad[0]]
            self._facts = SeenNonfinite(
                bad=True,
                inputs=tuple(_bad_inputs(step)),
                gradients=tuple(bad[:MAX_NAMES]),
                num_gradients=len(bad),
                num_after_clip=None if before is None else len(now),
                dtype=str(dtypes[0]).removeprefix("torch.") if dtypes else None,
            )
        if (self._facts or self._has_loose_forward(step)) and (poisoned := self._newly_poisoned()):
            self._facts = replace(self._facts or SeenNonfinite(), poisoned=tuple(poisoned))
        if self._facts is not None:
            step.values["nonfinite"] = True

    def facts(self) -> SeenNonfinite | None:
        facts, self._facts = self._facts, None
        if facts is None and (poisoned := self._newly_poisoned()):
            facts = SeenNonfinite(poisoned=tuple(poisoned))
        return facts

    def _has_loose_forward(self, step: RecordedStep) -> bool:
        if not self._statistics:
            return False
        trained = sum(kind == "forward" and value[1] for kind, value in step.events)
        return bool(trained > sum(kind == "backward" for kind, _ in step.events))

    def _newly_poisoned(self) -> list[str]:
        """Returns the paths of modules whose running statistics are not finite and were not reported yet."""
        held = [(path, b) for path, m, n in self._statistics if (b := m._buffers[n]) is not None]
        held = [(path, b) for path, b in held if b.is_floating_point()]
        if not held or bool(torch.stack(torch._foreach_norm([b for _, b in held])).isfinite().all()):
            self._poisoned.clear()
            return []
        bad = dict.fromkeys(path for path, b in held if not bool(b.isfinite().all()))
        new = [path for path in bad if path not in self._poisoned]
        self._poisoned.update(new)
        return new

    def _bad_gradients(self) -> list[str]:
        return [self._names.get(id(p), "?") for p in self._parameters if p.grad is not None and not is_finite(p.grad)]


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all values are finite; of a DTensor, those of this process."""
    values = tensor.detach()
    values = values.coalesce().values() if values.is_sparse else local_part(values)
    return bool(values.isfinite().all())


def _bad_inputs(step: RecordedStep) -> Iterable[BadInput]:
    for call in step.calls:
        ids = step.ids[call.batch] if 0 <= call.batch < len(step.ids) else None
        for leaf in constants_of((call.args, call.kwargs)):
            tensor = leaf.tensor.detach()
            if not tensor.is_floating_point() or not leaf.is_unchanged or not tensor.dim() or is_finite(tensor):
                continue
            rows = ~tensor.isfinite().flatten(1).all(1) if tensor.dim() > 1 else ~tensor.isfinite()
            known = ids if ids is not None and len(ids) == len(rows) else ()
            yield BadInput(
                dtype=str(tensor.dtype).removeprefix("torch."),
                nan=int(tensor.isnan().sum()),
                inf=int(tensor.isinf().sum()),
                ids=tuple(known[row] for row in rows.nonzero().flatten().tolist()[:MAX_NAMES] if known),
            )


# the replay


@replay(TraceFacts, when="incident", steps=4.0)
def trace(session: ReplaySession) -> TraceFacts:
    """Returns the first operation that made the step non-finite, or only the outcome if the replay is finite."""
    scale, micro_batches = loss_scale(session.recorded_step), num_backward(session.recorded_step)
    has_finite_losses = all(math.isfinite(each) for each in session.recorded_step.losses)
    if scale != 1.0 and has_finite_losses and all_finite(session.run(Intervention(loss_scale=1 / scale))):
        return TraceFacts(micro_batches=micro_batches, finite_without_scale=True)
    with session.live():
        tracing = Tracing(dict(named_roots(session.roots)))
        with tracing:
            intervention = Intervention(loss_scale=1 / scale, ops=tracing.within)
            upto: Upto = "step" if scale == 1.0 else "backward"
            result = session.replayer.run(without_veto(session.recorded_step), intervention, upto=upto)
    bad = tracing.first_bad
    first = None if bad is None else _first(session, tracing, bad)
    fp32 = None
    is_half = has_half_parameters(session) or any(
        each.autocast[0] for each in session.recorded_step.program if isinstance(each, Call | Operation)
    )
    if bad is not None and bad.kind == "op" and bad.op.phase != "update" and is_half:
        fp32 = session.run(Intervention(dtype="fp32", loss_scale=1 / scale))
    return TraceFacts(
        micro_batches=micro_batches,
        losses=tuple(float(each) for each in result.losses),
        gradients=tuple(n for n, g in result.grads.items() if g is not None and not is_finite(g)),
        first=first,
        fp32_finite=fp32 is not None and all_finite(fp32),
    )


def loss_scale(recorded: RecordedStep) -> float:
    """Returns the loss scale of a gradient scaler; 1 without one."""
    scales = {each.scale for each in recorded.program if isinstance(each, Backward)}
    return scales.pop() if len(scales) == 1 else 1.0


def num_backward(recorded: RecordedStep) -> int:
    """Returns the number of backward passes."""
    return sum(isinstance(each, Backward) for each in recorded.program)


def all_finite(result: ReplayResult) -> bool:
    """Returns True if the losses and the gradients are finite."""
    grads = [g for g in result.grads.values() if g is not None]
    return result.error is None and all(map(is_finite, (*result.losses, *grads)))


def _first(session: ReplaySession, tracing: Tracing, bad: Bad) -> FirstNonfinite:
    op = tracing.ops[bad.op.forward_op] if bad.op.phase == "backward" and bad.op.forward_op is not None else bad.op
    rows, ids = _samples(session, bad)
    what, dtype = bad.what, bad.op.output.dtype if bad.kind == "op" else bad.op.dtype
    eps = session.optimizers[0].param_groups[0].get("eps") if bad.op.phase == "update" else None
    if dtype == "float16" and eps is not None and 0 < eps < SMALLEST_FP16_EPS:
        what = "eps_underflow"
    elif dtype == "float16" and what == "exp_overflow" and bad.fp32_finite:
        what = "fp16_overflow"
    return FirstNonfinite(
        kind=bad.kind,
        what=what,
        name=bad.name,
        reached=bad.reached,
        op=_user_name(op),
        kernel=bad.op.name,
        phase=bad.op.phase,
        module=bad.op.module,
        source=bad.op.source,
        dtype=dtype,
        inputs=tuple(map(_range, op.inputs[:4])),
        output=_range(bad.op.output),
        hidden_by=None if bad.hidden_by is None else _user_name(tracing.ops[bad.hidden_by]),
        micro_batch=bad.op.micro_batch,
        eps=eps,
        rows=rows,
        ids=ids,
        empty=None if not rows else _empty(session, bad.op.call, rows),
    )


def _user_name(op: Op) -> str:
    """Returns the name of the torch function, or of the ATen operation if the function is composite or a wrapper."""
    function = (op.function or "").strip("_")
    if function in COMPOSITE or not function:
        return LOWERED.get(op.name, op.name)
    return function if hasattr(nn.functional, function) or op.name in LOWERED else op.name


def _range(values: Range) -> ValueRange:
    return ValueRange(values.dtype, tuple(values.shape), values.min, values.max, values.nan, values.inf, values.zeros)


def _samples(session: ReplaySession, bad: Bad) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Returns the rows that each make the step non-finite on their own, and their sample ids if known."""
    if bad.op.phase == "update" or bad.kind in ("weight", "state", "gradient"):
        return None, ()
    calls = session.recorded_step.calls
    batch = calls[bad.op.call].batch if bad.op.call < len(calls) else -1
    ids = session.ids[batch] if 0 <= batch < len(session.ids) else None
    if bad.what == "no_valid_target" and bad.reached != "buffer":
        return None, tuple(ids or ())
    rows = _breaking_rows(session, bad)
    is_known = rows and ids is not None and len(ids) == session.size
    return rows, tuple(sorted(ids[row] for row in rows)) if is_known and rows and ids else ()


def _empty(session: ReplaySession, call: int, rows: Sequence[int]) -> float | None:
    """Returns the value of an input that is constant within each of these rows and no other (padding); else None."""
    values: list[float] = []

    def collect(leaf: object) -> None:
        if isinstance(leaf, Constant) and leaf.tensor.dim() > 1 and leaf.tensor.shape[0] == session.size:
            flat = leaf.tensor.detach().flatten(1)
            same = (flat == flat[:, :1]).all(1)
            if flat.shape[1] > 1 and bool(same[list(rows)].all()) and int(same.sum()) == len(rows):
                values.append(float(flat[rows[0], 0]))

    mapped((session.recorded_step.calls[call].args, session.recorded_step.calls[call].kwargs), collect)
    return values[0] if values else None


def _breaking_rows(session: ReplaySession, bad: Bad) -> tuple[int, ...] | None:
    """Returns the rows that each make the step non-finite on their own; None if too many, or if a replay fails."""
    size = session.size
    if not size:
        return None

    def is_bad(rows: Sequence[int]) -> bool:
        return _breaks(session, bad, rows)

    try:
        suspected = list(bad.rows or ())
        if 0 < len(suspected) < min(MAX_ROWS, size):
            others = [row for row in range(size) if row not in suspected]
            if all(is_bad([row]) for row in suspected) and not is_bad(others):
                return tuple(suspected)
        found = failing_rows(is_bad, size, limit=MAX_ROWS)
    except NotReplayable:
        return None
    return tuple(found) if 0 < len(found) < MAX_ROWS and len(found) < size else None


def _breaks(session: ReplaySession, bad: Bad, rows: Sequence[int]) -> bool:
    """Returns True if the step is non-finite with only these rows of its micro-batch."""
    micro = [bad.op.micro_batch] if num_backward(session.recorded_step) > 1 else None
    intervention = Intervention(rows=list(rows), micro=micro, loss_scale=1 / loss_scale(session.recorded_step))
    with session.live():
        upto: Upto = "forward" if bad.reached in ("loss", "buffer") else "backward"
        result = session.replayer.run(session.recorded_step, intervention, upto=upto)
        if result.error is not None and len(rows) == 1:  # BatchNorm needs two values
            twice = replace(intervention, rows=[*rows, *rows])
            result = session.replayer.run(session.recorded_step, twice, upto=upto)
        if bad.reached == "buffer":
            buffers = [module._buffers[name] for module, name in session.replayer.subject.buffers()]
            return not all(b is None or not b.is_floating_point() or is_finite(b) for b in buffers)
    return not all(map(is_finite, (*result.losses, *(g for g in result.grads.values() if g is not None))))
