"""Properties of a loop in one of several processes, and shared state that a replay must not touch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

COMMUNICATES = "it communicates with other processes, which a replay must not"


def has_others() -> bool:
    """Returns True if this process trains together with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def num_collectives() -> int:
    """Returns the number of collectives that this process has started, in all of its groups."""
    if not has_others():
        return 0
    groups = distributed.distributed_c10d._world.pg_map  # torch has no public list of its groups
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def last_collective() -> str:
    """Returns the last collective that this process has started, such as "all_reduce of Float [3]".

    Returns "" if torch's flight recorder is off (``TORCH_FR_BUFFER_SIZE``).
    """
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    with suppress(RuntimeError, ValueError, KeyError):  # the format is private to torch
        texts = [dump() for dump in dumps if dump is not None] if has_others() else []
        if entries := [entry for text in texts for entry in json.loads(text).get("entries", [])]:
            last = max(entries, key=lambda entry: entry["time_created_ns"])
            tensors = [f"{dtype} {sizes}" for dtype, sizes in zip(last["input_dtypes"], last["input_sizes"])]
            return f"{last['profiling_name'].rpartition(':')[2]} of {', '.join(tensors[:4])}"
    return ""


def what_is_shared(roots: Iterable[nn.Module], parameters: Iterable[Tensor]) -> str | None:
    """Returns the reason why no step can be replayed in this process alone; None if the models give no reason.

    A module that holds a process group may communicate at any time, and could not continue after an interrupted replay
    (DistributedDataParallel). A sharded parameter is never complete in this process.
    """
    if not has_others():
        return None
    for module in (each for root in roots for each in root.modules()):
        if any(isinstance(value, distributed.ProcessGroup) for value in vars(module).values()):
            return f"{COMMUNICATES} ({type(module).__name__})"
    if any(is_traceable_wrapper_subclass(each) for each in parameters):
        return f"{COMMUNICATES} (no parameter is whole in one of them, so no update is left out either)"
    return None


def own_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor; any other tensor unchanged."""
    if type(tensor) in _WHOLE or not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


_WHOLE = (Tensor, nn.Parameter)
