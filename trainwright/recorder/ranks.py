"""A loop that is one of several processes: what it shares with the others, and a replay must not touch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

COMMUNICATES = "it communicates with other processes, which a replay must not"


def has_others() -> bool:
    """Whether this process trains together with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def num_collectives() -> int:
    """How many collectives this process has begun, in all of its groups."""
    if not has_others():
        return 0
    groups = distributed.distributed_c10d._world.pg_map  # torch has no public list of its groups
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def what_is_shared(roots: Iterable[nn.Module], parameters: Iterable[Tensor]) -> str | None:
    """Why no step can be run again in this process alone; None where nothing of the models says so.

    A module that holds a process group communicates when it likes, and could not go on after a replay that was
    interrupted there (DistributedDataParallel). A parameter that lies in several processes is never whole in this one.
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
    """Of a tensor that lies in several processes (a DTensor) the part that lies in this one; else the tensor."""
    if type(tensor) in _WHOLE or not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


_WHOLE = (Tensor, nn.Parameter)
