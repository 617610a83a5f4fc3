"""One thread, here and in every process that a test starts: the models are tiny, and on a busy machine the threads of
OpenMP wait for each other by spinning."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: fixtures of a module run before those of a test

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before each test: a run that was tested before may have set another number."""
    torch.set_num_threads(1)
