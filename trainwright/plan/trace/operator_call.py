"""One call of an ATen operator in a dispatch mode, and the tensors in its arguments and result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainwright.plan.call_trace import Phase, Work
from trainwright.plan.trace import simulated_lstm

OpArgs: TypeAlias = tuple[Any, ...]
"""Positional arguments of an operator: tensors, lists of tensors, numbers, according to its schema."""
OpKwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of an operator."""
OpResult: TypeAlias = Any
"""The result of an operator: a tensor, a tuple of tensors, a number or None, according to its schema."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator, the arguments of one call, and its result."""

    op: OpOverload
    args: OpArgs
    kwargs: OpKwargs
    result: OpResult

    @property
    def name(self) -> str:
        """``add`` for ``aten::add.Tensor``."""
        name: str = self.op._schema.name
        return name.rpartition("::")[2]

    @property
    def is_mutable(self) -> bool:
        """True if the operator writes to one of its arguments."""
        return bool(self.op._schema.is_mutable)

    def inputs(self) -> Iterator[Tensor]:
        """Yield the tensors among the arguments."""
        return tensors_in((*self.args, *self.kwargs.values()))

    def outputs(self) -> Iterator[Tensor]:
        """Yield the tensors of the result."""
        return tensors_in((self.result,))


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among values, including those in lists, tuples and mappings."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements, which for a view are fewer than those of its storage."""
    return tensor.numel() * tensor.element_size()


FlopFormula = Callable[..., int]
"""Takes the arguments of an operator and ``out_val``, its result; returns FLOPs."""


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_args: object, **_kwargs: object) -> int:
    shapes = query.shape, key.shape, value.shape
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _attention_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_args: object, **_kwargs: object
) -> int:
    shapes = grad.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _lstm_on_cpu(x_TBD: Tensor, w_input: Tensor, w_hidden: Tensor, *_args: object, **_kwargs: object) -> int:
    steps = prod(x_TBD.shape[:2])
    return 2 * steps * (w_input.numel() + w_hidden.numel())


def _lstm_on_cpu_backward(x_TBD: Tensor, w_input: Tensor, w_hidden: Tensor, *_args: object, **_kwargs: object) -> int:
    return 2 * _lstm_on_cpu(x_TBD, w_input, w_hidden)


def _grouped_product(a: Tensor, b: Tensor, *_args: object, **_kwargs: object) -> int:
    """Count the product of each row with one matrix, however many matrices there are."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (len(a) if a.dim() == b.dim() == 3 else 1)


EXTRA_FORMULAS: dict[str, FlopFormula] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_on_cpu_backward,
    "aten::_grouped_mm": _grouped_product,
    "aten::mkldnn_rnn_layer": _lstm_on_cpu,
    "aten::mkldnn_rnn_layer_backward": _lstm_on_cpu_backward,
    f"{simulated_lstm.NAMESPACE}::lstm": simulated_lstm.forward_flops,
    f"{simulated_lstm.NAMESPACE}::lstm_backward": simulated_lstm.backward_flops,
}
"""Formulas that torch's table lacks."""


class WorkLog:
    """Sums calls by phase, module, operator and dtype."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Phase, str, str, str], list[int]] = {}
        self._formulas: dict[OpOverload, FlopFormula | None] = {}

    def add(self, phase: Phase, module: str, call: OperatorCall) -> None:
        """Count one call, which must not be a view. Keyword arguments count as neither read nor written."""
        outputs, inputs = tuple(call.outputs()), tuple(tensors_in(call.args))
        lead = outputs[0] if outputs else inputs[0] if inputs else None
        dtype = str(lead.dtype).removeprefix("torch.") if lead is not None else ""
        sums = self._sums.setdefault((phase, module, call.name, dtype), [0, 0, 0])
        sums[0] += 1
        sums[1] += self._flops(call)
        sums[2] += sum(map(nbytes, inputs)) + sum(map(nbytes, outputs))

    def _flops(self, call: OperatorCall) -> int:
        op = call.op
        if op not in self._formulas:
            known = cast(FlopFormula | None, flop_registry.get(op._overloadpacket))
            self._formulas[op] = EXTRA_FORMULAS.get(op._schema.name, known)
        formula = self._formulas[op]
        return 0 if formula is None else int(formula(*call.args, **call.kwargs, out_val=call.result))

    def rows(self) -> tuple[Work, ...]:
        """Return the sums, in the order of each one's first call."""
        return tuple(Work(*key, *sums) for key, sums in self._sums.items())
