"""Which op first made numbers that broke the step: every suspect is followed until it does harm, or does none.

A non-finite value is not yet a fault: causal masks are -inf, ``where`` throws values away, statistics are not trained
on. So whatever makes one is a *suspect*; its outcome is followed from storage to storage, and the first whose outcome
reaches the loss, the gradient of a parameter, a weight or a buffer is ``first_bad``. Infinities that were written on
purpose (a mask) never are: the op that turns them into NaN or sums them up is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainwright.replay import mechanism
from trainwright.replay.mechanism import Range, range_of

_ALWAYS_ITSELF = {"softmax_all_masked", "inf_in_softmax", "no_valid_target", "ctc_infeasible"}
_SUMS_OVER_BATCH = {"mm", "bmm", "addmm", "convolution_backward"}


@dataclass(frozen=True)
class Op:
    """One operation. ``module`` and ``source`` of a backward op are those of ``forward_op``, its forward op.

    ``phase`` is "forward", "backward" or "update". ``source`` is the innermost line that is neither torch's nor ours.
    ``inputs`` and ``output`` are of the floating tensors (several outputs are pooled), ``shapes`` of all inputs.
    ``micro_batch`` counts the backward passes that were over when a root module was last called, ``call`` those calls.
    ``function`` is the torch function that the op is a part of, where that was seen.
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
    """Where non-finite values came from.

    ``kind``: "op", or what came in non-finite: "input", "target", "weight", "buffer", "gradient", "constant", "state";
    then ``name`` says which one, and ``op`` is the first that read it. ``what`` is the mechanism. ``rows`` are the
    samples it was seen in, where that can be told. ``reached``: "loss", "gradient", "weight", "buffer" or "end".
    ``hidden_by`` is the op that had thrown the values away in the forward pass. ``fp32_finite``: whether this one op is
    finite in float32 (asked of float16 only).
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
    """One op as it was run, and its floating inputs as they were before. ``exact`` runs it again in float32.

    ``args`` has ranges in the place of floating tensors.
    """

    op: Op
    args: Sequence[Any]
    before: Sequence[tuple[Tensor, Range]]
    outputs: Sequence[Tensor]
    written: Sequence[Tensor]
    exact: Callable[[], Tensor | None]


@dataclass(frozen=True)
class _Taint:
    """Why a storage holds non-finite values. ``masked``: infinities on purpose; ``summed``: who then added them up."""

    bad: Bad
    masked: bool = False
    summed: Bad | None = None
    log_softmax: bool = False


class Suspects:
    """The ledger of storages: what each holds, who made it, and why it is non-finite."""

    def __init__(self) -> None:
        self.first_bad: Bad | None = None
        self.found: list[Bad] = []
        self.batch_size: int | None = None
        self._ops: list[Op] = []
        self._pins: dict[int, StorageWeakRef] = {}
        self._ranges: dict[int, dict[Any, Range]] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._taints: dict[int, _Taint] = {}
        self._made_by: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._hidden: dict[int, int] = {}

    def call(self, tensor: Tensor, kind: str, name: str) -> None:
        """What a tensor is called that comes from outside."""
        if (key := self._key(tensor)) is not None:
            self._names.setdefault(key, (kind, name))

    def enter(self, tensor: Tensor) -> None:
        """It is handed to a model: what had come in so outside of any module, before it was cut or moved, does here."""
        key = self._key(tensor) or 0
        taint = self._taints.get(key)
        if taint is not None and taint.bad.op.module is None and taint.bad.kind == "target":
            del self._taints[key]

    def look(self, tensor: Tensor) -> Range:
        """What the tensor holds now; looked at once for each of its versions."""
        key = self._key(tensor)
        if key is None:
            return range_of(tensor if tensor.layout == torch.strided else tensor._values())
        version = 0 if tensor.is_inference() else tensor._version
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)
        known = self._ranges.setdefault(key, {})
        if view not in known:
            known[view] = range_of(tensor)
        return known[view]

    def forget(self, tensor: Tensor) -> None:
        """It was written to."""
        self._ranges.pop(self._key(tensor) or 0, None)

    def follow(self, seen: SuspectOp) -> None:
        """Where the op's output is non-finite, its storage is told why."""
        op = seen.op
        self._ops.append(op)
        self._link(seen)
        tainted = [self._taint_of(tensor, held, op) for tensor, held in seen.before if not held.finite]
        if op.output.finite:
            for taint in tainted if op.name in mechanism.HIDES else []:
                self._hidden.setdefault(taint.bad.op.index, op.index)
            return
        taint = self._handed_on(seen, tainted) or self._born(seen)
        for tensor in (*seen.outputs, *(x for x in seen.written if is_judged(x))):
            if (key := self._key(tensor)) is None or self.look(tensor).finite:
                continue
            self._taints[key] = taint
            if (kind := self._names.get(key, ("", ""))[0]) in ("weight", "buffer"):
                self.reach(kind, [tensor])

    def reach(self, reached: str, tensors: Sequence[Tensor]) -> None:
        """A loss, gradient or weight holds these: if they are non-finite, their reason is the fault."""
        for tensor in tensors:
            if self.first_bad is not None or not is_judged(tensor) or self.look(tensor).finite:
                continue
            taint = self._taints.get(self._key(tensor) or 0)
            bad = None if taint is None else taint.summed if taint.masked else taint.bad
            if bad is None:
                continue
            hidden_by = self._hidden.get(bad.op.index, bad.hidden_by) if bad.kind == "op" else None
            is_forward = bad.op.phase == "forward" and bad.what not in _ALWAYS_ITSELF
            if reached == "gradient" and hidden_by is not None and is_forward:
                bad = replace(bad, what="where_branch_backward")
            self.first_bad = replace(bad, reached=reached, hidden_by=hidden_by)

    # Reasons

    def _link(self, seen: SuspectOp) -> None:
        """Who made which storage, and, element by element, of what."""
        parents = [
            self._made_by.get(self._key(x) or 0) for x, held in seen.before if held.numel == seen.op.output.numel
        ]
        if parents and parents[0] is not None:
            self._parent[seen.op.index] = parents[0]
        for tensor in seen.outputs:
            if (key := self._key(tensor)) is not None:
                self._made_by[key] = seen.op.index

    def _taint_of(self, tensor: Tensor, held: Range, op: Op) -> _Taint:
        """Why this tensor is non-finite; one that nobody here made has come in so."""
        key = self._key(tensor) or 0
        if key in self._taints:
            return self._taints[key]
        default = "state" if op.phase == "update" else "target" if op.module is None else "constant"
        kind, name = self._names.get(key, (default, None))
        rows = self._rows(tensor, op) if kind in ("input", "target") else None
        bad = self._suspect(Bad(kind, "nan" if held.nan else "inf", op, name, rows))
        is_mask = not held.nan and kind != "weight" and (held.inf == held.neg_inf or kind == "constant")
        self._taints[key] = _Taint(bad, masked=is_mask)
        return self._taints[key]

    def _handed_on(self, seen: SuspectOp, tainted: list[_Taint]) -> _Taint | None:
        """The reason that the op was handed with its inputs; None if these were all finite."""
        if not tainted:
            return None
        op = seen.op
        faults = sorted((x for x in tainted if not x.masked), key=lambda x: x.bad.op.index)
        makes_nan = bool(op.output.nan) and not any(held.nan for _, held in seen.before)
        is_softmax = op.name in mechanism.SOFTMAX
        if faults and not (makes_nan and is_softmax and all(x.bad.what == "log_of_zero" for x in faults)):
            return self._with_slope(seen, faults[0]) if makes_nan else faults[0]
        came_in = [x for x in tainted if x.bad.kind in ("input", "target")]
        if makes_nan and came_in and not is_softmax:
            return replace(came_in[0], masked=False)
        if makes_nan:
            word = mechanism.infinite_word(op.name, [held for _, held in seen.before if held.inf])
            return _Taint(self._suspect(Bad("op", word, op, rows=self._rows_of(seen))))
        return self._carried(seen, tainted[0])

    def _with_slope(self, seen: SuspectOp, slope: _Taint) -> _Taint:
        """The slope was infinite and now meets the gradient: if that is 0 because of a ``where``, this is the fault."""
        is_slope = seen.op.phase == "backward" and slope.bad.op.forward_op == seen.op.forward_op is not None
        hidden_by = self._hidden_by(seen) if is_slope else None
        if hidden_by is None:
            return slope
        return _Taint(replace(slope.bad, what="where_branch_backward", hidden_by=hidden_by))

    def _carried(self, seen: SuspectOp, taint: _Taint) -> _Taint:
        """Infinities of a mask go on as infinities: who sums them up is remembered."""
        op, summed = seen.op, taint.summed
        if summed is None and op.name in mechanism.REDUCES and op.phase == "forward":
            word = "inf_logit_smoothing" if taint.log_softmax else "inf_in_loss"
            word = "inf_at_target" if op.name.startswith("nll_loss") else word
            summed = Bad("op", word, op, rows=self._rows_of(seen))
        return replace(taint, summed=summed, log_softmax=taint.log_softmax or op.name == "log_softmax")

    def _born(self, seen: SuspectOp) -> _Taint:
        """Everything that the op read was finite: the reason is the op itself."""
        op, output = seen.op, seen.outputs[0]
        is_fill = op.name in mechanism.FILLS or not seen.before
        shadow = seen.exact() if output.dtype == torch.float16 and not is_fill else None
        fits = None if shadow is None else bool(shadow.isfinite().all())
        source = self._ops[op.forward_op] if op.phase == "backward" and op.forward_op is not None else None
        hidden_by = self._hidden_by(seen) if op.phase == "backward" else None
        if fits and shadow is not None and op.name not in mechanism.EXPONENTIALS:
            constants = [held for x, held in seen.before if not x.requires_grad] + [
                x for x in seen.args if _is_number(x)
            ]
            word = mechanism.narrow_word(op.name, constants, output, shadow)
        elif hidden_by is not None:
            word = "where_branch_backward"
        elif source is not None:
            word = mechanism.backward_word(op.name, seen.args, op.output, source.name, source.inputs)
        else:
            word = mechanism.forward_word(op.name, seen.args, op.output)
        bad = Bad("op", word, op, rows=self._rows_of(seen), hidden_by=hidden_by, fp32_finite=fits)
        return _Taint(self._suspect(bad), masked=is_fill and not op.output.nan)

    def _hidden_by(self, seen: SuspectOp) -> int | None:
        """The ``where`` that had thrown away what this op is the slope of: a gradient of 0 times an infinite slope."""
        if seen.op.forward_op in self._hidden:
            return self._hidden[seen.op.forward_op]
        output = seen.outputs[0]
        gradient = next((x for x, held in seen.before if held.finite and held.shape == seen.op.output.shape), None)
        if gradient is None or bool(torch.count_nonzero(gradient[~output.isfinite()])):
            return None
        maker = self._made_by.get(self._key(gradient) or 0)
        while maker is not None and self._ops[maker].phase == "backward":
            of = self._ops[maker].forward_op
            if of is not None and self._ops[of].name in mechanism.HIDES:
                return of
            maker = self._parent.get(maker)
        return None

    def _suspect(self, bad: Bad) -> Bad:
        self.found.append(bad)
        return bad

    # Tensors

    def _rows_of(self, seen: SuspectOp) -> tuple[int, ...] | None:
        """The samples that an op broke, by its output or else by what it was handed."""
        tensors = [seen.outputs[0], *(x for x, held in seen.before if not held.finite)]
        return next((rows for x in tensors if (rows := self._rows(x, seen.op)) is not None), None)

    def _rows(self, tensor: Tensor, op: Op) -> tuple[int, ...] | None:
        """The samples with non-finite values: along the axis that is as long as the batch, or holds it flattened."""
        n = self.batch_size
        if not n or not tensor.dim() or tensor.layout != torch.strided or op.phase == "update":
            return None
        if op.phase == "backward" and op.name in _SUMS_OVER_BATCH:
            return None
        if not tensor.shape[0] or tensor.shape[0] % n:
            if tensor.dim() < 2 or tensor.shape[1] != n:
                return None
            tensor = tensor.transpose(0, 1)
        lost = (~tensor.isfinite()).reshape(n, -1).any(1)
        return tuple(lost.nonzero().flatten().tolist()) or None

    def _key(self, tensor: Tensor) -> int | None:
        """The storage of a tensor. A weak reference keeps its address from being given to another."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except NotImplementedError:  # sparse, or wrapped by a transform of torch.func
            return None
        key = int(reference.cdata)
        self._pins.setdefault(key, reference)
        return key


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_judged(tensor: Tensor) -> bool:
    """Whether its numbers can be read: a floating tensor of an ordinary kind."""
    is_known = tensor.layout in (torch.strided, torch.sparse_coo) and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return is_known and (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta"
