"""Programs of two real ranks under the watch: faults are named with their rank, and nothing of a healthy run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zoo.ranks_apart  # noqa: F401  registers the programs
from benchmarks.pairs import Spinning, free_port
from tests.forked import Forked
from zoo.ranks_host import RANK_ENTRIES, score

pytestmark = [pytest.mark.process, pytest.mark.slow]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "100"}
PROGRAM = "import json, sys; from zoo import ranks_host; ranks_host.main(json.loads(sys.argv[1]))"


def told(folder: Path, names: list[str], **more: Any) -> list[list[dict[str, Any]]]:
    """What both ranks print of each program, of two processes that run them all."""
    ask = {"names": names, "seeds": [0], "folder": str(folder), "port": free_port(), **more}
    ranks = [Forked(PROGRAM, json.dumps({**ask, "rank": rank}), env=ENVIRONMENT) for rank in (0, 1)]
    for rank in ranks:
        assert rank.wait(240) == 0, rank.stderr[-2000:]
    return [list(pair) for pair in zip(*([json.loads(line) for line in r.stdout.splitlines()] for r in ranks))]


def test_faults_of_ranks_are_named(tmp_path: Path) -> None:
    names = ["X01", "X06", "X14", "X15", "X09", "X10", "Y01", "Y02", "Y07", "Y13", "HX1", "HX9", "HY4", "HY5"]
    scores = {pair[0]["id"]: score(pair) for pair in told(tmp_path, names, limit_s=4.0)}
    assert [each["failures"] for each in scores.values()] == [[]] * len(names)
    for name in names:
        if RANK_ENTRIES[name].labels:
            assert scores[name]["place"] == 0 and scores[name]["guilty"] in (None, True), scores[name]
        else:
            assert scores[name]["alarms"] == [[], []], scores[name]


def test_a_rank_that_hangs_leaves_its_stack(tmp_path: Path) -> None:
    """The first rank says so while it stands, and at the end."""
    [[first, second]] = told(tmp_path, ["X18"])
    assert [[f[0], f[4]] for f in first["found"] if f[1] != "info"] == [["ranks.stalled", 1]]
    assert "one_rank_hangs" in (tmp_path / "X18-0-1/stack-rank-1.txt").read_text()
    log = [json.loads(line) for line in (tmp_path / "X18-0-0/log.jsonl").read_text().splitlines()]
    severities = [each["severity"] for each in log if each["kind"] == "found" and each["code"] == "ranks.stalled"]
    assert severities == ["warning", "critical"] and second["error"]
    statuses = [one for each in log if each.get("experiment") == "ranks" for one in each["values"]["statuses"]]
    started = {one["recorded"][-1]["what"] for one in statuses if one["stalled"]}
    assert started == {"all_reduce of Float [1002]"}, "the gradients, in one bucket of DistributedDataParallel"
    evidence = [one for each in log if each["kind"] == "found" for one in each["evidence"]]
    [differ, *_] = [one["seen"] for one in evidence if one["measure"] == "collective in which the ranks differ"]
    assert (differ["rank 0"], differ["rank 1"]) == ("all_reduce of Float [1002]", "not begun")


def test_watched_ranks_reach_their_end_on_a_busy_machine(tmp_path: Path) -> None:
    """With the bits of the same run alone, while two other processes spin."""
    with Spinning(2):
        pairs = told(tmp_path, ["HX4", "X15"], compare=True)
    assert len(pairs) == 2
    for each in (one for pair in pairs for one in pair):
        assert (each["error"], each["failures"], each["bits"]) == ("", [], each["bits_alone"])
