"""Memory and speed of devices, from a table of public figures that users can extend with their own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from trainwright.errors import Problem, RecipeError, UsageError, suggest
from trainwright.plan.parallel import AXES, Degrees
from trainwright.recipe.formatting import parse_bytes
from trainwright.recipe.yaml_core import UnreadableError, read

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
    network = node.network * group.local / node.ranks  # (node.ranks / group.local) groups network a machine's network
    return min(node.link, network) * LINK_EFFICIENCY


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


PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8")
CUDA_CONTEXT_BYTES = 600 << 20
"""Memory of a CUDA process before its first tensor: context, kernels, cuBLAS workspace. Grows with the libraries."""
FRAGMENTATION_FRACTION = 0.05
"""The fraction of memory left free for blocks that the caching allocator cannot use."""


@dataclass(frozen=True)
class Device:
    """One device: ``flops`` per second by precision; ``bandwidth`` and ``host_link`` in bytes/s (0: there is no link).

    ``host_bandwidth`` is the rate in bytes/s at which an update on the host reads and writes; ``host_memory_bytes`` is
    the free host memory, 0 if unknown. ``reach_flops`` and ``reach_bandwidth`` are the fractions of these figures that
    good kernels reach. ``launch_s`` is the host's time to launch one operator, the minimum that an operator takes.
    ``node`` is the machine that contains the device. ``price`` is in US dollars per hour, None if unknown; ``priced``
    names the provider and the date of the price.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    host_link: float = 0.0
    source: str = ""
    reach_flops: float = 0.7
    reach_bandwidth: float = 0.8
    launch_s: float = 8e-6
    host_bandwidth: float = 40e9
    host_memory_bytes: int = 0
    node: ClusterNode = SINGLE_DEVICE_NODE
    price: float | None = None
    priced: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory for tensors: total memory without the CUDA context and a margin for fragmentation."""
        context = CUDA_CONTEXT_BYTES if self.kind == "cuda" else 0
        return max(0, int(self.memory_bytes * (1 - FRAGMENTATION_FRACTION)) - context)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that the device computes in hardware."""
        return tuple(name for name in PRECISIONS if name in self.flops)

    def of_ranks(self, count: int) -> Device:
        """Return one rank's part of a CPU that ``count`` processes share."""
        node = ClusterNode(max(self.node.ranks, count), self.node.link, self.node.network)
        return replace(self, memory_bytes=self.memory_bytes // count, node=node)

    def with_memory(self, memory_bytes: int) -> Device:
        """Return the same device with ``memory_bytes`` of memory."""
        return replace(self, memory_bytes=memory_bytes)


def find_device(name: str, table: Mapping[str, Device]) -> Device:
    """Return the device with this name; case, blanks, hyphens and underscores do not matter.

    Raises UsageError if unknown.
    """
    by_letters = {_letters(known): device for known, device in table.items()}
    if (found := table.get(name) or by_letters.get(_letters(name))) is None:
        key = name.strip().lower().replace("_", "-").replace(" ", "-")
        raise UsageError(f"no device {name!r} is known", remedy=f"{suggest(key, table)}; or give --devices FILE")
    return found


def _letters(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())


@cache
def known_devices() -> Mapping[str, Device]:
    """Return Trainwright's built-in table, by name."""
    text = files("trainwright.plan").joinpath("devices.yaml").read_text(encoding="utf-8")
    return parse_devices(text, "devices.yaml")


def load_devices(path: Path) -> Mapping[str, Device]:
    """Return the built-in table, updated by a file. Raises RecipeError with every problem in the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the devices in {path} cannot be read: {error}", remedy="give a YAML file") from None
    return {**known_devices(), **parse_devices(text, str(path))}


def parse_devices(text: str, name: str) -> Mapping[str, Device]:
    """Read a table from YAML; ``name`` is the file name for messages. Raises RecipeError with every problem at once."""
    try:
        document = read(text, name)
    except UnreadableError as error:
        raise RecipeError(error.problem) from None
    problems = list(document.problems)
    rows = document.value
    if not isinstance(rows, dict) or not rows:
        raise RecipeError(Problem("", "must map names of devices to their figures", where=name))
    devices = {str(key).lower(): _device(str(key).lower(), row, name, problems) for key, row in rows.items()}
    if problems:
        raise RecipeError(problems)
    return {key: device for key, device in devices.items() if device is not None}


_RATES = ("bandwidth", "host_link", "reach_flops", "reach_bandwidth", "launch_s", "host_bandwidth")
_OPTIONAL = ("source", "kind", "node", "price", "priced", *_RATES[1:])
_REQUIRED = ("memory", "bandwidth", "flops")


def _device(name: str, figures: object, where: str, problems: list[Problem]) -> Device | None:
    """Return the device of a row, or None after appending to ``problems``."""
    before = len(problems)
    row: dict[str, Any] = figures if isinstance(figures, dict) else {}

    def wrong(key: str, rule: str, remedy: str) -> None:
        problems.append(Problem(f"{name}.{key}", rule, got=repr(row.get(key)), remedy=remedy, where=where))

    for key in row:
        if key not in (*_REQUIRED, *_OPTIONAL):
            wrong(key, "is no figure of a device", suggest(str(key), (*_REQUIRED, *_OPTIONAL)))
    for key in {"bandwidth", *(key for key in (*_RATES, "price") if key in row)}:
        if not _positive(row.get(key)):
            example = "price: 1.79, in US dollars an hour" if key == "price" else "bandwidth: 2e12, in bytes/s"
            wrong(key, "must be a number above 0", f"write for example {example}")
    flops = row.get("flops")
    flops = flops if isinstance(flops, dict) else {}
    if not {"fp32"} <= set(flops) <= set(PRECISIONS) or not all(map(_positive, flops.values())):
        rule = f"must give FLOP/s by precision ({', '.join(PRECISIONS)}), fp32 at least"
        wrong("flops", rule, "flops: {fp32: 20e12}")
    if row.get("kind", "cuda") not in ("cpu", "cuda"):
        wrong("kind", "must be cpu or cuda", "leave it out for cuda")
    try:
        memory = parse_bytes(str(row.get("memory", "")))
    except UsageError as error:
        wrong("memory", "must be a size", error.remedy)
    node = _node(row["node"], wrong) if "node" in row else SINGLE_DEVICE_NODE
    if len(problems) > before:
        return None
    rates: dict[str, Any] = {key: float(row[key]) for key in _RATES if key in row}
    return Device(
        name,
        kind=row.get("kind", "cuda"),
        memory_bytes=memory,
        flops={key: float(value) for key, value in flops.items()},
        source=str(row.get("source", where)),
        node=node,
        price=float(row["price"]) if "price" in row else None,
        priced=str(row.get("priced", where)) if "price" in row else "",
        **rates,
    )


def _node(figures: object, wrong: Callable[[str, str, str], None]) -> ClusterNode:
    """Return the machine of a row, or the default machine after calling ``wrong``."""
    row: dict[str, Any] = figures if isinstance(figures, dict) else {}
    if set(row) == {"ranks", "link", "network"} and all(map(_positive, row.values())) and row["ranks"] % 1 == 0:
        return ClusterNode(int(row["ranks"]), float(row["link"]), float(row["network"]))
    rule = "must give the number of devices in a machine, and bytes/s of a link in it and of its network"
    wrong("node", rule, "write node: {ranks: 8, link: 450e9, network: 400e9}")
    return SINGLE_DEVICE_NODE


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
