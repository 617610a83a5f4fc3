"""Times of collectives over the links of a machine and between machines; which ranks share a machine."""

from __future__ import annotations

import pytest

from trainwright.errors import RecipeError
from trainwright.plan.devices import (
    HOP_LATENCY_S,
    LINK_EFFICIENCY,
    NETWORK_HOP_LATENCY_S,
    ClusterNode,
    RankGroup,
    group_of,
    known_devices,
    parse_devices,
    seconds,
)
from trainwright.plan.parallel import Degrees

DGX = ClusterNode(8, link=450e9, network=400e9)
GB = 10**9


@pytest.mark.parametrize(
    ("axis", "group"),
    [
        ("tensor", RankGroup(4, 4)),
        ("shard", RankGroup(16, 2)),  # a machine has two of its ranks, beside four of each tensor group
        ("replicate", RankGroup(2, 1)),  # 64 ranks apart
        ("pipeline", RankGroup(1, 1)),
    ],
)
def test_ranks_that_share_a_machine(axis: str, group: RankGroup) -> None:
    assert group_of(Degrees(replicate=2, shard=16, tensor=4), axis, DGX) == group


def test_a_ring_within_a_machine_and_between_machines() -> None:
    inside, outside = RankGroup(8, 8), RankGroup(16, 8)
    assert seconds("all-gather", GB, inside, DGX) == pytest.approx(
        GB * 7 / 8 / (450e9 * LINK_EFFICIENCY) + 8 * HOP_LATENCY_S
    )
    assert seconds("all-reduce", GB, inside, DGX) == pytest.approx(2 * seconds("reduce-scatter", GB, inside, DGX))
    hops_s = 2 * NETWORK_HOP_LATENCY_S + 14 * HOP_LATENCY_S
    assert seconds("all-gather", GB, outside, DGX) == pytest.approx(GB * 15 / 16 / (400e9 * LINK_EFFICIENCY) + hops_s)
    # eight such groups leave a machine at the same time, one rank each: an eighth of its network for each
    alone = RankGroup(2, 1)
    assert seconds("all-gather", GB, alone, DGX) == pytest.approx(
        GB / 2 / (50e9 * LINK_EFFICIENCY) + 2 * NETWORK_HOP_LATENCY_S
    )
    assert seconds("all-reduce", GB, RankGroup(1, 1), DGX) == 0.0


def test_every_device_of_the_table_lies_in_a_machine() -> None:
    nodes = {name: device.node for name, device in known_devices().items()}
    assert all(node.ranks >= 4 and node.link > node.network / node.ranks for node in nodes.values())
    assert nodes["h100-80gb"] == DGX


def test_a_machine_of_ones_own_is_checked() -> None:
    row = "mine: {{memory: 8GiB, bandwidth: 1e11, flops: {{fp32: 1e13}}, node: {node}}}"
    good = parse_devices(row.format(node="{ranks: 2, link: 1e9, network: 1e8}"), "mine.yaml")
    assert good["mine"].node == ClusterNode(2, 1e9, 1e8)
    for node in ("{ranks: 2}", "fast", "{ranks: 2, link: -1, network: 1e8}"):
        with pytest.raises(RecipeError, match=r"mine\.node"):
            parse_devices(row.format(node=node), "mine.yaml")
