"""How much memory is free, and what the flight recorder may hold of it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import torch
from torch import nn

from trainwright.recorder.ring import LEAST_BYTES, enough_bytes
from trainwright.world.memory import free_bytes

LIMIT = 2**32
LIMITED = f"""
import resource, torch
from torch import nn
from trainwright.recorder.ring import enough_bytes
from trainwright.world.memory import free_bytes
resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT}, {LIMIT}))
print(free_bytes(torch.device("cpu")), enough_bytes([nn.Linear(2**20, 2**20, device="meta")]))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's RLIMIT_DATA")
def test_a_limit_of_the_process_leaves_less() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    free, budget = map(int, done.stdout.split())
    assert 0 < free < LIMIT and LEAST_BYTES <= budget <= LIMIT // 4


def test_the_recorder_may_hold_three_states_and_no_more_than_a_quarter_of_what_is_free() -> None:
    small, middle, large = (nn.Linear(size, 2**14, bias=False, device="meta") for size in (2, 2**9, 2**24))
    assert enough_bytes([small]) == enough_bytes([]) == LEAST_BYTES
    if free_bytes(torch.device("cpu")) > 8 * 9 * middle.weight.nbytes:
        assert enough_bytes([middle]) == 9 * middle.weight.nbytes > LEAST_BYTES
    assert enough_bytes([large]) <= max(LEAST_BYTES, psutil.virtual_memory().total // 4)
