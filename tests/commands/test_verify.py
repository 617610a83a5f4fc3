"""`verify checkpoint` finds each damage and accuses nothing whole; `verify resume` proves, or says what differs."""

from __future__ import annotations

import json
import operator
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import forked
from tests.training.processes import invoke
from trainwright.checkpoint.examination import differences
from trainwright.checkpoint.manifest import write_manifest
from trainwright.commands.verify import plain
from trainwright.commands.verify.resume import Proof, ResumeTrial, in_new_python, verify_resume
from trainwright.commands.verify.trial import TrialPart
from trainwright.errors import CheckpointError, TrainwrightError
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.training.resume import Earlier, find_earlier

PARTS = """\
import os, random
import numpy as np, torch

class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.linspace(0, index, 12) / 96 + 0.1 * torch.randn(12) + 0.1 * np.random.randn() + 0.1 * random.random()
        return x.float(), index % 3

class Unseeded(Drawn):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + os.urandom(1)[0] / 255, index % 3

class Broken(Drawn):
    def __getitem__(self, index):
        if index == 17:
            raise OSError("this image is truncated")
        return super().__getitem__(index)

class Dying(Drawn):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > 60:  # not where it is tried in a process apart
            os._exit(3)
        return super().__getitem__(index)

class Once(torch.utils.data.IterableDataset):
    rows = iter([(torch.full((12,), i / 40), i % 3) for i in range(40)])

    def __iter__(self):
        return self.rows

class Forgetful(torch.optim.SGD):
    # counts its steps where no checkpoint can see it
    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        return super().step(closure)
"""
RECIPE = """\
name: tiny
until: 60steps
model:
  use: mlp
  args: {sizes: [12, 24, 3], dropout: 0.2}
  ema: 0.9
data:
  train: {use: "parts:Drawn"}
  val: {use: "parts:Drawn"}
batch: {size: 8, micro: 4}
schedule: {use: cosine, warmup: 20steps}
precision: fp32
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aside"))
    (tmp_path / "aside").mkdir()
    sys.modules.pop("parts", None)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def prove(**options: Any) -> tuple[Proof, str]:
    """In processes that are forked; how much the verb says on the way counts, too."""
    spoken: list[str] = []
    trial = ResumeTrial(Path("tiny.yaml"), **{"workers": 0, "then_workers": 0, **options})
    proof = verify_resume(trial, say=spoken.append, run_part=forked.run_part)
    return proof, "\n".join([*spoken, *proof.lines()])


@pytest.mark.process
@pytest.mark.slow
def test_a_resumed_run_is_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line, in processes, one of them killed."""
    monkeypatch.setattr(verify_resume, "__kwdefaults__", {**verify_resume.__kwdefaults__, "run_part": forked.run_part})  # type: ignore[dict-item]
    code, message = invoke("verify", "resume", "tiny.yaml", "--json", "--workers", "0", "--then-workers", "0")
    *lines, last = message.splitlines()
    proof, text = json.loads(last), "\n".join(lines)
    assert code == 0 and proof["equal"] and "Traceback" not in text, text
    assert "6 steps and some, then SIGKILL" in text and "steps straight, " in text and "resumed to " in text
    assert (proof["tensors"], proof["samples"], proof["steps"], proof["killed"]) == (21, 96, 6, True)
    assert proof["cause"] is None and proof["checkpoint"] == []
    assert not list((folder / "aside").iterdir()), "nothing stays behind"
    assert not (folder / "runs").exists(), "the user's own runs are left alone"


