"""Whole runs near the least memory that a plain loop gets through with: ours get through, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forked import Forked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's rlimits"),
]
LIMITED = """
import sys
from pathlib import Path
from benchmarks.memory_limits import limited
side, case, kind, mib, answer = sys.argv[1:]
limited(side, case, kind, int(mib), 1, Path(answer))
"""


@pytest.mark.parametrize(("case", "kind", "mib"), [("mlp", "data", 76), ("conv", "as", 84), ("gpt", "data", 72)])
def test_a_run_gets_through_where_a_loop_that_halves_does(case: str, kind: str, mib: int, tmp_path: Path) -> None:
    """``benchmarks/memory_limits.py`` has all limits; what a run of ours needs beyond a loop is some 16 MiB."""
    micro = {}
    for side in ("plain", "fit"):
        Forked(LIMITED, side, case, kind, str(mib), str(tmp_path / side)).wait()
        micro[side] = int((tmp_path / side).read_text()) if (tmp_path / side).exists() else 0
    assert micro["fit"] > 0 and micro["plain"] < 32, micro
