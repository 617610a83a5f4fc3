"""Export: what other programs load is what was trained, in every format, from real runs."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import trainwright as tw
from tests import forked, ranks
from tests.disks import small_disk
from tests.training.processes import invoke
from trainwright.assembly.assemble import build_model
from trainwright.checkpoint.store import Best, checkpoints, write_best
from trainwright.cli import app
from trainwright.commands.export import Exported, export
from trainwright.errors import CheckpointError, RecipeError, StorageError, UsageError
from trainwright.recipe import from_mapping
from trainwright.runs.folder import RunFolder
from trainwright.training.result import Result
from trainwright.training.run import train

MINE = """\
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


class Letters(torch.utils.data.Dataset):
    classes = 11

    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def get_extra_state(self):
        return {"seen": 5, "where": ("a", 2.5)}

    def set_extra_state(self, state):
        assert state == {"seen": 5, "where": ("a", 2.5)}


def tiny(**sizes):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=8, n_layer=1, n_head=2, n_embd=8, vocab_size=11, **NO_TOKENS))


NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
"""
MLP: dict[str, Any] = {"use": "mlp", "args": {"sizes": [6, 8, 3]}}
GPT: dict[str, Any] = {"use": "gpt", "args": {"block_size": 8, "layers": 2, "heads": 2, "d_model": 16}}
HF: dict[str, Any] = {"use": "hf", "args": {"n_positions": 8, "n_layer": 2, "n_head": 2, "n_embd": 8}}
LORA = {"lora": {"rank": 3, "alpha": 12.0, "dropout": 0.1}}
LETTERS = {"data": {"train": "mine:Letters"}, "loss": "language_model"}
HF_LETTERS = {"data": {"train": "mine:Letters"}, "loss": "hf_causal_lm"}
theirs_warn = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers
IDS_BT = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sys.modules.pop("mine", None)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def recipe(model: dict[str, Any], **more: Any) -> dict[str, Any]:
    shared = {"name": "it", "until": "10steps", "precision": "fp32", "batch": {"size": 8}, "log": {"doctor": False}}
    kept = {"checkpoint": {"every": "5steps", "keep": 9}, "optimizer": {"lr": 0.05}}
    return {**shared, **kept, "data": {"train": "mine:Points"}, "model": model, **more}


def trained(model: dict[str, Any], **more: Any) -> Result:
    result = train(from_mapping(recipe(model, **more)), quiet=True)
    assert result.ending == "finished"
    return result


@pytest.fixture(scope="module")
def trained_mlp(tmp_path_factory: pytest.TempPathFactory) -> Result:
    root = tmp_path_factory.mktemp("mlp")
    (root / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(str(root))
        sys.modules.pop("mine", None)
        result = trained(MLP)
    return replace(result, run=root / result.run)


@pytest.fixture
def result(trained_mlp: Result, folder: Path) -> Result:
    """A run of ``MLP`` with checkpoints of steps 5 and 10, in a folder of its own."""
    return replace(trained_mlp, run=Path(shutil.copytree(trained_mlp.run, folder / "runs/it")))


def fitted(**settings: Any) -> Result:
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    return tw.fit(
        model, (x, x[:, :3]), nn.MSELoss(), until="6steps", settings={"log.doctor": False, **settings}, quiet=True
    )


def model_of(result: Result) -> nn.Module:
    assert result.state is not None
    return result.state.model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out = model.eval()(IDS_BT)
    return out if isinstance(out, Tensor) else out.logits


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


# ── safetensors and state_dict ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("use", [MLP, "mine:Tied"], ids=["mlp", "tied, with running statistics"])
def test_both_files_load_strictly_and_hold_what_was_trained(use: Any) -> None:
    result = trained(use, **({} if use is MLP else LETTERS))
    live = model_of(result)
    one, two = export(result.run, format="safetensors"), export(result.run, format="state_dict")
    assert one.path == result.run / "export/safetensors-step-00000010"
    assert [path.name for path in one.path.iterdir()] == ["model.safetensors"]
    assert [path.name for path in two.path.iterdir()] == ["model.pt"]
    assert one.bytes == (one.path / "model.safetensors").stat().st_size
    assert (one.step, one.tensors, one.format) == (10, len(live.state_dict()), "safetensors")
    for loaded in (load_file(one.path / "model.safetensors"), torch.load(two.path / "model.pt", weights_only=True)):
        assert same(loaded, live.state_dict())
        fresh = copy.deepcopy(live)
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        fresh.load_state_dict(loaded)
        assert same(fresh.state_dict(), live.state_dict())
    with safe_open(one.path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "10", "weights": "trained"}


@pytest.mark.slow
def test_the_average_is_another_file() -> None:
    result = trained({**MLP, "ema": 0.9})
    state = result.state
    assert state is not None
    one, average = export(result.run, format="safetensors"), export(result.run, format="safetensors", average=True)
    assert average.path.name == "safetensors-step-00000010-average"
    tensors = load_file(average.path / "model.safetensors")
    assert not same(tensors, load_file(one.path / "model.safetensors"))
    with state.ema.swapped():
        assert same(tensors, state.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"format": "safetensors", "average": True}, "no average", "model.ema"),
        ({"format": "safetensors", "adapter": True}, "trained no adapter", "leave --adapter out"),
        ({"format": "hf"}, "not for MLP", "safetensors"),
    ],
    ids=["average", "adapter", "hf"],
)
def test_what_a_run_does_not_have_is_refused(result: Result, options: Any, message: str, remedy: str) -> None:
    with pytest.raises((CheckpointError, UsageError), match=message) as caught:
        export(result.run, **options)
    assert remedy in caught.value.remedy
    assert list((result.run / "export").glob("*")) == [], "nothing half-written stays"


@pytest.mark.slow
def test_extra_state_is_kept_by_state_dict_and_refused_by_safetensors() -> None:
    result = trained({"use": "mine:Counting"})
    with pytest.raises(UsageError, match="_extra_state is not a tensor") as caught:
        export(result.run, format="safetensors")
    assert "state_dict" in caught.value.remedy
    done = export(result.run, format="state_dict")
    model_of(result).load_state_dict(torch.load(done.path / "model.pt", weights_only=True))


@pytest.mark.slow
def test_live_objects_need_no_building() -> None:
    result = fitted()
    done = export(result.run, format="safetensors")
    assert same(load_file(done.path / "model.safetensors"), model_of(result).state_dict())
    with pytest.raises(UsageError, match="cannot be built from its folder: model, data") as caught:
        export(result.run, format="hf")
    assert "--format safetensors" in caught.value.remedy


@pytest.mark.slow
def test_a_function_makes_the_model_of_an_adapter_again() -> None:
    pytest.importorskip("peft")
    settings = {"model.lora": {"rank": 2, "targets": ["0", "3"]}}
    result = tw.fit("tests.commands.made:make_without_optimizer", steps=6, settings=settings, seed=0, quiet=True)
    done = export(result.run, format="safetensors")
    merged = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    merged.load_state_dict(load_file(done.path / "model.safetensors"))
    x = torch.randn(8, 4)
    torch.testing.assert_close(merged.eval()(x), model_of(result).eval()(x))


# ── which checkpoint ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_which_checkpoint(result: Result) -> None:
    steps = {step: result.run / f"checkpoints/step-{step:08d}/model.safetensors" for step in (5, 10)}
    fifth = export(result.run, format="safetensors", which="5")
    assert (fifth.step, fifth.path.name) == (5, "safetensors-step-00000005")
    assert same(load_file(fifth.path / "model.safetensors"), load_file(steps[5]))
    assert not same(load_file(fifth.path / "model.safetensors"), load_file(steps[10]))
    write_best(result.run / "checkpoints", Best(5, "loss", 1.0))
    best = export(result.run, format="safetensors", which="best", out=Path("best"))
    assert best.step == 5 and same(load_file("best/model.safetensors"), load_file(steps[5]))
    for which, message in [("7", "no checkpoint of step 7"), ("newest", "'newest' is not last, best or a step")]:
        with pytest.raises(UsageError, match=message) as caught:
            export(result.run, format="safetensors", which=which)
        assert "5, 10" in caught.value.remedy


@pytest.mark.slow
def test_a_best_that_is_gone_or_never_was(result: Result) -> None:
    (result.run / "checkpoints/best.json").unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(UsageError, match="no best checkpoint") as caught:
            export(result.run, format="safetensors", which="best")
        assert "5, 10" in caught.value.remedy
        write_best(result.run / "checkpoints", Best(3, "loss", 1.0))


@pytest.mark.parametrize("which", ["last", "best", "5"])
def test_a_run_without_a_checkpoint_is_trained_first(tmp_path: Path, which: str) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(MLP)))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no checkpoint\n") as caught:
        export(tmp_path, format="safetensors", which=which)
    assert f"train {tmp_path / 'recipe.yaml'}" in caught.value.remedy


@pytest.mark.slow
def test_damaged_checkpoints_are_stepped_over_by_name(result: Result) -> None:
    newest, older = checkpoints(result.run / "checkpoints")
    (newest / "model.safetensors").write_bytes(b"torn")
    done = CliRunner().invoke(app, ["export", str(result.run), "--json"])
    assert done.exit_code == 0 and f"checkpoint skipped: {newest}/model.safetensors is damaged" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["step"] == 5 and str(newest) in answer["stepped_over"][0]
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        export(result.run, format="safetensors", which="10")
    (older / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint that verifies") as caught:
        export(result.run, format="state_dict")
    assert "state.json is missing" in caught.value.message and "model.safetensors is damaged" in caught.value.message


# ── where to ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_what_is_there_is_never_written_over(folder: Path, result: Result) -> None:
    first = export(result.run, format="safetensors")
    before = (first.path / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        export(result.run, format="safetensors", which="10")
    (folder / "file").write_text("mine")
    with pytest.raises(UsageError, match="file exists already"):
        export(result.run, format="safetensors", out=folder / "file")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        export(result.run, format="safetensors", out=folder / "file" / "below")
    assert (first.path / "model.safetensors").read_bytes() == before and (folder / "file").read_text() == "mine"
    deep = export(result.run, format="safetensors", out=folder / "new" / "and" / "deep")
    assert same(load_file(deep.path / "model.safetensors"), model_of(result).state_dict())
    assert {path.name for path in deep.path.parent.iterdir()} == {"deep"}


DRAFTING = """\
import sys, time
from pathlib import Path
from trainwright.commands.export import draft_folder
with draft_folder(Path(sys.argv[1])) as draft:
    (draft / "model.safetensors").write_bytes(bytes(1000))
    print("begun", flush=True)
    time.sleep(300)
