"""The first use of Trainwright in a process draws nothing from the random number generators of the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = """
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
"""
AFTER = """
found.append(states())
print(json.dumps(found))
"""
USES = {
    "watch": "import trainwright as tw\nwith tw.watch(model, optimizer, out=sys.argv[1]): pass",
    "fit": (
        "import trainwright as tw\n"
        "tw.fit(model, (x, y), nn.CrossEntropyLoss(), batch=8, until='1steps', settings={'folder': sys.argv[1]})"
    ),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", USES)
def test_the_generators_stay(name: str, tmp_path: Path) -> None:
    code = f"{BEFORE}{USES[name]}\n{AFTER}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert dict(zip(("random", "numpy", "torch"), after)) == dict(zip(("random", "numpy", "torch"), before))
