"""One call of an ATen operator in a dispatch mode, and the tensors in its arguments and result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch._ops import OpOverload

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
    """Yield the tensors among arguments or results, including those in lists (the arguments of ``_foreach_*``)."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements, which for a view are fewer than those of its storage."""
    return tensor.numel() * tensor.element_size()
