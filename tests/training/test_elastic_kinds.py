"""A run goes on with another number of ranks in mid-epoch: no sample is lost or repeated, for each kind of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.training.ranked import compare

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, sys
from types import SimpleNamespace
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
import trainwright as tw

given = json.loads(sys.argv[1])
torch.set_num_threads(1)

class Rows:
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((4,), (self.first + index) / 100), torch.tensor(self.first + index)

class Stream(IterableDataset):  # shuffled through a buffer
    def __iter__(self):
        buffer, rows = [], Rows(0, 41)
        for index in range(41):
            buffer.append(index)
            if len(buffer) == 7:
                yield rows[buffer.pop(int(torch.randint(7, ())))]
        yield from (rows[index] for index in buffer)

class Texts:  # packed into rows of 16 tokens
    def __len__(self):
        return 23

    def __getitem__(self, index):
        ids = torch.full((2 + 5 * index % 9,), index)
        return {"input_ids": ids, "labels": ids.clone()}

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, input_ids, position_ids=None, **_):
        return SimpleNamespace(logits=self.output(self.embedding(input_ids)))

class Dense(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

kinds = {
    "mixture": (Dense, lambda: tw.mix({"a": Rows(0, 30), "b": Rows(30, 11)}, {"a": 1.0, "b": 2.0})),
    "stream": (Dense, Stream),
    "loader of a stream": (Dense, lambda: DataLoader(Stream(), batch_size=5)),
    "packing": (Language, Texts),
}

def dense(model, batch):
    return tw.Loss((model(batch[0]) - 1).square().sum(), float(len(batch[1])))

def language(model, batch):
    labels = batch["labels"].flatten()
    kept = labels != -100
    logits = model(batch["input_ids"]).logits.flatten(0, 1)
    total = nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    return tw.Loss(total, float(kept.sum()))

start = os.getcwd()
for name in given["kinds"]:
    os.makedirs(name, exist_ok=True)
    os.chdir(name)
    make, data = kinds[name]
    torch.manual_seed(3)
    more = {"data.packing": {"by": "bfd", "max_length": 16}} if name == "packing" else {}
    sized = {} if "loader" in name else {"batch": 6}
    tw.fit(make(), data(), language if name == "packing" else dense, until=given["until"], lr=1e-2, quiet=True,
           resume="runs/run" if given["begun"] else None, seed=7, **sized,
           settings={"log.every": "1steps", "schedule.use": "constant", "precision": "fp32", "log.doctor": False,
                     "checkpoint.every": "1steps", **more})
    os.chdir(start)
"""
KINDS = ["mixture", "stream", "loader of a stream", "packing"]


def steps(folder: Path) -> list[dict[str, Any]]:
    log = map(json.loads, next(folder.glob("runs/*/log.jsonl")).read_text().splitlines())
    # the padding of packed rows depends on the ranks that share them, and counts as tokens
    return [{**record, "tokens": 0} for record in log if record["kind"] == "step"]


def test_no_sample_is_lost_or_repeated_if_the_number_of_ranks_changes(tmp_path: Path) -> None:
    """Each step has the samples (``ids_hash``), their number and the loss of a run of one process."""
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    ranks.finish(FIT, 1, json.dumps({"kinds": KINDS, "begun": 0, "until": "14steps"}), cwd=whole)
    for count, begun, end in ((2, 0, 3), (3, 3, 10), (1, 10, 14)):  # in the first, second and third epoch
        given = {"kinds": KINDS, "begun": begun, "until": f"{end}steps"}
        ranks.finish(FIT, count, json.dumps(given), cwd=changing)
    for kind in KINDS:
        compare(steps(changing / kind), steps(whole / kind))
