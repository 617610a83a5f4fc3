"""The store of checkpoints: listing, the newest valid one, the best one, and retention."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.checkpoint.written import checkpoint
from trainwright.checkpoint.manifest import NAME, name_of, step_of, verify, write_manifest
from trainwright.checkpoint.store import (
    BEST_FILE,
    Best,
    Retention,
    checkpoints,
    newest_valid,
    prune,
    read_best,
    repair_best,
    set_aside,
    set_aside_newer,
    sweep,
    write_best,
)
from trainwright.errors import CheckpointError


def steps(folder: Path) -> list[int | None]:
    return [step_of(path) for path in checkpoints(folder)]


def test_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for step in (5, 100, 99_999_999, 123_456_789):
        checkpoint(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / ".step-00000008.1.tmp").mkdir()
    assert steps(tmp_path) == [123_456_789, 99_999_999, 100, 5]


def test_one_that_was_being_replaced_counts_after_the_new_one(tmp_path: Path) -> None:
    old = checkpoint(tmp_path, 5, name="step-00000005.old")
    assert newest_valid(tmp_path) == (old, [])
    new = checkpoint(tmp_path, 5)
    assert checkpoints(tmp_path) == [new, old]


def simulated(folder: Path, saves: list[int], retention: Retention, best_at: tuple[int, ...] = ()) -> list[int | None]:
    for step in saves:
        committed = checkpoint(folder, step)
        if step in best_at:
            write_best(folder, Best(step, "loss", 1.0 / step))
        prune(folder, committed, retention)
    return steps(folder)


def test_the_first_of_each_multiple_is_kept_for_ever(tmp_path: Path) -> None:
    saves = [*range(300, 6300, 300), 6250]  # multiples of 1000 are never hit exactly but at 3000 and 6000
    kept = simulated(tmp_path, sorted(saves), Retention(newest=1, every=1000))
    assert kept == [6250, 6000, 5100, 4200, 3000, 2100, 1200]


def test_the_best_is_kept_though_it_is_old(tmp_path: Path) -> None:
    assert simulated(tmp_path, [1, 2, 3, 4, 5], Retention(newest=2), best_at=(1, 2)) == [5, 4, 2]
    assert read_best(tmp_path) == Best(2, "loss", 0.5)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 5}', "null", "\x00"])
def test_a_torn_pointer_points_nowhere(tmp_path: Path, content: str) -> None:
    checkpoint(tmp_path, 5)
    (tmp_path / BEST_FILE).write_text(content)
    assert read_best(tmp_path) is None
    assert simulated(tmp_path, [6, 7], Retention(newest=1)) == [7]


@pytest.mark.parametrize(
    "step,metric,value",
    [
        *((5, "loss", value) for value in ('"0.3"', "NaN", "Infinity", "null", "[0.3]", "true", "1" + "0" * 400)),
        *((step, "loss", "0.3") for step in ("true", '"5"', "5.0", "null", "[5]", "1" * 400)),
        *((5, metric, "0.3") for metric in (None, 3, ["loss"])),
    ],
)
def test_a_pointer_edited_by_hand_points_nowhere(tmp_path: Path, step: object, metric: object, value: str) -> None:
    for each in (1, 5):
        checkpoint(tmp_path, each)
    (tmp_path / BEST_FILE).write_text(f'{{"step": {step}, "metric": {json.dumps(metric)}, "value": {value}}}')
    assert read_best(tmp_path) is None


def test_a_whole_number_is_a_value_too(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    (tmp_path / BEST_FILE).write_text('{"step": 5, "metric": "wins", "value": 3}')
    assert read_best(tmp_path) == Best(5, "wins", 3.0, None)


def test_a_pointer_to_what_is_gone_points_nowhere(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    write_best(tmp_path, Best(4, "loss", 1.0))
    assert read_best(tmp_path) is None


def test_later_ones_are_damaged_and_do_not_push_good_ones_out(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint(tmp_path, step)
    again = checkpoint(tmp_path, 12)
    prune(tmp_path, again, Retention(newest=2))
    assert steps(tmp_path) == [30, 20, 12, 10]


def test_a_folder_that_is_gone_needs_no_tidying_up(tmp_path: Path) -> None:
    committed = tmp_path / "run" / name_of(30)
    prune(committed.parent, committed, Retention(newest=1))
    for step in (10, 20):
        checkpoint(tmp_path / "run", step)
    prune(committed.parent, committed, Retention(newest=1))
    assert steps(committed.parent) == [20]


def damaged(folder: Path, step: int) -> Path:
    path = checkpoint(folder, step)
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_what_was_set_aside_pushes_no_good_one_out(tmp_path: Path) -> None:
    for step in (10, 20):
        checkpoint(tmp_path, step)
    damaged(tmp_path, 25)
    resumed, _ = newest_valid(tmp_path)
    assert resumed == tmp_path / name_of(20)
    assert set_aside_newer(tmp_path, resumed) == [tmp_path / "damaged-step-00000025"]
    assert simulated(tmp_path, [30], Retention(newest=2)) == [30, 20]
    assert (tmp_path / "damaged-step-00000025" / "rest.safetensors").is_file(), "retention does not touch it"
    assert simulated(tmp_path, [35, 40, 45], Retention(newest=1, every=15)) == [45, 30, 20]


def test_setting_aside_never_overwrites_and_never_raises(tmp_path: Path) -> None:
    names = {set_aside(checkpoint(tmp_path, 25)).name for _ in range(3)}
    assert names == {"damaged-step-00000025", "damaged-step-00000025-2", "damaged-step-00000025-3"}
    assert steps(tmp_path) == []
    gone = tmp_path / name_of(26)
    assert set_aside(gone) == gone


def test_one_that_was_being_replaced_is_gone_on_from(tmp_path: Path) -> None:
    old = checkpoint(tmp_path, 25, name="step-00000025.old")
    damaged(tmp_path, 25)
    damaged(tmp_path, 30)
    assert newest_valid(tmp_path)[0] == old
    assert {path.name for path in set_aside_newer(tmp_path, old)} == {"damaged-step-00000025", "damaged-step-00000030"}
    assert checkpoints(tmp_path) == [old]


@pytest.mark.parametrize("best,known", [(10, True), (20, True), (25, False), (28, False)])
def test_a_best_of_a_past_that_was_given_up_is_forgotten(tmp_path: Path, best: int, known: bool) -> None:
    for step in (10, 20, 25):
        checkpoint(tmp_path, step)
    write_best(tmp_path, Best(best, "loss", 0.1))
    set_aside_newer(tmp_path, tmp_path / name_of(20))
    kept = simulated(tmp_path, [25, 28, 30], Retention(newest=1))
    assert read_best(tmp_path) == (Best(best, "loss", 0.1) if known else None)
    assert kept == ([30, best] if known else [30])


FILES = ("model.safetensors", "rest.safetensors", "state.json", NAME)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate", "grow", "folder", "link to nothing"])
def test_damage_is_found_and_named(tmp_path: Path, file: str, damage: str) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    path = bad / file
    content = path.read_bytes()
    path.unlink()
    if damage in ("empty", "truncate", "grow"):
        path.write_bytes({"empty": b"", "truncate": content[:-1], "grow": content + b"\x00"}[damage])
    elif damage == "folder":
        path.mkdir()
    elif damage == "link to nothing":
        path.symlink_to("nowhere")
    found, broken = newest_valid(tmp_path)
    assert found == good
    assert len(broken) == 1 and str(path) in broken[0]


@pytest.mark.parametrize("one,other", list(itertools.combinations(FILES, 2)))
def test_two_swapped_files_are_found(tmp_path: Path, one: str, other: str) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (bad / one).rename(bad / "aside")
    (bad / other).rename(bad / one)
    (bad / "aside").rename(bad / other)
    found, broken = newest_valid(tmp_path)
    assert found == good
    assert one in broken[0] or other in broken[0]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_checkpoint_is_found(tmp_path: Path, file: str) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (bad / file).write_bytes((good / file).read_bytes())
    found, broken = newest_valid(tmp_path)
    assert found == good
    assert str(bad) in broken[0]


def test_a_renamed_folder_is_found(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1).rename(tmp_path / name_of(9))
    with pytest.raises(CheckpointError, match="renamed"):
        verify(tmp_path / name_of(9))
    (tmp_path / name_of(9)).rename(tmp_path / "my favourite")
    verify(tmp_path / "my favourite")  # a copy under a name of the user's own says no step


@pytest.mark.parametrize("manifest", [[], {}, None, 5, {"format": 2, "step": 1, "files": {}}, {"files": {}, "step": 1}])
def test_a_manifest_that_promises_nothing_is_none(tmp_path: Path, manifest: object) -> None:
    path = checkpoint(tmp_path, 1)
    (path / NAME).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert caught.value.remedy


def test_a_manifest_that_reaches_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    manifest = json.loads((path / NAME).read_text())
    (tmp_path / "elsewhere").write_text("x")
    manifest["files"]["../elsewhere"] = {"bytes": 1, "sha256": "x"}
    own = {key: value for key, value in manifest.items() if key != "sha256"}
    sum_of_all = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()  # forged with care
    (path / NAME).write_text(json.dumps({**own, "sha256": sum_of_all}))
    with pytest.raises(CheckpointError, match="elsewhere is missing"):
        verify(path)


def test_the_best_is_known_though_a_kill_came_before_the_pointer(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    write_best(tmp_path, Best(1, "loss", 3.0))
    checkpoint(tmp_path, 2, best=Best(2, "loss", 2.5))
    assert read_best(tmp_path) == Best(2, "loss", 2.5)
    prune(tmp_path, checkpoint(tmp_path, 3), Retention(newest=1))
    assert steps(tmp_path) == [3, 2]


def test_what_is_deleted_is_out_of_sight_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, 1)
    last = checkpoint(tmp_path, 2)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # killed right here
    prune(tmp_path, last, Retention(newest=1))
    monkeypatch.undo()
    assert steps(tmp_path) == [2] and [path.name for path in tmp_path.glob(".step-*")] == [".step-00000001.deleted"]
    sweep(tmp_path)
    assert not list(tmp_path.glob(".step-*"))


def test_the_pointer_is_mended(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    write_best(tmp_path, Best(1, "loss", 3.0))
    checkpoint(tmp_path, 2, best=Best(2, "loss", 2.5))
    (tmp_path / ".best.json.tmp").write_text("half")
    assert repair_best(tmp_path) == Best(2, "loss", 2.5)
    assert json.loads((tmp_path / BEST_FILE).read_text())["step"] == 2
    sweep(tmp_path)
    assert not list(tmp_path.glob(".best.json*"))


THIS, OTHER = "a" * 16, "b" * 16


def of_run(folder: Path, step: int, run: str, best: Best | None = None) -> Path:
    path = checkpoint(folder, step)
    (path / NAME).unlink()
    write_manifest(path, step, asdict(best) if best else None, run)
    return path


def foreign_things(folder: Path) -> set[Path]:
    """Create files of another run and of other programs in the folder that checkpoints are linked to."""
    theirs = {of_run(folder, step, OTHER) for step in (1, 2, 3, 30)}
    for name in ("step-00000004", "step-100", ".step-00000005", f".step-00000006.{OTHER}.tmp", ".step-00000007.tmp"):
        (folder / name).mkdir()
        (folder / name / "data").write_text("theirs")
        theirs.add(folder / name)
    (folder / f".best.json.{OTHER}.tmp").write_text("theirs")
    return {*theirs, folder / f".best.json.{OTHER}.tmp"}


def test_only_what_is_of_this_run_is_deleted(tmp_path: Path) -> None:
    disk, linked = tmp_path / "disk", tmp_path / "checkpoints"
    disk.mkdir()
    linked.symlink_to(disk)
    theirs = foreign_things(disk)
    for name in (f".step-00000008.{THIS}.tmp", f".step-00000008.{THIS}.deleted"):
        (disk / name).mkdir()
    (disk / f".best.json.{THIS}.tmp").touch()
    sweep(linked, THIS)
    for step in (10, 20, 25, 27):
        prune(linked, of_run(linked, step, THIS), Retention(newest=2), THIS)
    kept = {disk / name_of(step) for step in (25, 27)}
    assert {*disk.iterdir()} == theirs | kept
    assert checkpoints(linked, THIS)[0] == linked / name_of(27)
    assert not {name_of(1), name_of(30)} & {path.name for path in checkpoints(linked, THIS)}


def test_checkpoints_without_an_identity_are_read_and_kept(tmp_path: Path) -> None:
    """As a run of an earlier version, or one whose run-id was lost, has them."""
    older = [checkpoint(tmp_path, step) for step in (1, 2)]
    for path in older:
        manifest = json.loads((path / NAME).read_text())
        own = {key: value for key, value in manifest.items() if key not in ("run", "sha256")}
        own["sha256"] = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        (path / NAME).write_text(json.dumps(own))
    assert newest_valid(tmp_path, run=THIS) == (older[1], [])
    prune(tmp_path, of_run(tmp_path, 3, THIS), Retention(newest=1), THIS)
    assert steps(tmp_path) == [3, 2, 1]


def test_checkpoints_of_another_run_are_not_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    of_run(folder, 9, OTHER, Best(9, "loss", 0.1))
    found, broken = newest_valid(folder, run=THIS)
    assert found is None and f"belongs to the run {OTHER}" in broken[0]
    assert f"write {OTHER} into {tmp_path / 'run' / 'run-id'}" in broken[0]
    assert newest_valid(folder, run=OTHER)[0] == newest_valid(folder)[0] == folder / name_of(9)
    own = of_run(folder, 5, THIS)
    assert newest_valid(folder, run=THIS) == (own, [])
    assert set_aside_newer(folder, own, THIS) == [] and (folder / name_of(9)).is_dir()


def test_the_best_of_another_run_is_none_of_this(tmp_path: Path) -> None:
    of_run(tmp_path, 9, OTHER, Best(9, "loss", 0.1))
    write_best(tmp_path, Best(9, "loss", 0.1), OTHER)
    of_run(tmp_path, 5, THIS, Best(5, "loss", 0.4))
    assert read_best(tmp_path, OTHER) == Best(9, "loss", 0.1)
    assert read_best(tmp_path, THIS) is None
    write_best(tmp_path, Best(5, "loss", 0.4), THIS)
    assert read_best(tmp_path, THIS) == Best(5, "loss", 0.4)


def test_a_folder_without_a_manifest_is_not_set_aside(tmp_path: Path) -> None:
    resumed = checkpoint(tmp_path, 10)
    (tmp_path / name_of(20)).mkdir()
    (tmp_path / name_of(30)).mkdir()
    (tmp_path / name_of(30) / NAME).write_text("torn")
    assert set_aside_newer(tmp_path, resumed) == [tmp_path / "damaged-step-00000030"]
    assert (tmp_path / name_of(20)).is_dir()
