"""Environment variables of ranks, complete and incomplete."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.forked import Forked
from trainwright.distributed import ALONE, Launch, joined
from trainwright.errors import RankError, UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "4711",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_torchrun_says_who_this_process_is() -> None:
    launch = Launch.read(TORCHRUN)
    again = Launch.read({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert launch == Launch(5, 8, 1, 2, "4711", "node1", 29500, agent_has_store=True, call=launch.call)
    assert again.job.endswith(f":{os.getppid()}") and again.call == launch.call + 1


def test_one_process_is_alone_whoever_started_it() -> None:
    assert Launch.read({}) == Launch.read({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0"}) == ALONE
    assert Launch.read({"WORLD_SIZE": "4", "SLURM_PROCID": "1"}) == ALONE  # a task of Slurm, not of torchrun
    with joined(ALONE, 1.0) as world:
        assert (world.rank, world.size) == (0, 1)


def test_a_launch_of_one_rank_is_known_again() -> None:
    alone = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    launch = Launch.read(alone)
    assert (launch.size, launch.job, launch.attempt) == (1, "4711", 2)
    assert Launch.read({name: value for name, value in alone.items() if name != "TORCHELASTIC_RUN_ID"}) == ALONE


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_missing_is_named(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UsageError, match=name) as caught:
        Launch.read(environ)
    assert "--nproc-per-node" in caught.value.remedy


@pytest.mark.slow
def test_ranks_that_do_not_come_are_waited_for_in_time() -> None:
    launch = Launch(1, 2, 1, address="127.0.0.1", port=1)
    with pytest.raises(RankError, match="rank 1 could not connect to the other 1"), joined(launch, 0.5):
        pass


@pytest.mark.process
@pytest.mark.slow
def test_a_node_that_comes_back_meets_the_others(tmp_path: Path) -> None:
    """The agent of a new torchrun counts its starts from zero, those of the others have gone on."""
    code = (
        "import os; from trainwright.distributed import Launch, joined\n"
        "with joined(Launch.read(os.environ), 20.0) as world:\n    print(world.least(world.rank), world.size)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": str(1 - int(rank))} for rank in "01"]
    started = [Forked(code, cwd=tmp_path, env={**shared, **rank}) for rank in ranks]
    assert [(each.wait(60), each.stdout.strip()) for each in started] == [(0, "0 2")] * 2, started[0].stderr


@pytest.mark.process
def test_a_group_without_a_backend_for_the_cpu_is_an_error(tmp_path: Path) -> None:
    """As that of Ray Train on GPUs, which by default has NCCL only."""
    code = (
        "from torch import distributed\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "from trainwright.distributed import ALONE, joined\n"
        "distributed.init_process_group('cuda:fake', store=FakeStore(), rank=0, world_size=2)\n"
        "with joined(ALONE, 1.0):\n    print('joined')"
    )
    started = Forked(code, cwd=tmp_path)
    assert started.wait(60) == 1 and "no backend for tensors of the CPU: cuda:fake" in started.stderr


@pytest.mark.process
@pytest.mark.parametrize("lost", [0, 1], ids=["host of the store", "other"])
def test_a_rank_that_hangs_after_another_was_lost_ends(tmp_path: Path, lost: int) -> None:
    """gloo sometimes misses a connection that is reset in the middle of a message."""
    code = (
        "import os, time\n"
        "from trainwright.distributed import Launch, group, join\n"
        "join.HUNG_AFTER_S = 0.5\n"
        "with join.joined(Launch.read(os.environ), 60.0) as world:\n"
        "    world.least(0)\n"
        f"    if world.rank == {lost}:\n        raise ValueError('a fault')\n"
        "    with group.raising_rank_error('wait'):\n        time.sleep(60)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [Forked(code, cwd=tmp_path, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [each.wait(40) for each in started] == [1, 1]
    assert "waits for another rank, which has ended or lost the connection" in started[1 - lost].stderr


@pytest.mark.process
def test_a_wrapper_that_restarts_in_the_process_may_end_the_group(tmp_path: Path) -> None:
    """As that of nvidia-resiliency-ext after a rank was lost. Then the same process joins the remaining ranks."""
    code = (
        "import os\n"
        "from torch import distributed\n"
        "from trainwright.distributed import Launch, joined\n"
        "try:\n"
        "    with joined(Launch.read(os.environ), 20.0):\n"
        "        distributed.destroy_process_group()\n"
        "        raise ValueError('a fault')\n"
        "except ValueError as error:\n    print(error)\n"
        "with joined(Launch.read(os.environ), 20.0) as world:\n    print(world.least(world.rank), world.size)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [Forked(code, cwd=tmp_path, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [(each.wait(60), each.stdout.split("\n")[:2]) for each in started] == [(0, ["a fault", "0 2"])] * 2
