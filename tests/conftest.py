"""One thread: the models here are tiny, and on a busy machine the threads of OpenMP wait for each other by spinning."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before each test: a run that was tested before may have set another number."""
    torch.set_num_threads(1)
