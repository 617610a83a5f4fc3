"""Steps that run out of memory, in processes whose memory the kernel limits (RLIMIT_DATA)."""

from __future__ import annotations

import functools
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.runs.reader import read
from trainwright.runs.records import Found, OutOfMemory, Watched

pytestmark = [
    pytest.mark.examined,
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's RLIMIT_DATA"),
]
PROGRAM = Path(__file__).parent / "limited.py"
FITS_16 = 18  # MiB; 16 samples take 12, and 32 of them 24


def started(**ask: Any) -> Forked:
    return Forked(PROGRAM.read_text(), json.dumps(ask))


def answer(process: Forked) -> dict[str, Any]:
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def limited(**ask: Any) -> dict[str, Any]:
    return answer(started(**ask))


@functools.cache
def once(**ask: Any) -> dict[str, Any]:
    """A run that several tests ask for and none changes."""
    return limited(**ask)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for what in ("step", "weights", "buffers", "table", "generators", "numpy", "losses"):
        assert one[what] == other[what], what


def test_steps_are_the_bits_of_a_run_that_began_with_the_smaller_micro_batch() -> None:
    """Dropout included: the generator is where it would be had the failed tries never happened."""
    short = once(model="dropout", steps=6, limit_mib=FITS_16)
    assert short["micro_limit"] == 16 and short["error"] == ""
    assert [(each["step"], each["micro"], each["next_micro"]) for each in short["shortages"]] == [
        (1, 64, 64),  # a heap in pieces would have been the cause
        (1, 64, 32),
        (1, 32, 16),
    ]
    same(short, once(model="dropout", steps=6, micro=16))


def test_it_says_where_it_was_and_what_held_the_memory() -> None:
    first, _, second = once(model="dropout", steps=6, limit_mib=FITS_16)["shortages"]
    assert (first["phase"], first["module"]) == ("forward", "wide")
    assert first["asked_bytes"] == 64 * 64 * 1024 * 4
    assert second["phase"] in ("forward", "backward")  # which of the two the rest of the limit does for
    assert first["held"]["weights"] == 4 * (64 * 64 + 64 + 64 * 4 + 4)
    assert first["given_back_bytes"] > 8 * 2**20
    assert first["in_use_bytes"] < first["capacity_bytes"] * 1.2


def test_a_resumed_run_cuts_its_batches_alike(tmp_path: Path) -> None:
    """Though it could do without: the resumed part has all the memory."""
    limited(model="dropout", steps=3, limit_mib=FITS_16, save=str(tmp_path))
    resumed = limited(model="dropout", steps=6, resume=str(tmp_path))
    straight = once(model="dropout", steps=6, micro=16)
    assert resumed["micro_limit"] == 16
    assert resumed["weights"] == straight["weights"] and resumed["generators"] == straight["generators"]


def test_one_sample_that_does_not_fit_ends_in_a_sentence_and_the_last_good_step_is_saved(tmp_path: Path) -> None:
    short = limited(model="dropout", steps=6, limit_mib=FITS_16, limit_after=3, wider=64, save=str(tmp_path))
    assert "one sample does not fit" in short["error"] and "remedy:" in short["error"]
    assert "out of memory in step 4 (" in short["error"]
    assert short["step"] == 3 and short["micro_limit"] is None
    resumed, straight = limited(model="dropout", steps=6, resume=str(tmp_path)), limited(model="dropout", steps=6)
    assert resumed["weights"] == straight["weights"] and resumed["generators"] == straight["generators"]


def test_a_model_that_writes_into_its_input_is_not_tried_again(tmp_path: Path) -> None:
    short = limited(model="writes", steps=2, limit_mib=FITS_16, limit_after=1, save=str(tmp_path))
    assert "writes into its input" in short["error"]
    assert short["step"] == 1 and len(list(tmp_path.glob("step-*"))) == 1


def test_an_update_that_does_not_fit_says_so() -> None:
    short = limited(model="heavy", steps=2, limit_mib=30)
    assert "in the update of step 1 (the first one makes the optimizer's state)" in short["error"]
    assert "It has written nothing" in short["error"] and short["step"] == 0


