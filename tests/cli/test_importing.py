"""The command line imports torch without the garbage collector, and gives it back."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from trainwright.cli.app import importing_torch

FRESH = """
import gc
from trainwright.cli.app import importing_torch
with importing_torch():
    assert not gc.isenabled()
    import torch
assert gc.isenabled()
print(gc.get_freeze_count())
"""


@pytest.mark.process
def test_a_fresh_process_collects_no_garbage_while_it_imports_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 100_000


@pytest.mark.slow
def test_a_process_that_has_torch_is_left_alone() -> None:
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with importing_torch():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
