"""What the environment says of the ranks, and what it means when it says too little."""

from __future__ import annotations

import os

import pytest

from trainwright.errors import RankError, UsageError
from trainwright.world import ALONE, Launch, joined

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


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_missing_is_named(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UsageError, match=name) as caught:
        Launch.read(environ)
    assert "--nproc-per-node" in caught.value.remedy


@pytest.mark.slow
def test_ranks_that_do_not_come_are_waited_for_in_time() -> None:
    launch = Launch(1, 2, 1, address="127.0.0.1", port=1)
    with pytest.raises(RankError, match="rank 1 could not meet the other 1"), joined(launch, 0.5):
        pass
