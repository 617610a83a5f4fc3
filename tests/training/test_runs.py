"""Whole runs through the command line: real processes, real signals, real files."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.disks import small_disk
from tests.forked import COMMAND_LINE
from tests.training.processes import RECIPE, SLOWLY, invoke, start, wait_for_step
from tests.training.small_recipes import SMALL
from trainwright.checkpoint.store import newest_valid
from trainwright.recipe.load import builtin_recipes
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Evaluated, Saved, Skipped, Started, Step


@pytest.mark.examined
@pytest.mark.slow
def test_a_run_folder_has_its_papers(folder: Path) -> None:
    code, said = invoke("train", "slow.yaml", "--json", "--set", "until=25steps")
    assert code == 0
    result = json.loads(said.splitlines()[-1])
    assert set(result) == {
        *("run", "ending", "step", "loss", "val_loss", "skipped", "verdict", "findings"),
        *("energy_kwh", "usd", "co2_g"),
    }
    assert (result["ending"], result["step"], result["val_loss"], result["skipped"]) == ("finished", 25, None, 0)
    run = folder / result["run"]
    papers = {path.name for path in run.iterdir()}
    assert papers >= {"recipe.yaml", "plan.json", "model.json", "provenance.json", "log.jsonl", "checkpoints"}
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["data"]["train"].startswith("sha256:") and provenance["seeds"]["seed"] == 1337
    kinds = [type(record) for record in read(run / "log.jsonl").records]
    assert kinds[0] is Started and kinds[-1] is Ended and kinds.count(Saved) == 2
    assert invoke("train", str(run / "recipe.yaml"))[0] == 0, "the recipe in the folder runs as it stands"


EARLIER_RUN = "runs/halves was stopped; runs/halves-2 is a new run. To continue the earlier one: "


@pytest.mark.examined
@pytest.mark.slow
def test_sigterm_saves_and_the_resumed_run_has_the_same_bits(folder: Path) -> None:
    """With two workers, and without any after the resume."""
    (folder / "slow.yaml").write_text(RECIPE.replace("WORKERS", "2"))
    code, _ = invoke("train", "slow.yaml", "--set", "name=straight", "--set", "precision=fp32")
    assert code == 0
    stopped = start("train", "slow.yaml", "--set", "name=halves", "--set", "precision=fp32", cwd=folder)
    wait_for_step(folder / "runs/halves/log.jsonl", 25)
    stopped.send_signal(signal.SIGTERM)
    said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 75, said
    assert "trainwright resume runs/halves" in said and "Traceback" not in said
    halfway, broken = newest_valid(folder / "runs/halves/checkpoints")
    assert halfway is not None and not broken
    assert 25 <= int(halfway.name.removeprefix("step-")) < 60
    assert EARLIER_RUN in invoke("train", "slow.yaml", "--set", "name=halves", "--set", "until=2steps")[1]
    assert invoke("resume", "runs/halves", "--set", "data.workers=0")[0] == 0
    straight = load_file(folder / "runs/straight/checkpoints/step-00000060/model.safetensors")
    halves = load_file(folder / "runs/halves/checkpoints/step-00000060/model.safetensors")
    assert {k: v.numpy().tobytes() for k, v in straight.items()} == {k: v.numpy().tobytes() for k, v in halves.items()}


TOKENS = """\
import time
import torch

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.008)
        ids = torch.randint(0, 32, (33,))
        return ids[:-1], ids[1:]
"""
LEFT_OPEN = """\
name: open
until: 20steps
precision: fp32
model:
  use: gpt
  args: {vocab_size: 32, block_size: 32, layers: 2, heads: 2, d_model: 32, dropout: 0.1}
  activation_checkpointing: 1.5MiB
data:
  train: {use: "tokens:Tokens"}