@pytest.mark.process
@pytest.mark.slow
def test_a_part_runs_in_a_new_python(folder: Path) -> None:
    part = TrialPart("tiny.yaml", ["until=1steps", "schedule.warmup=0steps", "log.doctor=false"], "outcome.json")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])
    code = in_new_python(part, folder / "output.txt", {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    assert code == 0, (folder / "output.txt").read_text()
    assert json.loads((folder / "outcome.json").read_text())["step"] == 1


@pytest.mark.slow
def test_a_run_in_bf16_that_was_stopped_and_counts_its_time_is_the_same_bits(folder: Path) -> None:
    settings = ("precision=bf16", "until=60s", "checkpoint.every=1h")
    proof, text = prove(then_workers=2, steps=4, kill=False, settings=settings)
    assert proof.equal and proof.exit_code == 0 and "4 + stop + 4" in text, text
    assert not list((folder / "aside").iterdir())


@pytest.mark.slow
def test_randomness_that_nobody_seeded_is_found(folder: Path) -> None:
    (folder / "tiny.yaml").write_text(RECIPE.replace('train: {use: "parts:Drawn"}', 'train: {use: "parts:Unseeded"}'))
    proof, text = prove(steps=2)
    assert proof.exit_code == 1 and not proof.equal and proof.cause == "recipe"
    assert proof.log and proof.log.startswith("first at step 1, in loss: ") and "grad_norm" in proof.log
    assert any(each.what.startswith("model ") and (each.largest or 0) > 0 for each in proof.checkpoint)
    assert "NOT the same bits" in text and "not deterministic" in text and "kept: " in text
    assert proof.folder and proof.folder.parent == folder / "aside"
    assert {"straight", "halves"} <= {each.name for each in proof.folder.iterdir()}
    assert proof.upto == 2 and "resumed" not in text, "it is known before anything is resumed"
    assert json.loads(json.dumps(proof.to_json()))["checkpoint"][0].keys() == {"what", "how", "largest"}


@pytest.mark.slow
def test_state_that_no_checkpoint_holds_is_found_and_told_from_chance(folder: Path) -> None:
    (folder / "tiny.yaml").write_text(RECIPE + 'optimizer: {use: "parts:Forgetful", lr: 0.1}\n')
    proof, text = prove(steps=2)
    assert proof.cause == "resume", text
    assert proof.log and proof.log.startswith("first at step 3, in validation loss: "), "its update is the first"
    assert "two straight runs are the same bits" in text
    assert proof.folder and {each.name for each in proof.folder.iterdir()} >= {"straight", "halves", "again"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "code", "message"),
    [
        ("parts:Broken", 1, "this image is truncated for sample 17"),
        ("parts:Drawm", 2, "did you mean 'Drawn'"),
        ("parts:Once", 2, "the data gave 5 steps, and the proof needs 12\n  remedy: add --steps 2"),
        ("parts:Dying", 1, "the straight part ended with exit code 3"),
    ],
)
def test_a_mistake_is_passed_on(folder: Path, train: str, code: int, message: str) -> None:
    (folder / "tiny.yaml").write_text(RECIPE.replace('train: {use: "parts:Drawn"}', f'train: {{use: "{train}"}}'))
    with pytest.raises(TrainwrightError) as caught:
        prove()
    text = str(caught.value)
    assert caught.value.exit_code == code and message in text and "remedy" in text and "Traceback" not in text
    assert not list((folder / "aside").iterdir())


@pytest.mark.process
def test_a_wrong_recipe_is_told_before_anything_runs(folder: Path) -> None:
    code, message = invoke("verify", "resume", "tiny.yaml", "--set", "optimizer.lr=-1")
    assert code == 2 and "optimizer.lr" in message and "steps straight" not in message


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4 and 8."""
    root = tmp_path_factory.mktemp("trained")
    (root / "parts.py").write_text(PARTS)
    (root / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(str(root))
        sys.modules.pop("parts", None)
        settings = ["until=8steps", "schedule=constant", "checkpoint.every=4steps", "checkpoint.best=null"]
        code, message = invoke("train", "tiny.yaml", *(option for each in settings for option in ("--set", each)))
    assert code == 0, message
    return root / "runs/tiny"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.mark.slow
def test_what_is_whole_is_ok(run: Path) -> None:
    for path, count in ((run, 2), (run / "checkpoints", 2), (run / "checkpoints/step-00000004", 1)):
        code, message = invoke("verify", "checkpoint", str(path))
        assert code == 0 and message.count("ok ") == len(message.splitlines()) == count
        assert "step 4, " in message and "21 tensors" in message
    code, message = invoke("verify", "checkpoint", str(run), "--json")
    answer = json.loads(message.splitlines()[-1])
    assert answer["ok"] and [each["step"] for each in answer["checkpoints"]] == [8, 4]
    assert set(answer["checkpoints"][0]) == {"path", "ok", "step", "bytes", "tensors", "problems", "warnings"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def rewritten(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Damage that whoever wrote the manifest did not see."""

    def damage(folder: Path) -> None:
        change(folder)
        write_manifest(folder, 8)

    return damage


def without_reference(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / "model.safetensors")


def another_step(folder: Path) -> None:
    values = json.loads((folder / "state.json").read_text())
    values["rest"]["counters"]["step"] = 80
    (folder / "state.json").write_text(json.dumps(values))


def forged(where: str, value: Any = None) -> Callable[[Path], None]:
    """Another ``value`` at a place of state.json, or None for nothing there, and a manifest that fits it."""

    def change(folder: Path) -> None:
        values = json.loads((folder / "state.json").read_text())
        *path, last = (int(key) if key.isdigit() else key for key in where.split("."))
        at = reduce(operator.getitem, path, values)
        if value is None:
            del at[last]
        else:
            at[last] = value
        (folder / "state.json").write_text(json.dumps(values))

    return rewritten(change)


def wrong_random_state(folder: Path) -> None:
    tensors = load_file(folder / "rest.safetensors")
    tensors["rng.torch_cpu"] = tensors["rng.torch_cpu"][:7].clone()
    save_file(tensors, folder / "rest.safetensors")


FORGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a text for a number": (forged("rest.counters.num_samples", "64"), "rest.counters.num_samples is '64', not a"),
    "a huge number": (forged("rest.counters.num_tokens", 10**400), "rest.counters.num_tokens is 1000000"),
    "no number": (forged("rest.counters.elapsed_s", float("nan")), "rest.counters.elapsed_s is nan, not a finite"),
    "a list for a mapping": (forged("rest.data", [0, 32]), "rest.data is [0, 32], not a mapping"),
    "a text for a list": (forged("rest.quarantine", "none"), "rest.quarantine is 'none', not a list"),
    "a name for a group": (forged("rest.optimizer.param_groups.0", "weights"), "param_groups.0 is 'weights', not a"),
    "no counters": (forged("rest.counters"), "rest has no 'counters'"),
    "no position": (forged("rest.data.position"), "rest.data has no 'position'"),
    "another name": (forged("rest.ledger", {"skipped": []}), "rest.ledger has no 'entries'"),
    "no dtype": (forged("model.extra", {"__dtype__": "load"}), "torch.load is no dtype"),
    "gaps in memory": (
        forged("model.extra", {"__tensor__": "layers.head.weight", "stride": [10**12, 1]}),
        "leave gaps",
    ),
    "no sparse tensor": (forged("model.extra", {"__sparse__": {"indices": [], "values": 1, "size": "x"}}), "sparse"),
    "deeper than can be read": (
        rewritten(lambda it: (it / "state.json").write_text("[" * 10**5)),
        "nested too deeply",
    ),
    "a part of a random state": (rewritten(wrong_random_state), "RuntimeError"),
}
METADATA = {
    "no recipe": (forged("metadata.recipe"), "KeyError: 'recipe'"),
    "no plan": (forged("metadata.plan", "as before"), "metadata.plan is 'as before', not a mapping"),
    "threads": (forged("metadata.plan.threads", "2"), "metadata.plan.threads is '2', not a"),
    "precision": (forged("metadata.plan.precision", "fp64"), "metadata.plan.precision is 'fp64', not fp32 or "),
    "model": (forged("metadata.recipe.model.use", ["mlp"]), "metadata.recipe.model.use is ['mlp'], not a text"),
}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda it: flip(it / "rest.safetensors"), "rest.safetensors is damaged"),
    "cut": (lambda it: (it / "model.safetensors").write_bytes(b"x"), "model.safetensors is damaged"),
    "gone": (lambda it: (it / "state.json").unlink(), "state.json is missing"),
    "no manifest": (lambda it: (it / "manifest.json").unlink(), "manifest.json cannot be read"),
    "torn manifest": (lambda it: (it / "manifest.json").write_text('{"files": {'), "manifest.json cannot be read"),
    "planted pickle": (
        lambda it: (it / "evil.pkl").write_bytes(pickle.dumps(print)),
        "evil.pkl is not in the manifest",
    ),
    "planted folder": (lambda it: (it / "weights.pt").mkdir(), "weights.pt is not in the manifest"),
    "no header": (rewritten(lambda it: (it / "model.safetensors").write_bytes(b"x" * 99)), "is no safetensors file"),
    "no json": (rewritten(lambda it: (it / "state.json").write_text("{")), "state.json: it is not JSON"),
    "no part": (rewritten(lambda it: (it / "state.json").write_text("{}")), "state.json has no 'model'"),
    "no optimizer": (
        rewritten(lambda it: (it / "state.json").write_text('{"model": {}, "rest": {}}')),
        "state.json: rest has no 'optimizer'",
    ),
    "another step": (rewritten(another_step), "state.json holds step 80, and the manifest says 8"),
    "lost tensor": (rewritten(without_reference), "which is not in the tensors of model"),
    **FORGED,
}


