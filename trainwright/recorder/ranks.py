"""Properties of a loop in one of several processes, and shared state that a replay must not touch."""

from __future__ import annotations

from collections.abc import Iterable

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


def what_is_shared(roots: Iterable[nn.Module], parameters: Iterable[Tensor]) -> str | None:
    """Returns the reason why no step can be replayed in this process alone; None if the models give no reason.

    A module that holds a process group, such as DistributedDataParallel, may communicate at any time, and could not
    continue after an interrupted replay. A sharded parameter is never complete in this process.
    """
    if not has_others():
        return None
    for module in (each for root in roots for each in root.modules()):
        if any(isinstance(value, distributed.ProcessGroup) for value in vars(module).values()):
            return f"{COMMUNICATES} ({type(module).__name__})"
    if any(is_traceable_wrapper_subclass(each) for each in parameters):
        return f"{COMMUNICATES} (each process holds only parts of the parameters, so updates are not skipped either)"
    return None


def local_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor; any other tensor unchanged."""
    if type(tensor) in _WHOLE or not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


_WHOLE = (Tensor, nn.Parameter)
