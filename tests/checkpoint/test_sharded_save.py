"""Ranks that divide a state write their parts; a kill at any call of a save loses no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = [pytest.mark.process, pytest.mark.slow]

RANKS = """
import json, os, signal, sys, tempfile, threading
from pathlib import Path
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainwright.checkpoint.checkpoint import load_checkpoint
from trainwright.checkpoint.contents import require_whole
from trainwright.checkpoint.sharded import ShardedSave
from trainwright.checkpoint.shards import locals_of
from trainwright.checkpoint.store import newest_valid
from trainwright.checkpoint.stored import StoredTensor
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.staging import on_host
from trainwright.distributed.group import Ranks
from dataclasses import replace

torch.set_num_threads(1)
folder = Path(sys.argv[1])

def state_at(value, ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 40), nn.Linear(40, 3))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), step=value)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    state.optimizer.step()
    with torch.no_grad():
        for each in (*model.parameters(), *(own["exp_avg"] for own in state.optimizer.state.values())):
            each.fill_(value)
    return state

def save(state, shards):
    part = shards.capture(state, folder, "", {}, lambda: None)
    return shards.write(replace(part, tensors=on_host(part.tensors)), folder)

def run(count, work):
    \"\"\"Runs ``work(rank)`` in forked ranks of a new group; returns their exit codes.\"\"\"
    store = tempfile.mktemp()
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if count > 1:
                    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
                work(rank)
                code = 0
            except Exception as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

def loads_as(value, ranks):
    def work(rank):
        state, path = state_at(-1, ranks), newest_valid(folder, require_whole)[0]
        read, original = [], StoredTensor.read
        StoredTensor.read = lambda self, box: read.append(original(self, box)) or read[-1]
        load_checkpoint(state, path, verified=True)
        held = [*state.model.parameters(), *(own["exp_avg"] for own in state.optimizer.state.values())]
        assert state.step == value, state.step
        assert all(bool((each == value).all()) for each in locals_of(held)), held
        if ranks > 1:
            moments = (each for own in state.optimizer.state.values() for each in own.values())
            kept = sum(each.numel() for each in locals_of([*moments, *state.model.parameters()]))
            assert sum(each.numel() for each in read if each.dim() and each.shape[0] < 600) <= kept + 8, "reads more"
    return run(ranks, work)
"""

LAYOUTS = (
    RANKS
    + """
def work(rank):
    save(state_at(5, 4), ShardedSave(Ranks(), has_values=rank == 0))
assert run(4, work) == [0] * 4
path = folder / "step-00000005"
sizes = [(path / f"rest-{rank:05d}.safetensors").stat().st_size for rank in range(4)]
for ranks in (1, 3, 8):
    assert loads_as(5, ranks) == [0] * ranks, ranks
print(json.dumps({"files": sorted(each.name for each in path.iterdir()), "sizes": sizes}))
"""
)

KILLED = (
    RANKS
    + """
victim = int(sys.argv[2])
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}

def work_until(limit):
    def work(rank):
        shards = ShardedSave(Ranks(), has_values=rank == 0)
        count = [0]
        def called(name, *arguments):
            is_here = any(str(folder) in str(each) for each in arguments if isinstance(each, str | Path))
            if name == "os.fsync" or (name in CALLS and is_here):
                count[0] += 1
                if count[0] == limit:
                    os.kill(os.getpid(), signal.SIGKILL)
        state = state_at(step, 2)
        if rank == victim:
            sys.addaudithook(lambda name, arguments: called(name, *arguments))
            fsync = os.fsync
            os.fsync = lambda fd: (called("os.fsync"), fsync(fd))[1]
        save(state, shards)
    return work

step = 1
assert run(2, work_until(-1)) == [0, 0]
limit, good = 0, step
while True:
    limit, step = limit + 1, step + 1
    codes = run(2, work_until(limit))
    path, broken = newest_valid(folder, require_whole)
    newest = int(path.name[5:])
    assert newest in (good, step) and not broken, (newest, good, step, broken)
    loaded = state_at(-1, 1)
    load_checkpoint(loaded, path, verified=True)
    held = [*loaded.model.parameters(), *(own["exp_avg"] for own in loaded.optimizer.state.values())]
    assert loaded.step == newest and all(bool((each == newest).all()) for each in held)
    good = newest
    if codes[victim] == 0:
        break
    assert codes[victim] == -signal.SIGKILL, codes
assert good == step  # the last save, without a kill
print(json.dumps({"kills": limit - 1}))
"""
)


def printed(code: str, *arguments: str) -> dict[str, Any]:
    done = forked.run(code, *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_four_ranks_write_their_parts_and_any_number_reads_its_own(tmp_path: Path) -> None:
    """40 rows among 4 ranks, and 3 rows, of which one rank has none; each rank reads no more than it keeps."""
    found = printed(LAYOUTS, str(tmp_path))
    assert {f"{part}-{rank:05d}.safetensors" for part in ("model", "rest") for rank in range(3)} <= set(found["files"])
    assert max(found["sizes"][1:]) < 3 * min(found["sizes"])


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_any_call_of_a_save_the_newest_checkpoint_loads(tmp_path: Path, victim: int) -> None:
    found = printed(KILLED, str(tmp_path), str(victim))
    assert found["kills"] > (15 if victim == 0 else 5)