def earlier_of(run: Path) -> tuple[Earlier, list[str]]:
    """Return the state that ``resume`` begins with, and its messages."""
    lock = RunLock.acquire(run)
    try:
        earlier = find_earlier(RunFolder.open(run), lock, ())
        return earlier, earlier.messages
    finally:
        lock.release(clean=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DAMAGES, *METADATA])
def test_damage_is_named_and_a_resume_steps_over_it(trained: Path, tmp_path: Path, name: str) -> None:
    """Metadata that no run has written is no damage of the files: only a resume reads it."""
    damage, what = {**DAMAGES, **METADATA}[name]
    run = Path(shutil.copytree(trained, tmp_path / name / "tiny"))
    newest = run / "checkpoints/step-00000008"
    damage(newest)
    if name in DAMAGES:
        code, message = invoke("verify", "checkpoint", str(run))
        assert code == 1 and "Traceback" not in message
        first, second = message.splitlines()
        assert first.startswith("broken ") and str(newest) in first and what in first, message
        assert second.startswith("ok ") and "step-00000004" in second
    if name.startswith("planted"):
        assert earlier_of(run)[1] == [], "the files beside are not read"
        return
    earlier, spoken = earlier_of(run)
    assert earlier.checkpoint == run / "checkpoints/step-00000004"
    assert [what in line and line.startswith("checkpoint skipped: ") for line in spoken] == [True], spoken
    shutil.rmtree(run / "checkpoints/step-00000004")
    with pytest.raises(CheckpointError, match="has no checkpoint that verifies") as caught:
        earlier_of(run)
    assert "start it again from step 0" in caught.value.remedy