loss: language_model
batch: {size: 12, micro: auto}
checkpoint: {every: 10steps}
log: {every: 2steps, doctor: false}
"""


@pytest.mark.slow
def test_what_was_left_to_the_plan_stays_over_a_resume(folder: Path) -> None:
    """In that memory two micro-batches fit, with one of the two blocks computed again."""
    (folder / "tokens.py").write_text(TOKENS)
    (folder / "open.yaml").write_text(LEFT_OPEN)
    assert invoke("train", "open.yaml", "--set=name=straight")[0] == 0
    stopped = start("train", "open.yaml", "--set=name=halves", cwd=folder)
    wait_for_step(folder / "runs/halves/log.jsonl", 6)
    stopped.send_signal(signal.SIGTERM)
    said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 75, said
    assert invoke("resume", "runs/halves")[0] == 0
    plans = [json.loads((folder / "runs" / name / "plan.json").read_text()) for name in ("straight", "halves")]
    settled = plans[0]["settled"]
    assert plans[1]["settled"] == settled
    assert settled["micro"] == 6
    assert [keep is not None for keep in settled["recompute"]] == [True, False]
    straight = load_file(folder / "runs/straight/checkpoints/step-00000020/model.safetensors")
    halves = load_file(folder / "runs/halves/checkpoints/step-00000020/model.safetensors")
    assert {k: v.numpy().tobytes() for k, v in straight.items()} == {k: v.numpy().tobytes() for k, v in halves.items()}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reaches_the_whole_group_and_workers_do_not_die_of_it(folder: Path, number: signal.Signals) -> None:
    settings = ["data.workers=2", "checkpoint.every=null", "until=5000steps"]
    options = [option for each in settings for option in ("--set", each)]
    running = start("train", "slow.yaml", *options, cwd=folder, group=True)
    wait_for_step(folder / "runs/slow/log.jsonl", 10)
    os.killpg(running.pid, number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 75, said
    assert newest_valid(folder / "runs/slow/checkpoints")[0] is not None


@pytest.mark.process
def test_a_resume_keeps_what_it_was_told(folder: Path) -> None:
    assert invoke("train", "slow.yaml", "--set", "until=20steps", "--set", "schedule=constant")[0] == 0
    changed = ["resume", "runs/slow", "--set", "until=30steps", "--set", "optimizer.lr=1e-5"]
    refused = start(*changed, cwd=folder)
    said, _ = refused.communicate(timeout=120)
    assert refused.returncode == 2 and "optimizer.lr: 0.001 -> 1e-05 (changes the maths)" in said
    assert "resume runs/slow --set until=30steps --set optimizer.lr=1e-5 --accept optimizer.lr" in said
    code, said = invoke(*changed, "--accept", "optimizer.lr")
    assert code == 0, said
    started = [r for r in read(folder / "runs/slow/log.jsonl").records if isinstance(r, Started)]
    assert started[-1].accepted == ("optimizer.lr",)
    steps = [r for r in read(folder / "runs/slow/log.jsonl").records if isinstance(r, Step)]
    assert [r.lr for r in steps if r.step > 20] == [1e-5] * 2
    assert "until: 30steps" in (folder / "runs/slow/recipe.yaml").read_text()
    assert "until: 20steps" in (folder / "runs/slow/recipe-before-step-00000020.yaml").read_text()
    code, said = invoke("resume", "runs/slow")
    assert code == 2 and "30 steps" in said and "--set until=60steps" in said


@pytest.mark.slow
def test_a_resume_that_cannot_be(folder: Path) -> None:
    assert invoke("train", "slow.yaml", "--set", "until=10steps", "--set", "precision=fp32")[0] == 0
    recipe = folder / "runs/slow/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("precision: fp32", "precision: auto"))
    for setting, said in (
        ("optimizer.use=sgd", "fatal"),
        ("precision=fp16", "fp32 -> fp16 (changes the maths)"),
        ("model.args.sizes=[12, 9, 3]", "has the shape (9, 12), in the checkpoint (24, 12)"),
        ("until=5steps", "step 10 is reached already"),
    ):
        code, output = invoke("resume", "runs/slow", "--set", "until=20steps", "--set", setting)
        assert code == 2 and said in output and "remedy" in output, setting


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_does_not_push_good_ones_out(folder: Path) -> None:
    assert invoke("train", "slow.yaml", "--set", "until=40steps")[0] == 0
    with (folder / "runs/slow/checkpoints/step-00000040/rest.safetensors").open("ab") as file:
        file.write(b"x")
    options = ["--set", "checkpoint.keep=1", "--set", "checkpoint.every=2steps", "--set", "until=30steps"]
    code, said = invoke("resume", "runs/slow", *options, "--accept", "until")
    assert code == 0
    assert "step-00000040/rest.safetensors is damaged" in said and "resumed from" in said and "step-00000020" in said
    newest, _ = newest_valid(folder / "runs/slow/checkpoints")
    assert newest is not None and newest.name == "step-00000030"


@pytest.mark.examined
@pytest.mark.slow
def test_skipped_steps_are_logged_once_over_a_resume(folder: Path) -> None:
    (folder / "slowly.py").write_text(
        SLOWLY.replace("return x.float()", "x[0] = float('nan') if index == 5 else x[0]; return x.float()")
    )
    sys.modules.pop("slowly", None)
    assert invoke("train", "slow.yaml", "--set", "until=24steps", "--set", "log.doctor=true")[0] == 3, (
        "a sample that is NaN is a critical finding"
    )
    assert invoke("resume", "runs/slow", "--set", "until=36steps")[0] == 3
    skipped = [r for r in read(folder / "runs/slow/log.jsonl").records if isinstance(r, Skipped)]
    assert len(skipped) == 3 and len({r.step for r in skipped}) == 3
    assert all(5 in r.sample_ids for r in skipped)


INTO_HEAD = f"""\
import os, subprocess
head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE)
os.dup2(head.stdin.fileno(), 1)
head.stdin.close()
{COMMAND_LINE}
"""
"""As ``trainwright ... | head -1``."""


@pytest.mark.process
def test_a_reader_that_goes_away_ends_no_training(folder: Path) -> None:
    piped = forked.run(INTO_HEAD, "train", "slow.yaml", "--set", "until=10steps", cwd=folder)
    assert len(piped.stdout.splitlines()) == 1, piped.stderr
    assert isinstance(read(folder / "runs/slow/log.jsonl").records[-1], Ended)


SMALL_DEMO = [f"model.args.{each}" for each in ("layers=1", "heads=2", "d_model=32", "bigram=512")]
SMALL_DEMO = [option for each in (*SMALL_DEMO, "evaluation.batches=1") for option in ("--set", each)]


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bits(folder: Path) -> None:
    settings = [option for each in ("deterministic=true", "until=20steps") for option in ("--set", each)]
    for name in ("one", "two"):
        assert invoke("train", "slow.yaml", *settings, "--set", f"name={name}", "--set", "precision=bf16")[0] == 0
    one, two = (
        load_file(folder / f"runs/{name}/checkpoints/step-00000020/model.safetensors") for name in ("one", "two")
    )
    assert {k: v.numpy().tobytes() for k, v in one.items()} == {k: v.numpy().tobytes() for k, v in two.items()}
    torch.use_deterministic_algorithms(False)
    logs = [read(folder / f"runs/{name}/log.jsonl").records for name in ("one", "two")]
    hashes = [[r.ids_hash for r in log if isinstance(r, Step)] for log in logs]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == len(hashes[0])


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=300k") as disk:
        yield disk


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_committed(folder: Path, tiny_disk: Path) -> None:
    options = ["--set", f"folder={tiny_disk}", "--set", "checkpoint.every=10steps"]
    options += ["--set", "model.args.sizes=[12, 400, 3]"]  # 31 KiB of weights, 94 KiB a checkpoint with AdamW
    code, said = invoke("train", "slow.yaml", *options, "--set", "checkpoint.keep=50")
    assert code == 1, said
    assert "Traceback" not in said and "is not saved" in said and "MB left" in said
    assert "the last state could not be saved" in said
    newest, broken = newest_valid(tiny_disk / "slow/checkpoints")
    assert newest is not None and not broken and f"trainwright resume {tiny_disk}/slow" in said


@pytest.mark.examined
@pytest.mark.slow
def test_the_demo_reaches_a_verdict(folder: Path) -> None:
    code, said = invoke("demo", "--budget", "12steps", *SMALL_DEMO, "--json")
    assert code == 0
    result = json.loads(said.splitlines()[-1])
    assert result["step"] == 12 and result["val_loss"] < 4.6
    assert [said.count(f"sample at {title}") for title in ("the start", "the end")] == [1, 1]
    for line in (
        "device ",
        "parameters ",
        "theory says ln 103" if sys.version_info[:2] == (3, 11) else "theory",
        "verdict: ",
    ):
        assert line in said
    lines = [line for line in said.splitlines() if line and not line.startswith("{")]
    assert [line.split()[0] for line in lines[-3:]] == ["run", "reached", "next"]
    evaluated = [r for r in read(folder / "runs/demo/log.jsonl").records if isinstance(r, Evaluated)]
    assert evaluated[-1].loss == result["val_loss"]


def test_every_recipe_in_the_box_has_a_small_form() -> None:
    assert {path.name for path in builtin_recipes().glob("*.yaml")} == set(SMALL)


@pytest.mark.slow
def test_tensorboard_gets_what_the_log_has(folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, said = invoke("train", "slow.yaml", "--set", "until=10steps", "--set", "log.sinks=[tensorboard]")
    assert code == 0, said
    events = next((folder / "runs/slow").rglob("events.out.*")).parent
    seen = accumulator.EventAccumulator(str(events))
    seen.Reload()
    logged = [r for r in read(folder / "runs/slow/log.jsonl").records if isinstance(r, Step)]
    assert [(e.step, e.value) for e in seen.Scalars("train/loss")] == [
        (r.step, pytest.approx(r.loss, rel=1e-6)) for r in logged
    ]


@pytest.mark.slow
def test_lr_range_draws_a_picture(folder: Path) -> None:
    recipe = str(builtin_recipes() / "demo-digits.yaml")
    code, said = invoke("lr-range", recipe, "--steps", "60", "--lowest", "1e-4", "--out", "lr.svg", "--json")
    assert code == 0, said
    answer = json.loads(said.splitlines()[-1])
    assert 1e-3 < answer["suggestion"] < 2 and len(answer["lrs"]) == len(answer["losses"]) <= 60
    assert (folder / "lr.svg").read_text().startswith("<svg")
    for place in (said, (folder / "lr.svg").read_text()):
        assert f"suggestion {answer['suggestion']:.3g}" in place and "recipe 0.1" in place


def test_env_judges_this_machine() -> None:
    code, said = invoke("env", "--json")
    lines = json.loads(said.splitlines()[-1])["lines"]
    assert code == int(any(line["verdict"] == "bad" for line in lines))
    assert any("torch" in line["what"] and line["value"] for line in lines)
    assert invoke("env")[0] == code


def test_schema_is_a_schema() -> None:
    code, said = invoke("schema")
    assert code == 0
    schema = json.loads(said)
    assert schema["additionalProperties"] is False and "optimizer" in schema["properties"]