def test_moments_that_fit_once_memory_is_given_back_are_made() -> None:
    """They belong to the second group of parameters: the first one must not be updated before.

    Of 150 MiB the passes take 80, which the collector gives back, gradients 24, and moments with what the update needs
    besides 72.
    """
    short, whole = (limited(model="vector", steps=1, micro=4, limit_mib=mib) for mib in (150, 0))
    tries = [(each["phase"], each["next_micro"]) for each in short["shortages"]]
    assert tries[-1] == ("update", 4) and all(micro == 4 for _, micro in tries)  # a heap in pieces may cost one more
    same(short, whole)


def test_an_update_that_has_written_nothing_leaves_the_last_good_step_to_be_saved(tmp_path: Path) -> None:
    """A parameter gets its first gradient, and so its moments, in step 3."""
    short = limited(model="later", steps=6, micro=4, limit_mib=60, save=str(tmp_path))
    assert "in the update of step 3: " in short["error"] and short["step"] == 2
    resumed = limited(model="later", steps=3, micro=4, resume=str(tmp_path))
    straight = limited(model="later", steps=3, micro=4)
    assert resumed["weights"] == straight["weights"] and resumed["generators"] == straight["generators"]


def _two_ranks(meet: Path, limit_mib: int, **more: int) -> list[Forked]:
    """Only the second is short of memory. A thread of gloo that finds none ends its process: then once more."""
    for attempt in range(4):
        ask = {"model": "dropout", "steps": 6, "ranks": 2, "meet": f"{meet}{attempt}", **more}
        both = [started(**ask, rank=rank, limit_mib=limit) for rank, limit in ((0, 0), (1, limit_mib))]
        both[1].wait()
        if both[1].returncode != -signal.SIGABRT:
            break
        both[0].kill()
        both[0].wait()
    return both


def test_ranks_shrink_together(tmp_path: Path) -> None:
    """Both cut alike, and train as two that began with the smaller micro-batch."""
    told = [answer(process) for process in _two_ranks(tmp_path / "meet", FITS_16)]
    straight = [answer(process) for process in _two_ranks(tmp_path / "enough", 0, micro=16)]
    assert [each["phase"] for each in told[0]["shortages"]] == ["on another rank"] * 3
    assert [each["phase"] for each in told[1]["shortages"]] in (["forward"] * 2 + ["backward"], ["forward"] * 3)
    for each, wanted in zip(told, straight, strict=True):  # kernels may take another way where memory is short
        names = ("step", "generators", "numpy")
        assert [each[name] for name in names] == [wanted[name] for name in names]
        assert each["values"] == pytest.approx(wanted["values"], abs=1e-6)
        assert each["losses"] == pytest.approx(wanted["losses"], abs=1e-6)
    assert told[0]["weights"] == told[1]["weights"] and told[0]["generators"] != told[1]["generators"]


def test_a_whole_run_is_recorded_and_the_doctor_sees_each_step_once(tmp_path: Path) -> None:
    told = limited(folder=str(tmp_path), limit_mib=FITS_16 + 8)  # a save takes some, too
    assert told["ending"] == "finished" and told["step"] == 4
    records = read(Path(told["run"]) / "log.jsonl").records
    short = [each for each in records if isinstance(each, OutOfMemory)]
    assert [(each.step, each.micro, each.next_micro) for each in short[:2]] == [(3, 64, 64), (3, 64, 32)]
    assert len(short) == len(told["shortages"])
    watched = [each for each in records if isinstance(each, Watched)]
    assert [each.step for each in watched] == list(range(1, 5))
    limits = [min([64, *(e.next_micro or 0 for e in short if e.step <= step)]) for step in range(1, 5)]
    assert [len(each.values["ids"]) for each in watched] == [64 // limit for limit in limits]
    assert [each for each in records if isinstance(each, Found) and each.severity == "critical"] == []
    assert "resources.out_of_memory" in [
        each.found.code for each in diagnose(RunContext(records, finished=True)).findings
    ]
