"""Files that can only be read from the beginning, on several ranks: each opens its part, and the run is that of one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.training.ranked import compare

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, signal, sys
import torch
import trainwright as tw
from torch import nn

given = json.loads(sys.argv[1])
rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
opened = []

def read(path):
    opened.append(path)
    rows, number = [], int(path)
    for index in range(5 + 2 * number % 7):
        rows.append(torch.full((4,), 10.0 * number + index) / 100)
        if len(rows) == 3:
            yield rows.pop(int(torch.randint(3, ())))
    yield from rows

class Mark:  # of the first rank
    def observe(self, result, state):
        if result.step == given.get("kill"):
            open(f"kill-{count}", "w").close()

    def close(self):
        pass

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def loss(model, batch):
    if rank == count - 1 and os.path.exists(f"kill-{count}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return tw.Loss((model(batch) - 1).square().sum(), float(len(batch)))

data = tw.files([str(number) for number in range(8)], read, sizes=[5 + 2 * number % 7 for number in range(8)])
tw.fit(model, data, loss, until="18steps", batch=8, lr=1e-2, quiet=True, resume=given.get("resume"),
       observers=[Mark()], settings={"log.every": "1steps", "schedule.use": "constant", "precision": "fp32",
       "checkpoint.every": "2steps", "checkpoint.at_least_every": None, "log.doctor": False, "batch.micro": 2})
print(json.dumps(opened))
"""


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records of steps; of one that was taken again, the last."""
    log = map(json.loads, next(folder.glob("runs/*/log.jsonl")).read_text().splitlines())
    return [*{record["step"]: record for record in log if record["kind"] == "step"}.values()]


def test_one_two_and_four_ranks_go_on_after_a_kill_and_train_each_sample_once(tmp_path: Path) -> None:
    """Killed in the middle of an epoch of 8 steps with one rank, and with two; four go on to the end."""
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    for folder in (whole, changing):
        folder.mkdir()
    assert ranks.run(FIT, 1, "{}", cwd=whole)[0].returncode == 0
    for count, given in ((1, {"kill": 5}), (2, {"kill": 11, "resume": "runs/run"})):
        done = ranks.run(FIT, count, json.dumps(given), cwd=changing)
        assert done[-1].returncode == -signal.SIGKILL and all(each.returncode for each in done), done[0].stderr
    done = ranks.finish(FIT, 4, json.dumps({"resume": "runs/run"}), cwd=changing)
    compare(steps(changing), steps(whole))
    assert len({record["ids_hash"] for record in steps(whole)}) == 18
    opened = [json.loads(each.stdout.splitlines()[-1]) for each in done]
    assert all(len({*each}) < 8 for each in opened[1:])
