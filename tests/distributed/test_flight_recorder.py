"""The collectives that torch's flight recorder has of a process, on gloo and in a dump of NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from trainwright.doctor.measure.ranks.flight_recorder import read_entries, recorded

STALL = """
import json, os, sys, threading, time
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch
from torch import distributed
from trainwright.doctor.measure.ranks.flight_recorder import recorded

empty = b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
torch._C._distributed_c10d._dump_nccl_trace_json = lambda: empty  # as a torch with NCCL writes it in a job of gloo
distributed.init_process_group("gloo")
rank, pair = distributed.get_rank(), distributed.new_group([0, 1])
for _ in range(3):
    distributed.all_reduce(torch.ones(3))
distributed.all_reduce(torch.ones(4), group=pair)
calls = [lambda: distributed.all_reduce(torch.ones(5)), lambda: distributed.broadcast(torch.ones(2, 3), 0)]
threading.Thread(target=calls[rank], daemon=True).start()
store = distributed.distributed_c10d._get_default_store()
while not any(each.number == 4 for each in recorded()):
    time.sleep(0.01)
print(json.dumps([[x.group, x.number, x.what, x.is_done] for x in recorded()]), flush=True)
if rank == 0:  # its process has the store, so it ends last
    store.set("read 0", "")
    store.wait(["read 1"])
else:
    store.wait(["read 0"])
    store.set("read 1", "")
os._exit(0)
"""


@pytest.mark.process
def test_two_ranks_of_gloo_that_call_different_collectives(tmp_path: Path) -> None:
    default, pair = "gloo group 0 (default_pg, 2 ranks from 0)", "gloo group 1 (undefined, 2 ranks from 0)"
    found = ranks.reports(STALL, 2, cwd=tmp_path)
    assert all([pair, 1, "all_reduce of Float [4]", True] in each for each in found)
    calls = ["all_reduce of Float [5]", "broadcast of Float [2, 3]"]
    assert [each[-1] for each in found] == [[default, 4, call, False] for call in calls]


def entry(number: int, name: str, state: str, **more: Any) -> dict[str, Any]:
    """One entry of version 2.10, as torch writes it: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp."""
    return {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1_724_779_239_936_775_119 + number,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": False,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def test_a_process_that_is_ahead_of_the_device() -> None:
    """NCCL has completed the seventh of ten that were enqueued. It has not been noted that the second has completed."""
    entries = [
        entry(10, "nccl:_all_gather_base", "scheduled"),
        entry(9, "nccl:barrier", "scheduled"),
        entry(2, "nccl:broadcast", "started"),
        entry(6, "nccl:all_reduce", "completed", retired=True),
        entry(7, "nccl:all_reduce", "completed"),
        entry(8, "nccl:_reduce_scatter_base", "started", input_sizes=[[12]], input_dtypes=["BFloat16"]),
        entry(1, "nccl:send 0->1", "scheduled", is_p2p=True, process_group=["2", "mesh_pipeline"]),
        entry(3, "nccl:coalesced", "scheduled", process_group=["3", "undefined"], input_sizes=[], input_dtypes=[]),
    ]
    default, stages = "nccl group 0 (default_pg, 8 ranks from 0)", "nccl group 2 (mesh_pipeline, 2 ranks from 4)"
    found = read_entries(json.loads(json.dumps(entries)), {"0": [*range(8)], "2": [4, 5]})
    assert [(each.group, each.number, each.what, each.is_done) for each in found] == [
        (stages, 0, "send 0->1 of Float [3, 4]", False),
        ("nccl group 3 (undefined, 0 ranks from 0)", 3, "coalesced", False),
        (default, 7, "all_reduce of Float [3, 4]", True),
        (default, 8, "_reduce_scatter_base of BFloat16 [12]", False),
        (default, 10, "_all_gather_base of Float [3, 4]", False),
    ]


def test_a_process_without_ranks() -> None:
    assert recorded() == ()
