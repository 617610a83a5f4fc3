"""Finds the op that made a step non-finite, by following each non-finite value from the op that made it.

A non-finite value alone is no fault: causal masks are -inf, ``where`` discards values, statistics are not trained on.
An op that makes one is therefore only a *suspect*. Its result is followed from storage to storage, and the first
suspect whose values reach the loss, the gradient of a parameter, a weight or a buffer is ``first_bad``. Infinities
written on purpose (a mask) are never at fault themselves, but the op that turns them into NaN or sums them up is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainwright.replay import mechanism
from trainwright.replay.mechanism import Range
from trainwright.replay.storages import Storages, is_float

_ALWAYS_ORIGIN = {"softmax_all_masked", "inf_in_softmax", "no_valid_target", "ctc_infeasible"}
_SUMS_OVER_BATCH = {"mm", "bmm", "addmm", "convolution_backward"}


@dataclass(frozen=True)
class Op:
    """One ATen op. A backward op has the ``module`` and ``source`` of the forward op that it differentiates.

    ``phase`` is "forward", "backward" or "update". ``source`` is the innermost line of the user's code. ``inputs`` and
    ``output`` are the ranges of floating-point tensors (several outputs are pooled), ``shapes`` the shapes of all
    inputs. ``forward_op`` is the index of that forward op. ``call`` counts the calls of root modules, and
    ``micro_batch`` the backward passes before the last of these calls. ``function`` is the torch function that called
    the op, if known.
    """

    index: int
    phase: str
    name: str
    module: str | None
    source: str | None
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Range, ...]
    output: Range
    forward_op: int | None
    micro_batch: int
    call: int = 0
    function: str | None = None


@dataclass(frozen=True)
class Bad:
    """The origin of non-finite values.

    ``kind`` is "op", or what was non-finite before any op: "input", "target", "weight", "buffer", "gradient",
    "constant" or "state". For these, ``name`` is the tensor's name, and ``op`` the first op that read it. ``what`` is
    the mechanism. ``rows`` are the samples with such values, if known. ``reached`` is "loss", "gradient", "weight",
    "buffer" or "end". ``hidden_by`` is the op that discarded the values in the forward pass. ``fp32_finite``: this op
    is finite in float32 (for float16 only).
    """

    kind: str
    what: str
    op: Op
    name: str | None = None
    rows: tuple[int, ...] | None = None
    reached: str | None = None
    hidden_by: int | None = None
    fp32_finite: bool | None = None


@dataclass(frozen=True)
class SuspectOp:
    """An executed op. ``exact`` runs it in float32.

    ``before`` are its floating-point inputs, with their ranges before it ran. In ``args``, ranges replace these inputs.
    """

    op: Op
    args: Sequence[object]
    before: Sequence[tuple[Tensor, Range]]
    outputs: Sequence[Tensor]
    written: Sequence[Tensor]
    exact: Callable[[], Tensor | None]


@dataclass(frozen=True)
class _Taint:
    """The reason why a storage holds non-finite values. ``masked``: they are intended infinities, as of a mask.

    ``summed`` is the op that summed these infinities, if any. ``log_softmax``: they passed through a log_softmax.
    """

    bad: Bad
    masked: bool = False
    summed: Bad | None = None
    log_softmax: bool = False


class Suspects:
    """The contents of each storage, the op that made it, and the reason why it is non-finite."""

    def __init__(self) -> None:
        self.first_bad: Bad | None = None
        self.batch_size: int | None = None
        self._ops: list[Op] = []
        self.storages = Storages()
        self._taints: dict[int, _Taint] = {}
        self._made_by: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._hidden: dict[int, int] = {}

    def enter(self, tensor: Tensor) -> None:
        """Notes that a tensor is passed to a model. If it was non-finite, it counts as an input of this model."""
        key = self.storages.key(tensor) or 0
        taint = self._taints.get(key)
        if taint is not None and taint.bad.op.module is None and taint.bad.kind == "target":
            del self._taints[key]

    def follow(self, suspect: SuspectOp) -> None:
        """Records why the outputs of an op are non-finite, if they are."""
        op = suspect.op
        self._ops.append(op)
        self._link(suspect)
        tainted = [self._taint_of(tensor, range_, op) for tensor, range_ in suspect.before if not range_.finite]
        if op.output.finite:
            for taint in tainted if op.name in mechanism.HIDES else []:
                self._hidden.setdefault(taint.bad.op.index, op.index)
            return
        taint = self._inherited(suspect, tainted) or self._own_fault(suspect)
        for tensor in (*suspect.outputs, *(x for x in suspect.written if is_float(x))):
            if (key := self.storages.key(tensor)) is None or self.storages.range(tensor).finite:
                continue
            self._taints[key] = taint
            if (kind := self.storages.names.get(key, ("", ""))[0]) in ("weight", "buffer"):
                self.reach(kind, [tensor])

    def reach(self, reached: str, tensors: Sequence[Tensor]) -> None:
        """Notes that tensors are a loss, gradients or weights. The suspect of the first non-finite one is the fault."""
        for tensor in tensors:
            if self.first_bad is not None or not is_float(tensor) or self.storages.range(tensor).finite:
                continue
            taint = self._taints.get(self.storages.key(tensor) or 0)
            bad = None if taint is None else taint.summed if taint.masked else taint.bad
            if bad is None:
                continue
            hidden_by = self._hidden.get(bad.op.index, bad.hidden_by) if bad.kind == "op" else None
            is_forward = bad.op.phase == "forward" and bad.what not in _ALWAYS_ORIGIN
            if reached == "gradient" and hidden_by is not None and is_forward:
                bad = replace(bad, what="where_branch_backward")
            self.first_bad = replace(bad, reached=reached, hidden_by=hidden_by)

    # Reasons

    def _link(self, suspect: SuspectOp) -> None:
        """Records the op that made a storage, and for elementwise ops the op that made its input."""
        key, size = self.storages.key, suspect.op.output.numel
        parents = [self._made_by.get(key(x) or 0) for x, range_ in suspect.before if range_.numel == size]
        if parents and parents[0] is not None:
            self._parent[suspect.op.index] = parents[0]
        for tensor in suspect.outputs:
            if (made := key(tensor)) is not None:
                self._made_by[made] = suspect.op.index

    def _taint_of(self, tensor: Tensor, range_: Range, op: Op) -> _Taint:
        """Returns the reason why a tensor is non-finite. A tensor that no op made was non-finite from the start."""
        key = self.storages.key(tensor) or 0
        if key in self._taints:
            return self._taints[key]
        default = "state" if op.phase == "update" else "target" if op.module is None else "constant"
        kind, name = self.storages.names.get(key, (default, None))
        rows = self._rows(tensor, op) if kind in ("input", "target") else None
        bad = Bad(kind, "nan" if range_.nan else "inf", op, name, rows)
        is_mask = not range_.nan and kind != "weight" and (range_.inf == range_.neg_inf or kind == "constant")
        self._taints[key] = _Taint(bad, masked=is_mask)
        return self._taints[key]

    def _inherited(self, suspect: SuspectOp, tainted: list[_Taint]) -> _Taint | None:
        """Returns the reason that comes from the op's inputs; None if these were all finite."""
        if not tainted:
            return None
        op = suspect.op
        faults = sorted((x for x in tainted if not x.masked), key=lambda x: x.bad.op.index)
        makes_nan = bool(op.output.nan) and not any(range_.nan for _, range_ in suspect.before)
        is_softmax = op.name in mechanism.SOFTMAX
        if faults and not (makes_nan and is_softmax and all(x.bad.what == "log_of_zero" for x in faults)):
            return self._with_slope(suspect, faults[0]) if makes_nan else faults[0]
        external = [x for x in tainted if x.bad.kind in ("input", "target")]
        if makes_nan and external and not is_softmax:
            return replace(external[0], masked=False)
        if makes_nan:
            word = mechanism.infinite_word(op.name, [range_ for _, range_ in suspect.before if range_.inf])
            return _Taint(Bad("op", word, op, rows=self._rows_of(suspect)))
        return self._carried(suspect, tainted[0])

    def _with_slope(self, suspect: SuspectOp, slope: _Taint) -> _Taint:
        """Handles a gradient times an infinite derivative. If a ``where`` made the gradient 0, it is the fault."""
        is_slope = suspect.op.phase == "backward" and slope.bad.op.forward_op == suspect.op.forward_op is not None
        hidden_by = self._hidden_by(suspect) if is_slope else None
        if hidden_by is None:
            return slope
        return _Taint(replace(slope.bad, what="where_branch_backward", hidden_by=hidden_by))

    def _carried(self, suspect: SuspectOp, taint: _Taint) -> _Taint:
        """Propagates infinities of a mask. The op that sums them up is recorded."""
        op, summed = suspect.op, taint.summed
        if summed is None and op.name in mechanism.REDUCES and op.phase == "forward":
            word = "inf_logit_smoothing" if taint.log_softmax else "inf_in_loss"
            word = "inf_at_target" if op.name.startswith("nll_loss") else word
            summed = Bad("op", word, op, rows=self._rows_of(suspect))
        return replace(taint, summed=summed, log_softmax=taint.log_softmax or op.name == "log_softmax")

    def _own_fault(self, suspect: SuspectOp) -> _Taint:
        """Returns the op itself as the reason, because all its inputs were finite."""
        op, output = suspect.op, suspect.outputs[0]
        is_fill = op.name in mechanism.FILLS or not suspect.before
        exact = suspect.exact() if output.dtype == torch.float16 and not is_fill else None
        fp32_finite = None if exact is None else bool(exact.isfinite().all())
        source = self._ops[op.forward_op] if op.phase == "backward" and op.forward_op is not None else None
        hidden_by = self._hidden_by(suspect) if op.phase == "backward" else None
        if fp32_finite and exact is not None and op.name not in mechanism.EXPONENTIALS:
            constants = [range_ for x, range_ in suspect.before if not x.requires_grad] + [
                x for x in suspect.args if _is_number(x)
            ]
            word = mechanism.narrow_word(op.name, constants, output, exact)
        elif hidden_by is not None:
            word = "where_branch_backward"
        elif source is not None:
            word = mechanism.backward_word(op.name, suspect.args, op.output, source.name, source.inputs)
        else:
            word = mechanism.forward_word(op.name, suspect.args, op.output)
        bad = Bad("op", word, op, rows=self._rows_of(suspect), hidden_by=hidden_by, fp32_finite=fp32_finite)
        return _Taint(bad, masked=is_fill and not op.output.nan)

    def _hidden_by(self, suspect: SuspectOp) -> int | None:
        """Returns the ``where`` that discarded the result of the forward op of this backward op.

        Such a ``where`` sends back a gradient of 0, which meets an infinite slope.
        """
        if suspect.op.forward_op in self._hidden:
            return self._hidden[suspect.op.forward_op]
        output = suspect.outputs[0]
        gradient = next(
            (x for x, range_ in suspect.before if range_.finite and range_.shape == suspect.op.output.shape), None
        )
        if gradient is None or bool(torch.count_nonzero(gradient[~output.isfinite()])):
            return None
        made_by = self._made_by.get(self.storages.key(gradient) or 0)
        while made_by is not None and self._ops[made_by].phase == "backward":
            of = self._ops[made_by].forward_op
            if of is not None and self._ops[of].name in mechanism.HIDES:
                return of
            made_by = self._parent.get(made_by)
        return None

    # Tensors

    def _rows_of(self, suspect: SuspectOp) -> tuple[int, ...] | None:
        """Returns the samples with non-finite values in the output of an op, or else in its inputs."""
        tensors = [suspect.outputs[0], *(x for x, range_ in suspect.before if not range_.finite)]
        return next((rows for x in tensors if (rows := self._rows(x, suspect.op)) is not None), None)

    def _rows(self, tensor: Tensor, op: Op) -> tuple[int, ...] | None:
        """Returns the samples with non-finite values, along the batch dimension or the flattened batch."""
        n = self.batch_size
        if not n or not tensor.dim() or tensor.layout != torch.strided or op.phase == "update":
            return None
        if op.phase == "backward" and op.name in _SUMS_OVER_BATCH:
            return None
        if not tensor.shape[0] or tensor.shape[0] % n:
            if tensor.dim() < 2 or tensor.shape[1] != n:
                return None
            tensor = tensor.transpose(0, 1)
        is_bad = (~tensor.isfinite()).reshape(n, -1).any(1)
        return tuple(is_bad.nonzero().flatten().tolist()) or None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
