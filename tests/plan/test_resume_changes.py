"""A changed recipe on resume: the table of docs/how-to/resume.md row by row, every key of the schema, and refusals."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import UsageError
from trainwright.plan.resume_changes import (
    RULES,
    UNKNOWN,
    Change,
    compare,
    compare_provenance,
    compare_recipes,
    on_command_line,
    require_accepted,
)
from trainwright.recipe import from_mapping
from trainwright.recipe.outline import section_at
from trainwright.runs.provenance import modules_of
from trainwright.runs.provenance import provenance as written_provenance

DOCS = Path(__file__).parents[2] / "docs/how-to/resume.md"
STEP = 400
HASH = {letter: letter * 64 for letter in "abcdef"}
CLASSES = {"safe": "safe", "changes the maths": "maths", "fatal": "fatal"}
ROW = re.compile(
    r"\| `(?P<path>[^:`]+)(: (?P<was>.+) -> (?P<now>.+))?`(, (?P<how>.+?))? \| (?P<kind>.+?) \| (?P<why>.+) \|"
)


def recipe(*settings: str) -> dict[str, Any]:
    base = {
        "until": "1000steps",
        "model": "mynets:Net",
        "data": {"train": "mydata:train_set"},
        "batch": {"size": 32},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},  # as in a run folder, whose recipe states every value
    }
    return from_mapping(base, overrides=list(settings)).recipe.model_dump(mode="json")


def provenance(**known: Any) -> dict[str, Any]:
    return {
        "git": {"commit": "c" * 40, "dirty": False, "diff_sha256": None},
        "sources": {"mynets": HASH["a"], "mydata": HASH["a"]},
        "python": "3.11.9",
        "platform": "Linux",
        "hostname": "node-1",
        "packages": {"versions": {"torch": "2.12.0", "transformers": "4.57.0"}, "count": 90, "sha256": HASH["a"]},
        "environment": {"CUDA_VISIBLE_DEVICES": "0"},
        "driver": None,
        "data": {"train": f"sha256:{HASH['a']} (the whole content)"},
        **known,
    }


def run_metadata(*settings: str, **known: Any) -> dict[str, Any]:
    return {"recipe": recipe(*settings), "provenance": provenance(**known)}


def with_package(name: str, version: str) -> dict[str, Any]:
    packages = provenance()["packages"]
    return {**packages, "versions": {**packages["versions"], name: version}}


OTHER_DATA = {"data": {"train": f"sha256:{HASH['b']} (the whole content)"}}
# What a row says beside a changed value, as what is found on the resume.
FOUND: dict[str, dict[str, Any]] = {
    "": {},
    "the same content": {},
    "other content": OTHER_DATA,
    "`mynets.py` was edited": {"sources": {"mynets": HASH["b"], "mydata": HASH["a"]}},
    "a commit elsewhere": {"git": {"commit": "d" * 40, "dirty": False, "diff_sha256": None}},
    "no git here": {"git": None},
    "in a run of 4ep": {},
    "`Net` was edited in the script that calls `tw.fit`": {"sources": {"__main__.Net": HASH["b"]}},
    "`Net` was typed into a Python prompt": {"sources": {"__main__.Net": None}},
    "a stream": {"data": {"train": f"sha256:{HASH['a']} (the type only)"}},
}
# And what was found when the run began, where that is not ``provenance()``.
ONCE: dict[str, dict[str, Any]] = {
    "`Net` was edited in the script that calls `tw.fit`": {"sources": {"__main__.Net": HASH["a"]}},
    "`Net` was typed into a Python prompt": FOUND["`Net` was typed into a Python prompt"],
    "a stream": FOUND["a stream"],
}
MISFITS = ["layers.0.weight has the shape (128, 8), in the checkpoint (64, 8)"]
ANOTHER_SHAPE = ("model.args.width", "model.lora.rank")


def rows() -> list[dict[str, str]]:
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    found = [ROW.fullmatch(line) for line in lines]
    assert None not in found, f"a row that is not read: {lines[found.index(None)]}"
    return [{name: text or "" for name, text in row.groupdict().items()} for row in found if row]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['path']} {row['was']} {row['now']} {row['how']}")
def test_a_row_of_the_table(row: dict[str, str]) -> None:
    path, before, after = row["path"], run_metadata(**ONCE.get(row["how"], {})), run_metadata(**FOUND[row["how"]])
    if path.startswith("packages."):
        for side, version in ((before, row["was"]), (after, row["now"])):
            side["provenance"]["packages"] = with_package(path.removeprefix("packages."), version)
    elif row["was"]:
        more = ["until=4ep"] if "4ep" in row["how"] else []
        before["recipe"], after["recipe"] = (recipe(f"{path}={row[side]}", *more) for side in ("was", "now"))
    mismatches = MISFITS if path in ANOTHER_SHAPE else []
    change = next(each for each in compare(before, after, step=STEP, mismatches=mismatches) if each.path == path)
    assert (change.kind, change.why) == (CLASSES[row["kind"]], row["why"].replace("`", ""))


def test_the_table_is_long_enough() -> None:
    assert len({row["path"] for row in rows() if row["was"]}) >= 20
    assert {row["kind"] for row in rows()} == set(CLASSES)


def test_nothing_changed() -> None:
    assert compare(run_metadata(), run_metadata(), step=STEP) == []
    assert compare(run_metadata(), run_metadata(hostname="node-1", platform="another kernel"), step=STEP) == []


def leaves(above: tuple[str, ...] = ()) -> Iterator[str]:
    section = section_at(above)
    assert section is not None
    for key in section.model_fields:
        yield from leaves((*above, key)) if section_at((*above, key)) else [".".join((*above, key))]


# All that these may ever hold is alike.
ALIKE = (
    *("log", "alerts", "evaluation", "checkpoint", "schedule", "loss", "batch", "metrics", "observers"),
    *("data.train", "data.val", "data.more_val"),
    *("model.lora", "optimizer.groups", "optimizer.clip", "optimizer.lr_rule"),
)


def test_every_key_has_a_resume_rule() -> None:
    sections = tuple(f"{section}." for section in ALIKE if section in RULES)
    without_rule = [path for path in leaves() if path not in RULES and not path.startswith(sections)]
    assert without_rule == [], "state in plan/resume_changes.py what it means to change them on resume"


def test_every_rule_is_of_a_key() -> None:
    known = set(leaves())
    for path in RULES:
        args = f"{path.partition('.args.')[0]}.args" if ".args." in path else path
        assert any(leaf == args or leaf.startswith(f"{args}.") for leaf in known), f"{path} is no key any more"


def only(changes: list[Change]) -> Change:
    assert len(changes) == 1, [str(each) for each in changes]
    return changes[0]


def between(before: dict[str, Any], after: dict[str, Any]) -> Change:
    return only(compare_recipes(before, after, step=STEP))


ROWS = "data.packing={by: bfd, max_length: 64}"
AMSGRAD = "optimizer.args.amsgrad=true"
SWA, SWA_LR = "model.swa={start: 0.5run}", "model.swa={start: 0.5run, lr: 0.1}"
FP8, EMULATED = "precision=fp8", "fp8={emulate: true}"
MUON = "optimizer.use=muon"
BITS8 = "optimizer.use=adamw8bit"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ([], ["data.packing=padding_free"], "safe"),
        ([], [ROWS], "maths"),
        ([ROWS], ["data.packing={by: bfd, max_length: 32}"], "maths"),
        ([], [AMSGRAD], "fatal"),
        (["optimizer.args.amsgrad=false"], [AMSGRAD], "fatal"),
        ([AMSGRAD], ["optimizer.args.amsgrad=false"], "maths"),
        (["optimizer.args.head=''"], ["optimizer.args.head=lm_head.*"], "maths"),
        ([MUON, "optimizer.args.head=''"], [MUON, "optimizer.args.head=lm_head.*"], "fatal"),
        ([BITS8, "optimizer.args.block_size=256"], [BITS8, "optimizer.args.block_size=128"], "fatal"),
        (["optimizer.use=adamw"], [BITS8], "fatal"),
        ([], ["model.ema=0.999"], "safe"),
        (["model.ema=0.999"], ["model.ema=0.9"], "maths"),
        (["model.ema=0.999"], [], "maths"),
        ([], [SWA], "safe"),
        ([], [SWA_LR], "maths"),
        ([SWA], [], "maths"),
        ([SWA], [SWA_LR], "maths"),
        ([SWA], ["model.swa={start: 0.5run, norm_batches: 3}"], "safe"),
        ([FP8, EMULATED], [FP8, "fp8={scales: tensorwise, emulate: true}"], "maths"),
        ([FP8], [FP8, EMULATED], "maths"),  # the section as a whole
        ([FP8, EMULATED], [FP8, "fp8={emulate: false}"], "safe"),
        (["precision=bf16"], ["precision=bf16", "fp8={scales: tensorwise}"], "safe"),
        (["precision=bf16"], ["precision=mxfp8"], "maths"),
        (["spikes={policy: warn}"], ["spikes={policy: off}"], "safe"),
        (["spikes={policy: off, factor: 8.0}"], ["spikes={policy: warn, factor: 3.0}"], "safe"),
        (["spikes={policy: skip}"], ["spikes={policy: warn}"], "maths"),
        (["spikes={policy: skip}"], ["spikes={policy: 'mine:policy'}"], "maths"),
        (["spikes={policy: rollback}"], ["spikes={policy: rollback, factor: 3.0}"], "maths"),
    ],
)
def test_the_kind_of_a_change(before: list[str], after: list[str], kind: str) -> None:
    assert {change.kind for change in compare_recipes(recipe(*before), recipe(*after), step=STEP)} == {kind}


def test_a_checkpoint_of_an_earlier_version_lacks_keys() -> None:
    settings = ("model.lora={rank: 8}", 'optimizer.groups=[{match: "*.embed.*"}]', "data.val=digits")
    before, after = recipe(*settings), recipe(*settings)
    for section, key in (("model", "compile"), ("checkpoint", "every"), ("schedule", "warmup"), ("data", "quarantine")):
        del before[section][key]
    del before["log"], before["model"]["lora"]["alpha"], before["optimizer"]["groups"][0]["lr_scale"]
    del before["spikes"]
    assert compare_recipes(before, after, step=STEP) == []
    after["model"]["lora"]["alpha"] = 32.0
    assert str(between(before, after)).startswith("model.lora.alpha: 16.0 -> 32.0 (changes the maths)")


def test_a_key_of_a_newer_version_falls_to_its_section() -> None:
    for section, kind in (("model", "maths"), ("log", "safe"), ("checkpoint", "safe"), ("schedule", "maths")):
        newer = recipe()
        newer[section]["brand_new"] = 3
        change = between(newer, recipe())
        assert (change.path, change.before, change.after) == (f"{section}.brand_new", "3", "not given")
        assert change.kind == kind
    found = between(recipe(), {**recipe(), "brand_new": True})
    assert (found.kind, found.why) == UNKNOWN


def test_values_are_shown_on_one_line() -> None:
    long = between(recipe("model.args.text=a"), recipe(f"model.args.text={'b' * 500}"))
    assert (long.before, len(long.after)) == ("a", 60)
    assert between(recipe("model.args.text='a\\nb'"), recipe('model.args.text="a\\nb"')).after == '"a\\nb"'
    assert between(recipe(), recipe("model.args.flag=null")).after == "null"
    quoted = between(recipe("model.args.count='7'"), recipe("model.args.count=7"))
    assert (quoted.before, quoted.after) == ('"7"', "7")


SPLIT = "batch={micro: 8, accumulation: 4}"


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (["batch.size=32", "batch.micro=8"], ["batch.size=32"], {"batch.micro": "safe"}),
        (["batch.size=64", "batch.micro=8"], ["batch.micro=4"], {"batch.size": "maths", "batch.micro": "safe"}),
        ([SPLIT], ["batch={micro: 8, accumulation: 8}"], {"batch.accumulation": "maths"}),
        ([SPLIT], ["batch={micro: 16, accumulation: 2}"], {"batch.micro": "safe", "batch.accumulation": "safe"}),
        ([SPLIT], [], {"batch.size": "safe", "batch.micro": "safe", "batch.accumulation": "safe"}),
    ],
)
def test_the_global_batch_decides(before: list[str], after: list[str], kinds: dict[str, str]) -> None:
    changes = compare_recipes(recipe(*before), recipe(*after), step=STEP)
    assert {each.path: each.kind for each in changes} == kinds


@pytest.mark.parametrize(
    ("until", "is_recounted"), [("4ep", True), ("9samples", True), ("9steps", False), ("9s", False)]
)
def test_another_batch_is_another_length(until: str, is_recounted: bool) -> None:
    change = between(recipe(f"until={until}"), recipe(f"until={until}", "batch.size=64"))
    assert change.why.startswith("a step takes 64 samples instead of 32")
    assert (f"what is left of {until} is counted in these steps" in change.why) == is_recounted


def test_weights_that_do_not_fit_are_fatal_for_what_built_them() -> None:
    many = [f"layers.{i}.weight is not in the checkpoint" for i in range(5)]
    changed = run_metadata("model.args.width=128", "model.compile=true", "optimizer.lr=0.1")
    kinds = {each.path: each.kind for each in compare(run_metadata(), changed, step=STEP, mismatches=many)}
    assert kinds == {"model.args.width": "fatal", "optimizer.lr": "maths", "model.compile": "safe"}
    edited = only(compare(run_metadata(), run_metadata(sources={"mynets": HASH["b"]}), step=STEP, mismatches=many))
    assert (edited.path, edited.kind) == ("code", "fatal")
    assert edited.why.startswith(f"{'; '.join(many[:3])} and 2 more: put it back")
    found = compare(run_metadata(), run_metadata(**OTHER_DATA), step=STEP, mismatches=many)
    assert [(each.path, each.kind) for each in found] == [("model", "fatal"), ("data.train", "maths")]


def test_the_gravest_comes_first() -> None:
    changed = run_metadata("log.every=1steps", "seed=7", "optimizer.use=sgd", "name=other", python="3.12.1")
    assert [each.kind for each in compare(run_metadata(), changed, step=STEP)] == [
        "fatal",
        "maths",
        "safe",
        "safe",
        "safe",
    ]


@pytest.mark.parametrize(
    "print_",
    [
        None,
        "sha256:aa (the type only: this dataset cannot be read without using it up)",
        "sha256:aa (type and length only: none of 90 items could be read in time)",
    ],
)
def test_a_fingerprint_that_says_too_little(print_: str | None) -> None:
    before, after = (
        run_metadata(data={"train": print_}),
        run_metadata("data.train.args.path=b.txt", data={"train": print_}),
    )
    found = compare(before, after, step=STEP)
    assert [(each.path, each.kind) for each in found] == [("data.train.args.path", "maths"), ("data.train", "safe")]
    change = only(compare(before, before, step=STEP))
    assert (change.path, change.why) == ("data.train", "whether the data is the same is not known")


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("all 90 items", "all 90 items", "maths"),
        ("all 90 items", "all 91 items", "maths"),
        ("all 90 items", "only 16 of 90 items, as they are slow to read", "safe"),
        ("only 4 of 90 items, as they are slow to read", "only 16 of 90 items, as they are slow to read", "safe"),
        ("only 16 of 90 items, as they are slow to read", "only 16 of 90 items, as they are slow to read", "maths"),
        ("only 16 of 90 items, as they are slow to read", "only 16 of 91 items, as they are slow to read", "maths"),
        ("all 90 items", "all 90 items, without those in quarantine", "safe"),
        ("all 90 items, without those in quarantine", "all 90 items, without those in quarantine", "safe"),
        ("all 90 items, without those in quarantine", "all 91 items, without those in quarantine", "maths"),
        ("the type, the length and 64 of 900 items", "the type, the length and 64 of 900 items", "maths"),
        ("the whole content", "all 90 items", "maths"),
    ],
)
def test_other_hashes_tell_of_other_data_where_they_cover_the_same_items(was: str, now: str, kind: str) -> None:
    before, after = (
        run_metadata(data={"train": f"sha256:{letter} ({how})"}) for letter, how in (("a", was), ("b", now))
    )
    change = only(compare(before, after, step=STEP))
    assert (change.path, change.kind) == ("data.train", kind)


def test_the_words_of_a_stream_are_those_that_are_looked_for() -> None:
    from torch.utils.data import IterableDataset

    from trainwright.data.fingerprint import fingerprint

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    assert "the type only" in fingerprint(Stream()).how


@pytest.mark.parametrize(
    ("before", "after", "path", "kind", "word"),
    [
        ({"data": {"train": None}}, {}, "data.train", "safe", "not known"),
        ({"data": {}}, {}, "data.train", "safe", "not known"),
        ({"data": {"val": "a"}}, {"data": {"val": "b"}}, "data.val", "safe", "not trained on"),
        ({"data": {"val": None}}, {"data": {"val": "b"}}, "data.val", "safe", "not known"),
        ({"data": {"val": "(the type only)"}}, {"data": {"val": "(the type only)"}}, "data.val", "safe", "not known"),
        ({"sources": {"__main__.A": "a"}}, {"sources": {"__main__.A": "b"}}, "code", "maths", "source of __main__.A"),
        ({"sources": {"__main__.A": None}}, {"sources": {"__main__.A": None}}, "code", "safe", "A is the same is not"),
        ({"sources": {}}, {"sources": {"__main__.A": "b"}}, "code", "safe", "__main__.A is the same is not known"),
        ({"git": None}, {}, "code", "safe", "are the same; what they import"),
        ({"git": None, "sources": {"mynets": None}}, {"sources": {"mynets": None}}, "code", "safe", "not known"),
        ({"git": None, "sources": {}}, {"sources": {}}, "code", "safe", "names no file of yours"),
        ({"git": None, "sources": {"old": "a"}}, {"sources": {"new": "a"}}, "code", "safe", "not known"),
        ({"packages": None}, {}, "packages", "safe", "not known"),
        ({"packages": with_package("peft", "0.18.0")}, {}, "packages.peft", "safe", "last bits"),
        ({"packages": with_package("transformers", "4.55.1")}, {}, "packages.transformers", "safe", "last bits"),
        ({"packages": {**with_package("torch", "2.12.0"), "sha256": HASH["b"]}}, {}, "packages", "safe", "others"),
        ({"python": "3.12.1"}, {}, "python", "safe", "last bits"),
        ({"driver": "570.86"}, {}, "driver", "safe", "last bits"),
        ({"hostname": "node-2"}, {}, "hostname", "safe", "another GPU"),
        ({"environment": {"MKL_CBWR": "AVX2"}}, {}, "environment.MKL_CBWR", "safe", "last bits"),
        ({"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, {}, "environment.NVIDIA_TF32_OVERRIDE", "maths", "precision"),
    ],
)  # fmt: skip
def test_where_a_run_comes_from(before: dict[str, Any], after: dict[str, Any], path: str, kind: str, word: str) -> None:
    known: dict[str, Any] = {"data": {}} if "data" in before and path == "data.val" else {}
    sides = [provenance(**{**known, **side}) for side in (before, after)]
    for change in (only(compare_provenance(*sides)), only(compare_provenance(*reversed(sides)))):
        assert (change.path, change.kind) == (path, kind)
        assert word in change.why


def test_untracked_files_and_variables_of_a_job_are_no_difference() -> None:
    git = {"commit": "c" * 40, "dirty": True, "diff_sha256": None}
    there = provenance(git=git, environment={"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3"}, platform="Linux 7")
    assert compare_provenance(provenance(), there) == []


def test_provenance_before_sources_were_kept() -> None:
    before = provenance(git={"commit": "d" * 40, "dirty": False, "diff_sha256": HASH["e"]})
    del before["sources"]
    change = only(compare_provenance(before, provenance()))
    assert (change.before, change.after) == ("dddddddddddd with changes eeeeeeeeeeee", "cccccccccccc")
    assert "not known" in change.why


def test_a_file_that_was_edited_in_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "nets_to_edit.py"
    named = recipe("model.use=nets_to_edit:Net", "data.train.use=digits")
    found = []
    for source in ("class Net: ...\n", "class Net: ...\n", "class Net:\n    width = 2\n"):
        file.write_text(source)
        importlib.import_module("nets_to_edit")
        prints = {"train": f"sha256:{HASH['a']} (all items)"}
        modules = modules_of(named)
        where = written_provenance(data_fingerprints=prints, seeds={}, command=[], folder=tmp_path, modules=modules)
        found.append({"recipe": named, "provenance": json.loads(json.dumps(where))})
    assert compare(found[0], found[1], step=STEP) == []
    change = only(compare(found[1], found[2], step=STEP))
    assert (change.path, change.kind, change.why) == ("code", "maths", "the source of nets_to_edit differs")


COMMAND = "trainwright resume runs/my-run"


def refusal(changes: list[Change], *accept: str, command: str = COMMAND) -> UsageError:
    with pytest.raises(UsageError) as caught:
        require_accepted(changes, accept, command=on_command_line(command))
    return caught.value


def changes_by(*settings: str) -> list[Change]:
    return compare(run_metadata(), run_metadata(*settings), step=STEP)


def test_what_is_safe_needs_no_word() -> None:
    assert (
        require_accepted(changes_by("until=2000steps", "log.every=1steps"), [], command=on_command_line(COMMAND)) == []
    )


@pytest.mark.parametrize(
    "accept", [["optimizer.lr", "seed"], ["optimizer", "seed"], ["all"], ["seed", "optimizer", "name"]]
)
def test_what_is_accepted_is_returned(accept: list[str]) -> None:
    changes = changes_by("optimizer.lr=0.0003", "seed=7", "log.every=1steps")
    assert {each.path for each in require_accepted(changes, accept, command=on_command_line(COMMAND))} == {
        "optimizer.lr",
        "seed",
    }


def test_the_example_of_the_page() -> None:
    error = refusal(
        changes_by("optimizer.lr=0.0003", "seed=7"), command=f"{COMMAND} --set optimizer.lr=3e-4 --set seed=7"
    )
    assert f"error: {error}" in DOCS.read_text()


def test_the_command_accepts_all_that_is_left_and_what_was_accepted() -> None:
    changes = changes_by("optimizer.lr=0.0003", "optimizer.clip.at=0.5", "loss.use=mse", "model.args={a b: 1}")
    error = refusal(changes, "optimizer", "name")
    assert error.remedy.endswith(
        f"{COMMAND} --accept optimizer --accept name --accept 'model.args.a b' --accept loss.use"
    )
    assert "optimizer.lr" not in error.message


def test_a_path_that_covers_another_is_enough() -> None:
    changes = compare(run_metadata(), run_metadata("data.train.args.path=b.txt", **OTHER_DATA), step=STEP)
    assert refusal(changes).remedy.endswith(f"{COMMAND} --accept data.train")
    assert len(require_accepted(changes, ["data.train"], command=on_command_line(COMMAND))) == 2


def test_a_half_of_a_name_covers_nothing() -> None:
    assert (
        "optimizer.lr_rule.rule"
        in refusal(changes_by("optimizer.lr_rule={rule: linear, base_batch: 8}"), "optimizer.lr").message
    )


def test_what_is_fatal_cannot_be_accepted() -> None:
    error = refusal(changes_by("optimizer.use=sgd", "seed=7", "until=300steps"), "all")
    assert error.message.count("(fatal)") == 2
    assert "seed" not in error.message
    assert error.remedy == f"undo what is fatal, then: {COMMAND} --accept all"


def test_the_command_leaves_out_what_is_fatal() -> None:
    sets = ["--set until=300steps", "--set=optimizer=sgd", "--set seed=7", "--set 'model.args.a b=1'", "--accept name"]
    error = refusal(
        changes_by("optimizer.use=sgd", "seed=7", "until=300steps"), "name", command=" ".join([COMMAND, *sets])
    )
    assert error.remedy.endswith(f"{COMMAND} --set seed=7 --set 'model.args.a b=1' --accept name --accept seed")
    shapes = compare(run_metadata("model.lora=null"), run_metadata("model.lora.rank=8"), step=STEP, mismatches=MISFITS)
    assert refusal(shapes, command=f"{COMMAND} --set model.lora.rank=8").remedy.endswith(f"then: {COMMAND}")
    data = compare(run_metadata(), run_metadata("model.freeze=[a]"), step=STEP, mismatches=MISFITS)
    assert "--set 'model.freeze=[a]' --accept" in refusal(data, command=f"{COMMAND} --set 'model.freeze=[a]'").remedy


def test_a_requeued_job_may_keep_its_command() -> None:
    for path in ("optimizer.lr", "model.args.width", "optimizer.groups.0.lr", "code", "packages.torch", "data.train"):
        assert require_accepted([], [path], command=on_command_line(COMMAND)) == []


def test_a_path_that_does_not_exist_is_told() -> None:
    error = refusal(changes_by("optimizer.lr=0.0003"), "optimiser.lr")
    assert "--accept optimiser.lr: there is no such path; did you mean 'optimizer.lr'?" in error.message
    assert error.remedy == f"undo them, or accept them: {COMMAND} --accept optimizer.lr"
    alone = refusal([], "lr", "seed")
    assert (alone.message.count("--accept"), alone.remedy) == (1, f"leave out what is no path: {COMMAND} --accept seed")
