"""Reads the collectives of this process from torch's flight recorder (``TORCH_FR_BUFFER_SIZE``), of NCCL and gloo.

It reads the JSON form; the files that torch dumps are pickles. The format is private to torch:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html. NCCL was not tested on a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import distributed

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


class Recorded(NamedTuple):
    """A collective that this process has begun.

    ``number`` counts those of ``group``, equally on all of its ranks; 0: a message between two ranks. ``what`` is its
    name with dtypes and shapes, such as "all_reduce of Float [3]".
    """

    group: str
    number: int
    what: str
    is_done: bool


def recorded() -> list[Recorded]:
    """Return the last completed collective of each group, and the first and the last one after it, in order of time.

    Returns [] if the flight recorder is off.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    with suppress(RuntimeError, ValueError, LookupError, TypeError):
        groups = distributed.distributed_c10d._world.pg_names  # torch has no public list of its groups
        ranks = {str(name): distributed.get_process_group_ranks(group) for group, name in groups.items()}
        return read_entries([entry for dump in dumps for entry in json.loads(dump())["entries"]], ranks)
    return []


def read_entries(entries: list[dict[str, Any]], ranks: Mapping[str, list[int]]) -> list[Recorded]:
    """Return what ``recorded`` returns; ``ranks`` are those of each group by its name."""
    done: dict[str, tuple[int, Recorded]] = {}
    pending: dict[str, list[tuple[int, Recorded]]] = {}
    for place, entry in enumerate(sorted(entries, key=lambda entry: entry["time_created_ns"])):
        backend, _, operation = entry["profiling_name"].rpartition(":")
        name, description = entry["process_group"]
        members = ranks.get(name, [])
        group = f"{backend} group {name} ({description}, {len(members)} ranks from {min(members, default=0)})"
        is_done = bool(entry["retired"]) or entry["state"] == "completed"
        number = 0 if entry["is_p2p"] else int(entry["collective_seq_id"])
        tensors = [f"{dtype} {sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"])]
        one = Recorded(group, number, " of ".join(filter(None, (operation, ", ".join(tensors[:4])))), is_done)
        if is_done:
            done[group], pending[group] = (place, one), []  # gloo sometimes does not note that one has completed
        else:
            pending.setdefault(group, []).append((place, one))
    ends = [each for waits in pending.values() for each in (*waits[:1], *waits[-1:])]
    return [one for _, one in sorted({*done.values(), *ends})]