"""


@pytest.mark.process
@pytest.mark.slow
def test_what_a_killed_export_left_is_removed_by_the_next_one(folder: Path, result: Result) -> None:
    dead, alive = (forked.Forked(DRAFTING, str(folder / name)) for name in ("first", "second"))
    for process in (dead, alive):
        while process.stdout != "begun\n":
            assert process.poll() is None, process.stderr
            time.sleep(0.01)
    dead.kill()
    dead.wait()
    (folder / ".mine.123.tmp").mkdir()
    export(result.run, format="safetensors", out=folder / "out")
    drafts = {path.name.split("-")[0] for path in folder.glob(".*")}
    assert drafts == {f".second.{alive.pid}", ".mine.123.tmp"}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=40k") as disk:
        yield disk


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(tiny_disk: Path) -> None:
    result = trained({"use": "mlp", "args": {"sizes": [6, 2000, 3]}})  # 72 KiB of weights
    for layout in ("safetensors", "state_dict"):
        with pytest.raises(StorageError, match="cannot write"):
            export(result.run, format=layout, out=tiny_disk / "out")
        assert list(tiny_disk.iterdir()) == []


# ── LoRA ───────────────────────────────────────────────────────────────────────────────────────────


def perplexed(result: Result) -> nn.Module:
    """The trained model, which must differ from its base or the tests would show nothing."""
    model = model_of(result)
    assert any("lora_B" in name and parameter.abs().max() > 0.01 for name, parameter in model.named_parameters())
    return model


def base_of(result: Result) -> nn.Module:
    """The model of the recipe without its adapters, built again."""
    loaded = tw.load(RunFolder.open(result.run).recipe)
    model, _ = build_model(loaded)
    saved = ranks.tensors_in(checkpoints(result.run / "checkpoints")[0])
    frozen = {name.replace(".base_layer", ""): each for name, each in saved.items() if ".lora_" not in name}
    built = model.state_dict()
    assert frozen and all(torch.equal(built[name], each) for name, each in frozen.items()), "the base is as it was"
    return model


@pytest.mark.slow
def test_adapters_are_merged_into_the_base_models_names() -> None:
    pytest.importorskip("peft")
    result = trained({**GPT, **LORA}, **LETTERS)
    base, adapted = base_of(result), perplexed(result)
    drawn = torch.get_rng_state()
    done, other = (export(result.run, format=layout) for layout in ("safetensors", "state_dict"))
    assert torch.equal(torch.get_rng_state(), drawn), "building the model leaves no trace"
    tensors = load_file(done.path / "model.safetensors")
    assert same(torch.load(other.path / "model.pt", weights_only=True), tensors)
    assert tensors.keys() == base.state_dict().keys() and done.tensors == len(tensors)
    layer: Any = adapted.get_submodule("blocks.0.attention.query")
    added = 12 / 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(
        tensors["blocks.0.attention.query.weight"], layer.base_layer.weight + added, rtol=1e-6, atol=1e-6
    )
    before = logits(base)
    base.load_state_dict(tensors)
    torch.testing.assert_close(logits(base), logits(adapted), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(base), before, atol=1e-2)


@pytest.mark.slow
def test_peft_loads_the_adapter() -> None:
    peft = pytest.importorskip("peft")
    result = trained({**GPT, **LORA, "ema": 0.9}, **LETTERS)
    adapted = perplexed(result)
    assert result.state is not None
    for average, name in ((False, "adapter-step-00000010"), (True, "adapter-step-00000010-average")):
        done = export(result.run, format="safetensors", adapter=True, average=average)
        assert done.path.name == name and done.tensors == 2 * 12
        assert {path.name for path in done.path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        loaded = peft.PeftModel.from_pretrained(base_of(result), done.path)
        assert torch.equal(logits(loaded), logits(adapted)) == (not average)
    with result.state.ema.swapped():
        assert torch.equal(logits(loaded), logits(adapted))


@pytest.mark.slow
def test_an_adapter_of_live_objects() -> None:
    peft = pytest.importorskip("peft")
    result = fitted(**{"model.lora": {"rank": 2, "targets": ["0", "2"]}})
    done = export(result.run, format="safetensors", adapter=True)
    merged = load_file(export(result.run, format="safetensors").path / "model.safetensors")
    torch.manual_seed(0)
    torch.randn(32, 6)
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.func.functional_call(base, merged, (x,)), model_of(result)(x))
    assert torch.equal(peft.PeftModel.from_pretrained(base, done.path)(x), model_of(result)(x))


@pytest.mark.slow
def test_a_tied_weight_is_not_merged_behind_ones_back() -> None:
    pytest.importorskip("peft")
    result = trained({"use": "mine:Tied", "lora": {"targets": ["head"]}}, **LETTERS)
    with pytest.raises(UsageError, match=r"would change embed\.weight and head\.weight") as caught:
        export(result.run, format="safetensors")
    assert "--adapter" in caught.value.remedy
    assert export(result.run, format="safetensors", adapter=True).tensors == 2


# ── the layout of transformers ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("model", [HF, {"use": "mine:tiny"}], ids=["hf", "a callable of one's own"])
def test_transformers_loads_the_same_logits(model: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    result = trained(model, **HF_LETTERS)
    done = export(result.run, format="hf")
    assert {"config.json", "model.safetensors"} <= {path.name for path in done.path.iterdir()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.path)
    assert torch.equal(logits(loaded), logits(model_of(result)))
    assert done.bytes == sum(path.stat().st_size for path in done.path.iterdir())


@pytest.mark.slow
@theirs_warn
def test_lora_on_transformers_merged_and_alone() -> None:
    """GPT-2's layers are transposed."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    result = trained({**HF, **LORA}, **HF_LETTERS)
    base, adapted = base_of(result), perplexed(result)
    merged = export(result.run, format="hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged.path)
    assert loaded.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(logits(loaded), logits(adapted), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(base), logits(adapted), atol=1e-3)
    alone = export(result.run, format="hf", adapter=True)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, alone.path)), logits(adapted))


