"""Whole runs near the least memory that a plain loop gets through with: ours get through, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forked import Forked

pytestmark = [
    pytest.mark.examined,
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


@pytest.mark.parametrize(("case", "kind"), [("mlp", "data"), ("conv", "as")])
def test_a_run_gets_through_where_a_loop_that_halves_does(case: str, kind: str, tmp_path: Path) -> None:
    """At one of the limits where a plain loop has to halve; ``benchmarks/memory_limits.py`` has all.

    At larger ones most of the time is that of the doctor's looks.
    """
    limits = range(64, 24, -8)
    limit = next(mib for mib in limits if 0 < trained("plain", case, kind, mib, tmp_path) < 32)
    assert trained("fit", case, kind, limit, tmp_path) > 0, limit


def trained(side: str, case: str, kind: str, mib: int, folder: Path) -> int:
    """The micro-batch that a run came down to, 0 where it did not get through."""
    answer = folder / f"{side}-{mib}"
    Forked(LIMITED, side, case, kind, str(mib), str(answer)).wait()
    return int(answer.read_text()) if answer.exists() else 0
