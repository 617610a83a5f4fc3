"""Gradients that are summed during the last backward pass are those that are summed after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import trainwright as tw
from trainwright.engine import overlap
from trainwright.engine.overlap import OverlappedSum

rank = int(os.environ["RANK"])
overlap.MIN_BUCKET_BYTES = 256  # several buckets
draw = torch.Generator().manual_seed(0)
x, y = torch.randn(37, 12, generator=draw), torch.randint(5, (37,), generator=draw)
sent, again = [], []
send, settle, make = OverlappedSum._send, OverlappedSum.settle, OverlappedSum.__init__

def counted(self, *arguments):
    sent.append(torch._C._current_graph_task_id() != -1)  # True: in a backward pass
    send(self, *arguments)

def settled(self):
    again.append(not settle(self))
    return not again[-1]

OverlappedSum._send, OverlappedSum.settle = counted, settled

class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case, self.calls = case, 0
        self.inner, self.middle, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.rare, self.never = nn.Linear(16, 16), nn.Linear(3, 3)

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        h = self.inner(x)
        if self.case == "twice":  # each call accumulates the gradient of the same weights
            h = checkpoint(self.middle, h, use_reentrant=True)
            h = checkpoint(self.middle, h, use_reentrant=True)
        else:
            h = self.middle(h).relu()
        chosen = x[:, :1] > 1.2
        if chosen.any():  # on some ranks only
            h = h + chosen * self.rare(h)
        if self.case in ("forward", "backward") and self.calls == 4 and rank == 1:
            if self.case == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            h.register_hook(self.fail)
        return self.head(h)

    def fail(self, grad):
        raise torch.OutOfMemoryError("CUDA out of memory")

for case in json.loads(sys.argv[1]):
    seen = {}
    for overlapped in (True, False):
        def init(self, world):
            make(self, world)
            self.is_enabled = overlapped
        OverlappedSum.__init__ = init
        sent.clear(), again.clear()
        torch.manual_seed(3)
        model = Net(case)
        result = tw.fit(model, (x, y), nn.CrossEntropyLoss(), until="5steps", lr=1e-2, precision="fp32", quiet=True,
                        settings={"batch.size": 12, "batch.micro": 2 if case != "whole" else 6, "log.doctor": False})
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        seen[overlapped] = weights
        if overlapped:
            print(json.dumps({"case": case, "early": sum(sent), "sent": len(sent), "again": sum(again),
                              "steps": result.step, "weights": weights.double().tolist()}))
    assert (seen[True] == seen[False]).all() or case in ("forward", "backward"), case
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-5, atol=1e-6)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the results of both ranks for each case."""
    cases = ["whole", "micro", "twice", "forward", "backward"]
    done = ranks.finish(FIT, 2, json.dumps(cases), cwd=Path(tmp_path_factory.mktemp("overlap")), timeout=400)
    said = [[json.loads(line) for line in each.stdout.splitlines() if line.startswith("{")] for each in done]
    return {case: [own[number] for own in said] for number, case in enumerate(cases)}


@pytest.mark.parametrize("case", ["whole", "micro"])
def test_sums_begin_in_the_backward_pass_and_have_the_same_bits(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    """37 samples in batches of 12: the fourth step has one sample, so a rank has none and sends zeros."""
    for each in seen[case]:
        assert each["early"] >= each["sent"] // 3 and each["again"] == 0 and each["steps"] == 5
    assert seen[case][0]["weights"] == seen[case][1]["weights"]


def test_a_gradient_that_changes_after_it_was_sent_is_summed_again(seen: dict[str, list[dict[str, Any]]]) -> None:
    for each in seen["twice"]:
        assert each["again"] == 1  # then no step overlaps
    assert seen["twice"][0]["weights"] == seen["twice"][1]["weights"]


@pytest.mark.parametrize("case", ["forward", "backward"])
def test_memory_that_runs_out_on_one_rank_starts_the_step_again_on_both(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    """In the backward pass, the other rank has begun to sum."""
    assert seen[case][0]["weights"] == seen[case][1]["weights"] and seen[case][0]["steps"] == 5
