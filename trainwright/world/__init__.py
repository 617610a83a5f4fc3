"""The ranks of a run: what one process may know and ask of the others."""

from trainwright.world.detect import choose_device, device_name, low_precision, require_one_process, usable_threads
from trainwright.world.group import SOLO, Ranks, Solo, World

__all__ = [
    "SOLO",
    "Ranks",
    "Solo",
    "World",
    "choose_device",
    "device_name",
    "low_precision",
    "require_one_process",
    "usable_threads",
]