@pytest.mark.slow
def test_the_layout_of_transformers_needs_no_code_of_the_run(folder: Path) -> None:
    pytest.importorskip("transformers")
    run = trained(HF, **HF_LETTERS).run
    (folder / "mine.py").unlink()
    sys.modules.pop("mine")
    assert export(run, format="hf").step == 10
    shutil.rmtree(run / "hub")  # as in a run of an earlier version
    with pytest.raises(RecipeError, match="no module 'mine'"):
        export(run, format="hf", out=folder / "other")
    assert export(run, format="safetensors").step == 10


@pytest.mark.slow
def test_a_recipe_that_no_longer_fits_is_said(folder: Path) -> None:
    result = trained(GPT, **LETTERS)
    recipe_file = result.run / "recipe.yaml"
    recipe_file.write_text(recipe_file.read_text().replace("d_model: 16", "d_model: 32"))
    with pytest.raises(CheckpointError, match=r"does not fit the model built from the recipe: .*size mismatch"):
        export(result.run, format="hf")


# ── the command line ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_verb(result: Result) -> None:
    run = result.run
    code, message = invoke("export", str(run))
    assert code == 0 and f"{run}/export/safetensors-step-00000010" in message and "step 10" in message
    code, message = invoke("export", str(run), "--format", "state_dict", "--out", "there", "--which", "5", "--json")
    assert code == 0
    answer = json.loads(message)
    size = Path("there/model.pt").stat().st_size
    expected = Exported(Path("there"), "state_dict", 5, 4, size)
    assert answer == expected.to_json()
    code, message = invoke("export", str(run), "--format", "safetensor")
    assert code == 2 and "did you mean 'safetensors'" in message
    code, message = invoke("export", "nowhere")
    assert code == 2 and "nowhere does not exist" in message


