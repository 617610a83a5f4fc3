"""A training that is killed again and again loses nothing; and the campaign that says so sees what it should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kill_campaign
from tests import forked
from trainwright.checkpoint.manifest import verify, write_manifest

STEPS = 12
pytestmark = pytest.mark.slow


def test_kills_lose_nothing() -> None:
    """At least 3 of the 5 kills come after a save, so the run is resumed at least 3 times."""
    options = ["--kills", "5", "--steps", "14", "--jobs", "1", "--fork", "--in-save", "0.8", "--step-ms", "8"]
    done = forked.run("from benchmarks.kill_campaign import main; main()", *options)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["kills"] == 5 and seen["runs"] >= 1 and seen["resumes"] > 2, seen
    assert seen["kills_in_save"] > 0, seen
    names = list(seen)
    zero = names[names.index("unloadable") : names.index("final_bits_equal")]
    assert {"torn", "silently_corrupt", "samples_lost", "samples_repeated", "losses_differing"} <= set(zero)
    assert {name: seen[name] for name in zero if seen[name]} == {}, done.stderr
    assert seen["final_bits_equal"] is True


@pytest.fixture(scope="module")
def campaign() -> Iterator[Any]:
    """The benchmark as a module; its processes take one thread each, and are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield kill_campaign


@pytest.fixture(scope="module")
def place(campaign: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = campaign.Place(tmp_path_factory.mktemp("campaign") / "place", fork=True)
    made.make(steps=STEPS, workers=0, step_ms=0, keep=campaign.KEEP)
    return made


@pytest.fixture(scope="module")
def reference(campaign: Any, place: Any) -> Any:
    return campaign.train_undisturbed(place, STEPS)


@pytest.fixture(scope="module")
def trained(campaign: Any, place: Any) -> Path:
    """A run to its end, with as many checkpoints as a campaign keeps."""
    assert place.train("again").wait() == 0, place.said.read_text()
    run: Path = place.run("again")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Passes every record of the log through ``change``."""
    records = [change(json.loads(line)) for line in (run / "log.jsonl").read_text().splitlines()]
    (run / "log.jsonl").write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in records if each))


def of_step(number: int, **fields: Any) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Replaces ``fields`` of a Step record; drops it when there are none."""

    def change(record: dict[str, Any]) -> dict[str, Any] | None:
        mine = (record["kind"], record.get("step")) == ("step", number)
        return record if not mine else {**record, **fields} if fields else None

    return change


def test_what_is_whole_is_no_problem(campaign: Any, reference: Any, run: Path) -> None:
    assert campaign.inspect(run, reference).problems() == {}
    assert campaign.compare(run, reference).problems() == {}
    assert len(campaign.committed(run)) >= campaign.KEEP


def test_a_run_that_was_killed_before_it_saved_is_no_problem(campaign: Any, reference: Any, tmp_path: Path) -> None:
    assert campaign.inspect(tmp_path / "never", reference).problems() == {}


def test_a_torn_checkpoint_is_seen(campaign: Any, reference: Any, run: Path) -> None:
    flip_a_bit(checkpoint(run, STEPS) / "model.safetensors")
    assert campaign.inspect(run, reference).problems().items() >= {"torn": 1, "lost_saves": 1}.items()


@pytest.mark.parametrize("name", ["model.safetensors", "rest.safetensors"])
def test_other_bits_that_verify_are_seen(campaign: Any, reference: Any, run: Path, name: str) -> None:
    flip_a_bit(checkpoint(run, STEPS) / name)
    write_manifest(checkpoint(run, STEPS), STEPS)
    verify(checkpoint(run, STEPS))
    assert campaign.inspect(run, reference).problems() == {"silently_corrupt": 1}
    assert campaign.compare(run, reference).problems() == {"ends_differing": 1}


def test_a_save_that_the_log_promised_is_missed(campaign: Any, reference: Any, run: Path) -> None:
    shutil.rmtree(checkpoint(run, STEPS))
    assert campaign.inspect(run, reference).problems()["lost_saves"] == 1


def test_a_run_without_any_checkpoint_left_is_seen(campaign: Any, reference: Any, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert campaign.inspect(run, reference).problems() == {"unloadable": 1, "lost_saves": 1}


def test_an_old_checkpoint_that_was_being_deleted_is_no_problem(campaign: Any, reference: Any, run: Path) -> None:
    shutil.copytree(checkpoint(run, STEPS), checkpoint(run, 2))
    (checkpoint(run, 2) / "manifest.json").unlink()
    found = campaign.inspect(run, reference)
    assert found.problems() == {} and found.half_deleted == 1


def test_another_best_checkpoint_is_seen(campaign: Any, reference: Any, run: Path) -> None:
    other = next(step for step in reference.validated if step != reference.best["step"])
    undisturbed = replace(reference, validated={other: 0.0}, best={**reference.best, "step": other})
    assert campaign.inspect(run, undisturbed).problems() == {"best_differing": 1}
    assert campaign.compare(run, undisturbed).problems() == {"best_differing": 1}


def test_a_lost_step_is_seen(campaign: Any, reference: Any, run: Path) -> None:
    rewrite(run, of_step(5))
    assert campaign.compare(run, reference).problems() == {"steps_missing": 1, "samples_lost": 8}


def test_a_batch_that_came_twice_is_seen(campaign: Any, reference: Any, run: Path) -> None:
    rewrite(run, of_step(5, ids_hash=reference.steps[3].ids_hash))
    assert campaign.compare(run, reference).problems() == {"samples_lost": 8, "samples_repeated": 8}


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_another_history_is_seen(campaign: Any, reference: Any, run: Path, name: str) -> None:
    rewrite(run, of_step(5, **{name: 0.125}))
    assert campaign.compare(run, reference).problems() == {"losses_differing": 1}
