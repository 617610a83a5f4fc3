"""The ranks of a run: what one process may know and ask of the others."""

from trainwright.world.detect import choose_device, device_name, low_precision, usable_threads
from trainwright.world.group import SOLO, Ranks, Solo, World
from trainwright.world.join import ALONE, Launch, joined

__all__ = [
    "ALONE",
    "SOLO",
    "Launch",
    "Ranks",
    "Solo",
    "World",
    "choose_device",
    "device_name",
    "joined",
    "low_precision",
    "usable_threads",
]
