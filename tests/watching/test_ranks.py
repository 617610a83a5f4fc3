"""A loop that is one of several processes: no look begins what the others take no part in; real ones, over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked

MAIN = """
import sys, warnings
from tests.watching import two_ranks
warnings.simplefilter("ignore")
two_ranks.print_outcomes(sys.argv[1])
"""
SHARED = ("healthy", "nan", "no_zero_grad", "first_batches_alone", "inside", "sharded", "zero")
"""Programs whose forward or backward pass communicates."""


def outcomes(folder: Path, *programs: str, seeds: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Of each rank what it printed: for each program and seed the outcome alone, and watched."""
    ask: dict[str, Any] = {"folder": str(folder), "meet": str(folder / "meet"), "programs": programs, "seeds": seeds}
    ranks = [Forked(MAIN, json.dumps({**ask, "rank": rank})) for rank in (0, 1)]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    return [json.loads(out) for out, _ in said]


@pytest.mark.slow
@pytest.mark.process
def test_no_look_communicates(tmp_path: Path) -> None:
    """With one rank watched, and with both: the same bits, and it is told why nothing replays."""
    first, second = outcomes(tmp_path, *SHARED, seeds=(1,))
    for mine, theirs in ((first[at : at + 2], second[at : at + 2]) for at in range(0, len(first), 2)):
        alone, watched = mine
        assert watched["failures"] == [], alone["program"]
        assert all("communicates with other processes" in reason for reason in watched["blind"]), watched
        assert "communicates with other processes" in watched["codes"]["loop.unseen"], alone["program"]
        if alone["program"] != "nan":  # there the watch leaves the update out
            assert [each["weights"] for each in mine] == [alone["weights"]] * 2, alone["program"]
            assert watched["collectives"] == alone["collectives"] > 0, alone["program"]
            assert [each["weights"] for each in theirs] == [theirs[0]["weights"]] * 2, alone["program"]
        faults = {
            "nan": ("precision.nonfinite_step", "data.nonfinite_input"),
            "no_zero_grad": ("optim.missing_zero_grad",),
        }
        assert set(watched["codes"]) <= {"loop.unseen", *faults.get(alone["program"], ())}
        assert len(watched["codes"]) == (2 if alone["program"] in faults else 1), alone["program"]


@pytest.mark.slow
@pytest.mark.process
def test_what_does_not_communicate_is_replayed(tmp_path: Path) -> None:
    """Gradients that the loop averages by hand; and a model that communicates in evaluation mode alone."""
    first, _ = outcomes(tmp_path, "softmax_by_hand", "asymmetric", seeds=(1,))
    _, by_hand, _, asymmetric = first
    assert by_hand["tried"] == ["loss.softmax_before_cross_entropy"]
    replayed = [reason for reason in asymmetric["blind"] if not reason.startswith("no")]  # not of its program
    assert replayed and all("c10d" in reason for reason in replayed)
    assert asymmetric["codes"] == {} and asymmetric["failures"] == []
