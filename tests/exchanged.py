"""Records the collectives that code issues, on any backend, also on the fake process group without other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collective(NamedTuple):
    """One collective: its name in torch, the ranks of its group, and dtype and size of the input of this rank."""

    name: str
    ranks: list[int]
    dtype: torch.dtype
    num_bytes: int


class Collectives(TorchDispatchMode):
    """Context that records each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and (group := _group_of(args)) is not None:
            read = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            read = read[-1:] if "alltoall" in func.__name__ else read  # the first one is the output
            num_bytes = sum(each.nbytes for each in read)
            name = func.__name__.partition(".")[0].strip("_")
            self.noted.append(Collective(name, get_process_group_ranks(group), read[0].dtype, num_bytes))
        return func(*args, **(kwargs or {}))


def _group_of(args: Sequence[Any]) -> ProcessGroup | None:
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return ProcessGroup.unbox(each)
    names = [each for each in args if isinstance(each, str)]
    return _resolve_process_group(names[-1]) if names else None  # type: ignore[arg-type]
