"""Time of collectives: links within a machine, the network between machines, rings over both.

A ring of n ranks sends (n-1)/n of the bytes over each link to gather or to scatter, and twice that to all-reduce:
P. Patarasuk, X. Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002. NCCL's "bus bandwidth" uses the same factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.plan.degrees import AXES, Degrees

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "send/recv"]
LINK_EFFICIENCY = 0.8
"""The fraction of a link's nominal rate that large messages reach."""
HOP_LATENCY_S = 2e-6
NETWORK_HOP_LATENCY_S = 1e-5
"""Seconds until the first byte of a message arrives, within a machine and between two: nominal figures."""


@dataclass(frozen=True)
class ClusterNode:
    """A machine with ``ranks`` devices. Rates are bytes/s in one direction.

    ``link`` is from one device to the others in the machine; ``network`` from the machine to other machines.
    """

    ranks: int = 1
    link: float = 10e9
    network: float = 1.25e9


SINGLE_DEVICE_NODE = ClusterNode()
"""An unknown machine: one device, nominal links."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks along one axis of the mesh: ``size`` in total, ``local`` of them on the same machine."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return -(-self.size // self.local)


def group_of(degrees: Degrees, axis: str, node: ClusterNode) -> RankGroup:
    """Return the group of a rank along an axis. Consecutive ranks fill a machine before the next one."""
    size, apart = getattr(degrees, axis), 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        apart *= getattr(degrees, inner)
    return RankGroup(size, min(size, max(1, node.ranks // apart)))


def rate(group: RankGroup, node: ClusterNode) -> float:
    """Return the bytes/s at which a rank of the group sends while all other groups of its kind do the same."""
    if group.nodes == 1:
        return node.link * LINK_EFFICIENCY
    share = node.network * group.local / node.ranks  # as many groups leave a machine as it has of their first ranks
    return min(node.link, share) * LINK_EFFICIENCY


def seconds(collective: Collective, num_bytes: float, group: RankGroup, node: ClusterNode) -> float:
    """Return the time of one collective. ``num_bytes`` is the size of the complete tensor."""
    if group.size == 1:
        return 0.0
    if collective == "send/recv":
        across = group.nodes > 1
        beside = node.network / node.ranks if across else node.link
        return num_bytes / (min(beside, node.link) * LINK_EFFICIENCY) + (
            NETWORK_HOP_LATENCY_S if across else HOP_LATENCY_S
        )
    rounds = 2 if collective == "all-reduce" else 1
    between = group.nodes if group.nodes > 1 else 0
    hops_s = between * NETWORK_HOP_LATENCY_S + (group.size - between) * HOP_LATENCY_S
    return rounds * (num_bytes * (group.size - 1) / group.size / rate(group, node) + hops_s)
