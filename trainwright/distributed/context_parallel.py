"""Context parallelism: each rank computes a part of every sequence; keys and values are gathered for attention.

torch's implementation uses operators that CPUs do not have. This implementation uses torch's all-gather and
reduce-scatter, by DTensor.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainwright.errors import UsageError


def part_of(x: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of sequences, shape (B, T, ...). Raises UsageError if T is not divisible."""
    length, rest = divmod(x.shape[1], ranks)
    if rest:
        raise UsageError(
            f"parallel.context: {x.shape[1]} positions cannot be divided among {ranks} ranks",
            remedy=f"make samples with a multiple of {ranks} positions, or leave parallel.context out",
        )
    return x.narrow(1, rank * length, length)


class ContextPart:
    """The part of the sequence that this rank of ``mesh`` (1-D) computes: the ranks have equal parts, in rank order.

    Each rank has only the gradients of its part, and of the keys and values that other ranks use. Gradients of the
    weights must be summed over the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()

    def start(self, length: int) -> int:
        return self._rank * length

    def cut(self, x: Tensor) -> Tensor:
        return part_of(x, self._rank, self._ranks)

    def before(self, x_BHTK: Tensor) -> Tensor:
        """Gather keys or values up to this rank's part.

        The backward pass sums the gradients of these keys or values over all ranks, by a reduce-scatter.
        """
        length = x_BHTK.shape[2]
        part = DTensor.from_local(x_BHTK, self._mesh, [Shard(2)], run_check=False)
        whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole[:, :, : (self._rank + 1) * length]
