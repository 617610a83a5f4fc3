"""The ranks as a grid with one axis for each way to divide the work, and the groups along it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.distributed.group import SOLO, Ranks, World
from trainwright.plan.parallel import AXES, ONE_RANK, Degrees, place_of


@dataclass(frozen=True)
class RankMesh:
    """Which ranks do what. ``world`` are all ranks; ``data`` are those whose samples differ from this rank's.

    ``sums`` are those whose gradients and losses add up: ``data``, and those that have other parts of its sequences.
    ``stages`` are those that have the other stages of this rank's model, in their order.
    Ranks that share their samples (a tensor, a sequence or stages is divided among them) are one of ``data`` together.
    ``devices`` is torch's mesh with the axes of ``AXES``; None where the ranks are nothing but copies of each other.
    """

    degrees: Degrees
    world: World
    data: World
    sums: World
    stages: World = SOLO
    devices: DeviceMesh | None = None

    @property
    def place(self) -> Degrees:
        """The position of this rank on each axis."""
        return place_of(self.degrees, self.world.rank)

    def stream(self, *, divides_sequence: bool) -> int | None:
        """The number of this rank's random numbers, where it is not that of its samples.

        Ranks that hold copies of the same activations drop the same of them; those that hold parts draw their own.
        ``divides_sequence``: tensor ranks do, between the layers that they divide.
        """
        degrees, place, number = self.degrees, self.place, self.data.rank
        divides_sequence = divides_sequence and degrees.tensor > 1
        if degrees.pipeline == degrees.context == 1 and not divides_sequence:
            return None
        number += degrees.data * (place.pipeline + degrees.pipeline * place.context)
        return number * degrees.tensor + place.tensor if divides_sequence else number

    @property
    def stages_of_first(self) -> World:
        """The stages of the first rank, if this rank has one of them."""
        return self.stages if replace(self.place, pipeline=0) == NOWHERE else SOLO

    def along(self, *axes: str) -> DeviceMesh:
        """The part of the mesh along some axes, from the outside in, in which this rank lies."""
        assert self.devices is not None
        part: DeviceMesh = self.devices[axes]
        return part


NOWHERE = Degrees(0, 0, 0, 0, 0)
"""The place of the first rank."""
ONE = RankMesh(ONE_RANK, SOLO, SOLO, SOLO)
"""Of a run of one process."""


def make_mesh(degrees: Degrees, world: World, device: torch.device) -> RankMesh:
    """Makes the groups of a layout; every rank must call it at the same time."""
    if degrees.ranks == degrees.replicate:
        return RankMesh(degrees, world, world, world)
    devices = init_device_mesh(device.type, degrees.shape, mesh_dim_names=AXES)
    data = world
    if degrees.data < degrees.ranks:
        data = Ranks(devices["replicate", "shard"]._flatten("data").get_group())
    sums = data
    if degrees.context > 1:
        sums = Ranks(devices["replicate", "shard", "context"]._flatten("sums").get_group())
    stages = Ranks(devices["pipeline"].get_group()) if degrees.pipeline > 1 else SOLO
    return RankMesh(degrees, world, data, sums, stages, devices)