def test_a_plan_that_no_run_has_written_cannot_be_begun_again(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert earlier_of(run)[0].checkpoint is None
    for text in ("[]", "{", '{"threads": 2}'):
        (run / "plan.json").write_text(text)
        with pytest.raises(CheckpointError, match="plan") as caught:
            earlier_of(run)
        assert "start it again from step 0" in caught.value.remedy


def test_a_planted_file_is_named_beside_other_damage(run: Path) -> None:
    newest = run / "checkpoints/step-00000008"
    (newest / "pytorch_model.bin").write_bytes(b"")
    flip(newest / "state.json")
    code, message = invoke("verify", "checkpoint", str(newest))
    assert code == 1 and "pytorch_model.bin is not in the manifest" in message and "state.json is damaged" in message


@pytest.mark.parametrize(
    ("part", "place", "value", "count"),
    [
        ("model", "weight", "nan", 1),
        ("model", "weight", "inf", 1),
        ("rest", "exp_avg", "-inf", 1),
        ("rest", "", "1.0", 0),
    ],
)
def test_values_that_are_not_finite_are_warned_of(run: Path, part: str, place: str, value: str, count: int) -> None:
    newest = run / "checkpoints/step-00000008"
    tensors = load_file(newest / f"{part}.safetensors")
    name = next(each for each, tensor in tensors.items() if place in each and tensor.is_floating_point())
    tensors[name].view(-1)[0] = float(value)
    save_file(tensors, newest / f"{part}.safetensors")
    write_manifest(newest, 8)
    code, message = invoke("verify", "checkpoint", str(newest))
    assert code == 0 and message.count("warning ") == count
    assert count == 0 or f"{part}.safetensors: 1 of {tensors[name].numel()} values of {name} are" in message


def test_a_mask_among_the_buffers_may_hold_infinity(run: Path) -> None:
    newest = run / "checkpoints/step-00000008"
    tensors = load_file(newest / "model.safetensors")
    tensors["mask"] = torch.full((3, 3), -torch.inf).triu(1)
    tensors["scales"] = torch.ones(3).to(torch.float8_e4m3fn)
    save_file(tensors, newest / "model.safetensors")
    write_manifest(newest, 8)
    assert invoke("verify", "checkpoint", str(newest))[1].count("warning ") == 0


def test_a_path_that_holds_none(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    code, message = invoke("verify", "checkpoint", str(run))
    assert code == 2 and "contains no checkpoint; it has " in message and "plan.json" in message and "remedy" in message
    assert "is not a folder" in invoke("verify", "checkpoint", str(run / "plan.json"))[1]
    assert "does not exist" in invoke("verify", "checkpoint", str(run / "nowhere"))[1]


def test_every_difference_of_two_checkpoints_is_named(run: Path) -> None:
    one, two = run / "checkpoints/step-00000008", run / "two"
    shutil.copytree(one, two)
    assert list(differences(one, two)) == []
    tensors = load_file(two / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 0.5
    save_file(tensors, two / "model.safetensors")
    values = json.loads((two / "state.json").read_text())
    values["rest"]["counters"]["elapsed_s"] = 7.0
    values["metadata"] = {"another": "time"}
    (two / "state.json").write_text(json.dumps(values))
    tensor, value = differences(one, two)
    assert tensor.what == f"model {name}" and tensor.largest == pytest.approx(0.5)
    assert value.what == "rest.counters.elapsed_s" and value.how.endswith(" and 7.0")


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_nan_equals_no_number_in_the_proof_of_a_plain_loop(value: float) -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert plain._same(nan, nan.clone()) and not plain._same(nan, torch.tensor([1.0, value]))
    assert plain._same(torch.tensor([True]), torch.tensor([True]))
