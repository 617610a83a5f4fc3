"""Reads the collectives of this process from torch's flight recorder (``TORCH_FR_BUFFER_SIZE``), of NCCL and gloo.

It reads the JSON form; the files that torch dumps are pickles. The format is private to torch:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html. NCCL was not tested on a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch
from torch import distributed

from trainwright.doctor.facts.ranks import CollectiveFacts

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def recorded() -> tuple[CollectiveFacts, ...]:
    """Returns the last completed collective of each group, and the first and the last one after it, in order of time.

    Returns () if the flight recorder is off.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    with suppress(RuntimeError, ValueError, LookupError, TypeError):
        groups = distributed.distributed_c10d._world.pg_names  # torch has no public list of its groups
        ranks = {str(name): distributed.get_process_group_ranks(group) for group, name in groups.items()}
        return read_entries([entry for dump in dumps for entry in json.loads(dump()).get("entries", [])], ranks)
    return ()


def read_entries(entries: list[dict[str, Any]], ranks: Mapping[str, list[int]]) -> tuple[CollectiveFacts, ...]:
    """Returns the result of ``recorded`` for the entries of the dumps. ``ranks``: members of each group, by name."""
    done: dict[tuple[str, bool], tuple[int, CollectiveFacts]] = {}
    pending: dict[tuple[str, bool], list[tuple[int, CollectiveFacts]]] = {}
    for place, entry in enumerate(sorted(entries, key=lambda entry: entry["time_created_ns"])):
        backend, _, operation = entry["profiling_name"].rpartition(":")
        name, description = entry["process_group"]
        members = ranks.get(name, [])
        group = f"{backend} group {name} ({description}, {len(members)} ranks from {min(members, default=0)})"
        is_done = bool(entry["retired"]) or entry["state"] == "completed"
        number = 0 if entry["is_p2p"] else int(entry["collective_seq_id"])
        tensors = [f"{dtype} {sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"])]
        what = " of ".join(filter(None, (operation, ", ".join(tensors[:4]))))
        one = CollectiveFacts(group=group, number=number, what=what, is_done=is_done)
        key = group, number > 0
        if is_done:
            done[key], pending[key] = (place, one), []  # gloo sometimes does not mark a collective as completed
        else:
            pending.setdefault(key, []).append((place, one))
    ends = [each for waits in pending.values() for each in (*waits[:1], *waits[-1:])]
    return tuple(dict(sorted((*done.values(), *ends), key=itemgetter(0))).values())
