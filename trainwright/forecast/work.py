"""What operators compute and move: FLOPs by formula, bytes by the sizes of what they read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainwright.forecast import simulated_lstm
from trainwright.plan.trace import Phase, Work

aten = torch.ops.aten


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results: those of lists too, as ``_foreach_*`` takes them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(
        sdpa_flop_count(  # type: ignore[no-untyped-call]
            query.shape, key.shape, value.shape
        )
    )


def _attention_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    return int(
        sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
            grad.shape, query.shape, key.shape, value.shape
        )
    )


def _lstm_on_cpu(x_TBD: Tensor, w_input: Tensor, w_hidden: Tensor, *args: Any, **kwargs: Any) -> int:
    steps = prod(x_TBD.shape[:2])
    return 2 * steps * (w_input.numel() + w_hidden.numel())


def _lstm_on_cpu_backward(x_TBD: Tensor, w_input: Tensor, w_hidden: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _lstm_on_cpu(x_TBD, w_input, w_hidden)


OWN: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_on_cpu_backward,
    aten.mkldnn_rnn_layer: _lstm_on_cpu,
    aten.mkldnn_rnn_layer_backward: _lstm_on_cpu_backward,
}
"""Formulas that torch's table lacks."""


OWN_BY_NAME: dict[str, Callable[..., int]] = {
    f"{simulated_lstm.NAMESPACE}::lstm": simulated_lstm.forward_flops,
    f"{simulated_lstm.NAMESPACE}::lstm_backward": simulated_lstm.backward_flops,
}
"""Of operators that are registered only when they are needed."""


class WorkLog:
    """Adds up calls by phase, module, operator and dtype."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Phase, str, str, str], list[int]] = {}
        self._formulas: dict[Any, Callable[..., int] | None] = {}

    def add(
        self, phase: Phase, module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """One call that is not a view. ``args`` are those that it was called with, ``out`` is what it gave."""
        outputs = tuple(tensors_in((out,)))
        inputs = tuple(tensors_in(args))
        lead = outputs[0] if outputs else inputs[0] if inputs else None
        dtype = str(lead.dtype).removeprefix("torch.") if lead is not None else ""
        sums = self._sums.setdefault((phase, module, func._schema.name.split("::")[-1], dtype), [0, 0, 0])
        sums[0] += 1
        sums[1] += self._flops(func, args, kwargs, out)
        sums[2] += sum(map(nbytes, inputs)) + sum(map(nbytes, outputs))

    def _flops(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if func not in self._formulas:
            packet = func._overloadpacket
            known = _from_torch(flop_registry[packet]) if packet in flop_registry else None
            self._formulas[func] = OWN.get(packet) or OWN_BY_NAME.get(func._schema.name) or known
        formula = self._formulas[func]
        return 0 if formula is None else formula(*args, **kwargs, out_val=out)

    def rows(self) -> tuple[Work, ...]:
        return tuple(Work(*key, *sums) for key, sums in self._sums.items())


def _from_torch(formula: Any) -> Callable[..., int]:
    def flops(*args: Any, **kwargs: Any) -> int:
        return int(formula(*args, **kwargs))

    return flops
