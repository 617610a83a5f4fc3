"""The ranks as a grid with one axis for each way to divide the work, and the groups along it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.plan.parallel import AXES, ONE_RANK, Degrees, place_of
from trainwright.world.group import SOLO, Ranks, World


@dataclass(frozen=True)
class RankMesh:
    """Which ranks do what. ``world`` are all ranks; ``data`` are those whose samples differ from this rank's.

    Ranks that share their samples (a tensor, a sequence or stages is divided among them) are one of ``data`` together.
    ``devices`` is torch's mesh with the axes of ``AXES``; None where the ranks are nothing but copies of each other.
    """

    degrees: Degrees
    world: World
    data: World
    devices: DeviceMesh | None = None

    @property
    def place(self) -> Degrees:
        """The position of this rank on each axis."""
        return place_of(self.degrees, self.world.rank)

    def along(self, *axes: str) -> DeviceMesh:
        """The part of the mesh along some axes, from the outside in, in which this rank lies."""
        assert self.devices is not None
        part: DeviceMesh = self.devices[axes]
        return part


ONE = RankMesh(ONE_RANK, SOLO, SOLO)
"""Of a run of one process."""


def make_mesh(degrees: Degrees, world: World, device: torch.device) -> RankMesh:
    """Makes the groups of a layout; every rank must call it at the same time."""
    if degrees.ranks == degrees.replicate:
        return RankMesh(degrees, world, world)
    devices = init_device_mesh(device.type, degrees.shape, mesh_dim_names=AXES)
    data = world
    if degrees.data < degrees.ranks:
        data = Ranks(devices["replicate", "shard"]._flatten("data").get_group())
    return RankMesh(degrees, world, data, devices)
