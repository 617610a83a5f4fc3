"""The ranks as a grid with one axis per kind of parallelism, and the groups along it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.distributed.group import SOLO, Ranks, World
from trainwright.plan.parallel import AXES, ONE_RANK, Degrees, place_of


@dataclass(frozen=True)
class RankMesh:
    """The layout of the ranks.

    Ranks that share their samples (because a tensor, a sequence or stages are divided among them) together count as one
    rank of ``data``.

    Attributes:
        degrees: Number of ranks along each axis.
        world: All ranks.
        data: Ranks whose samples differ from this rank's.
        sums: Ranks whose gradients and losses are summed: ``data``, and ranks with other parts of the same sequences.
        stages: Ranks with the other stages of this rank's model, in order.
        copies: Ranks with the same experts; None if experts are not divided.
        devices: torch's mesh with the axes of ``AXES``; None if the ranks are only copies of each other.
        dense: The mesh whose axes ``replicate`` and ``shard`` divide weights that are no experts. If experts are
            divided, too, its axis ``shard`` has the ranks of both axes.
    """

    degrees: Degrees
    world: World
    data: World
    sums: World
    stages: World = SOLO
    copies: World | None = None
    devices: DeviceMesh | None = None
    dense: DeviceMesh | None = None

    @property
    def place(self) -> Degrees:
        """The position of this rank on each axis."""
        return place_of(self.degrees, self.world.rank)

    def stream(self, *, divides_sequence: bool) -> int | None:
        """Return the number of this rank's random stream; None if its rank in ``data`` is the number.

        Ranks that hold copies of the same activations use the same dropout; ranks that hold parts draw separately.
        ``divides_sequence``: between tensor-parallel layers, activations are divided along the sequence.
        """
        degrees = self.degrees
        place = self.place
        number = self.data.rank
        divides_sequence = divides_sequence and degrees.tensor > 1
        if degrees.pipeline == degrees.context == 1 and not divides_sequence:
            return None
        number += degrees.data * (place.pipeline + degrees.pipeline * place.context)
        return number * degrees.tensor + place.tensor if divides_sequence else number

    @property
    def is_first_of_stage(self) -> bool:
        """True if this is the first rank with its stage of the model; without a pipeline, the first rank."""
        return replace(self.place, pipeline=0) == FIRST_POSITION

    def along(self, *axes: str) -> DeviceMesh:
        """Return the part of the mesh along some axes, outermost first, that contains this rank."""
        assert self.devices is not None
        part: DeviceMesh = self.devices[axes]
        return part


FIRST_POSITION = Degrees(*[0] * len(AXES))
"""The position of the first rank."""
ONE = RankMesh(ONE_RANK, SOLO, SOLO, SOLO)
"""The mesh of a run of one process."""


def make_mesh(degrees: Degrees, world: World, device: torch.device) -> RankMesh:
    """Create the groups of a layout; every rank must call this at the same time."""
    if degrees.ranks == degrees.replicate:
        return RankMesh(degrees, world, world, world)
    devices = init_device_mesh(device.type, degrees.shape, mesh_dim_names=AXES)
    data = world
    if degrees.data < degrees.ranks:
        data = Ranks(devices["replicate", "shard", "expert"]._flatten("data").get_group())
    sums = data
    if degrees.context > 1:
        sums = Ranks(devices["replicate", "shard", "context"]._flatten("sums").get_group())
    stages = Ranks(devices["pipeline"].get_group()) if degrees.pipeline > 1 else SOLO
    dense = devices
    if degrees.shard > 1 and degrees.expert > 1:  # then there are no other axes
        dense = init_device_mesh(
            device.type, (degrees.replicate, degrees.shard * degrees.expert), mesh_dim_names=("replicate", "shard")
        )
    copies = None
    if degrees.expert > 1:
        copies = Ranks(devices["replicate"].get_group()) if degrees.replicate > 1 else SOLO
    return RankMesh(degrees, world, data, sums, stages, copies, devices, dense)