@pytest.mark.slow
def test_an_export_writes_through_no_link(folder: Path, result: Result) -> None:
    run, elsewhere = result.run, folder / "elsewhere"
    elsewhere.mkdir()
    (run / "export").symlink_to(elsewhere)
    code, message = invoke("export", str(run))
    assert code == 1 and "export: it is a symbolic link" in message and "remedy" in message
    assert list(elsewhere.iterdir()) == []
    (folder / "nowhere").symlink_to(elsewhere / "x")
    with pytest.raises(UsageError, match="exists already"):
        export(run, format="safetensors", out=folder / "nowhere")


@pytest.mark.slow
@theirs_warn
def test_every_command_of_the_page_runs(folder: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    house = Path(tw.__file__).parent.parent
    (folder / "recipes").mkdir()
    for name in ("gpt-tiny", "hf-lora"):  # on few samples, and without the doctor
        small = yaml.safe_load((house / f"recipes/{name}.yaml").read_text())
        small |= {"batch": {"size": 2}, "precision": "fp32", "log": {"doctor": False}}
        small["evaluation"]["batches"] = 1
        (folder / f"recipes/{name}.yaml").write_text(yaml.safe_dump(small))
    page = (house / "docs/how-to/export.md").read_text()
    names: dict[str, Any] = {}
    ran = 0
    for block in page.split("```")[1::2]:
        kind, _, text = block.partition("\n")
        if kind == "python":
            exec(text, names)
            ran += 1
            continue
        for line in text.splitlines():
            command = line.partition("#")[0].split()
            assert command[0] == "trainwright"
            code, message = invoke(*command[1:])
            assert code == 0, f"{line}\n{message}"
            ran += 1
    assert ran >= 8
