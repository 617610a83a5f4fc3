"""The ranks of a run, and the communication between them."""

from trainwright.distributed.device import choose_device, device_name, low_precision, usable_threads
from trainwright.distributed.group import SOLO, Ranks, Solo, World
from trainwright.distributed.join import ALONE, Launch, joined
from trainwright.distributed.mesh import ONE, RankMesh, make_mesh

__all__ = [
    "ALONE",
    "ONE",
    "SOLO",
    "Launch",
    "RankMesh",
    "Ranks",
    "Solo",
    "World",
    "choose_device",
    "device_name",
    "joined",
    "low_precision",
    "make_mesh",
    "usable_threads",
]
