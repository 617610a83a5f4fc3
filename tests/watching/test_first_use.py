"""The first use of Trainwright in a process draws nothing from the random number generators of the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

USES = """
import hashlib, json, pickle, random, sys
import numpy as np, torch
from torch import nn

random.seed(1), np.random.seed(2), torch.manual_seed(3)
x, y = torch.randn(16, 4), torch.randint(3, (16,))

def states():
    every = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return [hashlib.sha1(pickle.dumps(each)).hexdigest() for each in every]

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
found = [states()]
import trainwright as tw
with tw.watch(model, optimizer, out=sys.argv[1]):
    pass
found.append(states())
tw.fit(model, (x, y), nn.CrossEntropyLoss(), batch=8, until="1steps", quiet=True, settings={"folder": sys.argv[1]})
found.append(states())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.process
def test_the_generators_stay(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", USES, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    before, *after = json.loads(done.stdout.splitlines()[-1])
    assert after == [before, before]
