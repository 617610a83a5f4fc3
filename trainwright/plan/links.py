"""How long ranks take to exchange bytes: links within a machine, the network between machines, collectives as rings.

A ring of n ranks sends (n-1)/n of the bytes over each link to gather or to scatter, and twice that to reduce for all:
P. Patarasuk, X. Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002. The same factors are those of NCCL's "bus bandwidth".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.plan.parallel import AXES, Degrees

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "send/recv"]
REACH = 0.8
"""The share of a link's figure that large messages reach."""
HOP_S = 2e-6
NETWORK_HOP_S = 1e-5
"""Seconds until the first byte of a message arrives, within a machine and between two: nominal figures."""


@dataclass(frozen=True)
class ClusterNode:
    """A machine with ``ranks`` devices. Bytes/s in one direction: ``link`` from one device to the others in it,
    ``network`` from the whole machine to other machines."""

    ranks: int = 1
    link: float = 10e9
    network: float = 1.25e9


ALONE = ClusterNode()
"""A machine of which nothing is known: one device, nominal links."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks along one axis of the mesh: ``size`` of them, of which ``local`` share a machine."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return -(-self.size // self.local)


def group_of(degrees: Degrees, axis: str, node: ClusterNode) -> RankGroup:
    """The group of a rank along an axis. Ranks that follow each other fill a machine before the next one."""
    size, apart = getattr(degrees, axis), 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        apart *= getattr(degrees, inner)
    return RankGroup(size, min(size, max(1, node.ranks // apart)))


def rate(group: RankGroup, node: ClusterNode) -> float:
    """Bytes/s at which a rank of the group sends, while all other groups of its kind do the same."""
    if group.nodes == 1:
        return node.link * REACH
    share = node.network * group.local / node.ranks  # as many groups leave a machine as it has of their first ranks
    return min(node.link, share) * REACH


def seconds(collective: Collective, num_bytes: float, group: RankGroup, node: ClusterNode) -> float:
    """The time of one collective over ``num_bytes``: of what is gathered, scattered, reduced or sent, as a whole."""
    if group.size == 1:
        return 0.0
    if collective == "send/recv":
        across = group.nodes > 1
        beside = node.network / node.ranks if across else node.link
        return num_bytes / (min(beside, node.link) * REACH) + (NETWORK_HOP_S if across else HOP_S)
    rounds = 2 if collective == "all-reduce" else 1
    between = group.nodes if group.nodes > 1 else 0
    hops_s = between * NETWORK_HOP_S + (group.size - between) * HOP_S
    return rounds * (num_bytes * (group.size - 1) / group.size / rate(group, node) + hops_s)
