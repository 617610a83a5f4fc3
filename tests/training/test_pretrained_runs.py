"""Runs that start from a pretrained model: recipes, tw.fit, resume after a kill, export to the hub's layout."""

from __future__ import annotations

import json
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import trainwright as tw
from tests import forked
from tests.finetune.sets import chat, lines
from tests.finetune.tokenizers import make_tokenizer
from trainwright.commands.export import export
from trainwright.commands.verify.resume import ResumeTrial, verify_resume
from trainwright.errors import UsageError
from trainwright.finetune.datasets import Chat
from trainwright.recipe import load
from trainwright.runs.folder import RunFolder
from trainwright.training.result import Result
from trainwright.training.run import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT asks transformers
]
IDS = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(0))
DATA = """\
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, classes=0):
        self.classes = classes or None

    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(0, 96, (8,), generator=torch.Generator().manual_seed(index))
        labels = torch.tensor(index % self.classes) if self.classes else ids
        return {"input_ids": ids, "labels": labels}
"""
ALL_KINDS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 4, "targets": "all-linear"},
    "dora": {"rank": 4, "dora": True},
    "rslora": {"rank": 4, "rslora": True},
    "pissa": {"rank": 4, "init": "pissa"},
    "nf4": {"rank": 4, "quantize": "nf4"},
    "int4": {"rank": 4, "quantize": "int4"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a dataset in rows.py and a model with a tokenizer's files in base/."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sys.modules.pop("rows", None)
    (tmp_path / "rows.py").write_text(DATA)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **sizes)).save_pretrained("base")
    (tmp_path / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def recipe(**model: Any) -> Path:
    """Write a recipe that trains ``base`` for 4 steps."""
    content = {
        "name": "it",
        "until": "4steps",
        "model": {"use": "hf", "name": "base", **model},
        "data": {"train": {"use": "rows:Rows"}},
        "loss": "of_model",
        "batch": {"size": 8},
        "optimizer": {"lr": 0.01},
        "checkpoint": {"every": "2steps"},
        "log": {"doctor": False},
    }
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def trained(**model: Any) -> Result:
    return train(load(recipe(**model), environ={}), quiet=True)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


def model_of(result: Result) -> Any:
    assert result.state is not None
    return result.state.model


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_export_loads_in_transformers_without_the_base_model(folder: Path, kind: str) -> None:
    import transformers

    result = trained(lora=ALL_KINDS[kind])
    trained_model, base = model_of(result), Path("base")
    base.rename("elsewhere")
    done = export(result.run, format="hf", out=folder / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.path)
    if kind == "full":
        assert torch.equal(logits(loaded), logits(trained_model))
    else:
        torch.testing.assert_close(logits(loaded), logits(trained_model), rtol=1e-3, atol=1e-4)
    original = transformers.AutoModelForCausalLM.from_pretrained("elsewhere")
    assert not torch.allclose(logits(loaded), logits(original), atol=1e-2)
    names = {path.name for path in done.path.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert loaded.config.use_cache is True and loaded.config.architectures == ["LlamaForCausalLM"]


def test_merged_weights_are_those_of_peft(folder: Path) -> None:
    """An export of the adapter, loaded and merged by PEFT, has the bits of the merged export."""
    import peft
    import transformers

    result = trained(lora=ALL_KINDS["dora"])
    merged = transformers.AutoModelForCausalLM.from_pretrained(export(result.run, format="hf").path)
    alone = export(result.run, format="hf", adapter=True).path
    settings = json.loads((alone / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base" and settings["use_dora"] is True
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("base"), alone)
    assert torch.equal(logits(theirs), logits(model_of(result)))
    assert torch.equal(logits(theirs.merge_and_unload()), logits(merged))


def test_pissa_alone_does_not_fit_the_base(folder: Path) -> None:
    result = trained(lora=ALL_KINDS["pissa"])
    with pytest.raises(UsageError, match="began as pissa") as caught:
        export(result.run, format="hf", adapter=True)
    assert "merged" in caught.value.remedy


@pytest.mark.parametrize("has_lora", [False, True])
def test_a_new_head_is_trained_reported_and_exported(folder: Path, has_lora: bool) -> None:
    import peft
    import transformers

    path = recipe(architecture="LlamaForSequenceClassification", lora=ALL_KINDS["lora"] if has_lora else None)
    content = yaml.safe_load(path.read_text())
    content["data"]["train"]["args"] = {"classes": 3}
    content["model"]["args"] = {"pad_token_id": 0}
    path.write_text(yaml.safe_dump(content))
    result = train(load(path, environ={}), quiet=True)
    notes = {each["topic"]: each["choice"] for each in json.loads((result.run / "plan.json").read_text())["notes"]}
    assert notes["new weights"] == "score.weight" and notes["not used"] == "lm_head.weight"
    model = model_of(result)
    assert model.score.weight.shape == (3, 64) and model.score.weight.requires_grad
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(export(result.run, format="hf").path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-3, atol=1e-5)
    if has_lora:
        alone = export(result.run, format="hf", adapter=True).path
        config = {"num_labels": 3, "pad_token_id": 0}
        base = transformers.AutoModelForSequenceClassification.from_pretrained("base", **config)
        assert torch.equal(logits(peft.PeftModel.from_pretrained(base, alone)), logits(model))


def test_bf16_base_with_fp32_adapters(folder: Path) -> None:
    result = trained(dtype="bf16", lora=ALL_KINDS["lora"])
    dtypes = {name: each.dtype for name, each in model_of(result).named_parameters()}
    assert {each for name, each in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {each for name, each in dtypes.items() if "lora_" not in name} == {torch.bfloat16}
    config = json.loads((export(result.run, format="hf").path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.process
def test_a_killed_run_resumes_to_the_same_bits(folder: Path) -> None:
    path = recipe(lora=ALL_KINDS["nf4"])
    proof = verify_resume(ResumeTrial(path, steps=2, workers=0, then_workers=0), run_part=forked.run_part)
    assert proof.exit_code == 0, proof.lines()


def test_a_resume_reports_a_changed_base_model(folder: Path) -> None:
    run = RunFolder.open(trained(lora=ALL_KINDS["lora"]).run)
    provenance = json.loads(run.provenance.read_text())
    assert provenance["base"]["name"] == "base" and provenance["base"]["revision"].startswith("sha256:")
    longer = load(run.recipe, overrides=["until=6steps"], environ={})
    assert train(longer, resume=run, quiet=True).step == 6
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained("base")
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save_pretrained("base")
    longer = load(run.recipe, overrides=["until=8steps"], environ={})
    with pytest.raises(UsageError, match="files of the pretrained model differ") as caught:
        train(longer, resume=run, quiet=True)
    assert "--accept model.args.name" in caught.value.remedy
    before = model_of(train(longer, resume=run, accept=["model.args"], quiet=True))
    assert not torch.equal(before.lm_head.weight, other.lm_head.weight)  # the weights are those of the checkpoint


# ── tw.fit ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["base", Path("base")], ids=["name", "path"])
def test_fit_takes_a_name(folder: Path, name: str | Path) -> None:
    import transformers

    data = {"input_ids": IDS.repeat(4, 1), "labels": IDS.repeat(4, 1)}
    by_name = tw.fit(name, data, batch=4, steps=3, seed=1, quiet=True)
    model = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32, use_cache=False)
    loaded = tw.fit(model, data, batch=4, steps=3, seed=1, quiet=True)
    assert by_name.loss == loaded.loss
    provenance = json.loads((by_name.run / "provenance.json").read_text())
    assert provenance["base"]["name"] == "base"
    exported = transformers.AutoModelForCausalLM.from_pretrained(export(by_name.run, format="hf").path)
    assert torch.equal(logits(exported), logits(model_of(by_name)))


@pytest.mark.parametrize(
    "settings", [{"model.args.dtype": "bf16"}, {"model": {"args": {"dtype": "bf16"}}}, {"model.dtype": "bf16"}]
)
def test_fit_loads_a_named_model_with_its_args(folder: Path, settings: dict[str, Any]) -> None:
    data = {"input_ids": IDS.repeat(4, 1), "labels": IDS.repeat(4, 1)}
    assert model_of(tw.fit("base", data, batch=4, steps=1, settings=settings, quiet=True)).dtype == torch.bfloat16


def test_fit_refuses_a_name_that_is_nowhere(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder ./bse") as caught:
        tw.fit("./bse", {"input_ids": IDS, "labels": IDS}, steps=1, quiet=True)
    assert "did you mean base?" in caught.value.remedy


@pytest.mark.parametrize("dora", [False, True])
def test_a_peft_model_is_merged_and_exported_from_its_run(folder: Path, dora: bool) -> None:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).train()
    data = {"input_ids": IDS.repeat(4, 1), "labels": IDS.repeat(4, 1)}
    run = tw.fit(adapted, data, batch=4, steps=3, lr=0.01, quiet=True).run
    alone = export(run, format="hf", adapter=True).path
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, alone)
    assert torch.equal(logits(loaded), logits(adapted))
    merged = transformers.AutoModelForCausalLM.from_pretrained(export(run, format="hf").path)
    assert torch.equal(logits(merged), logits(loaded.merge_and_unload()))


# ── the export ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("added", [[], ["<tool>", "zzqx"]], ids=["as in the base", "with added tokens"])
def test_an_export_has_the_tokenizer_of_the_data(folder: Path, added: list[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tokenizer().save_pretrained("base")
    base_file = (folder / "base" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(added)
    (folder / "chats.jsonl").write_bytes(lines([chat(at) for at in range(8)]))
    model = AutoModelForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(len(tokenizer))
    data = Chat("chats.jsonl", tokenizer=tokenizer, cache="cache", max_length=32, truncate="right")
    result = tw.fit(model, data, "hf_causal_lm", steps=1, batch=8, quiet=True)
    done = export(result.run, format="hf")
    written = AutoTokenizer.from_pretrained(done.path)
    assert written.get_vocab() == tokenizer.get_vocab() and written.chat_template == tokenizer.chat_template
    assert ((done.path / "tokenizer.json").read_bytes() == base_file) == (not added)


def test_the_model_card_states_the_run(folder: Path) -> None:
    result = trained(lora=ALL_KINDS["lora"])
    card = (export(result.run, format="hf").path / "README.md").read_text()
    matter = yaml.safe_load(card.split("---")[1])
    assert matter == {"library_name": "transformers", "base_model": "base", "tags": ["trainwright", "lora"]}
    assert "# license: to be added by the author" in card
    provenance = json.loads((result.run / "provenance.json").read_text())
    assert f"| train | `{provenance['data']['train']}` |" in card
    assert f"revision `{provenance['base']['revision']}`" in card and f"| torch | {torch.__version__} |" in card
    assert "for 4 steps" in card and "| step | training loss | learning rate |" in card and "rank: 4" in card


EXPORTING = """\
import sys
import safetensors.torch
from pathlib import Path
from trainwright.commands.export import export

export(Path(sys.argv[1]), format="hf", out=Path(sys.argv[2]))
"""
PAUSED = """\
import time
import trainwright.commands.export as module

def paused(*arguments):
    print("writing", flush=True)
    time.sleep(300)

module.model_card = paused
"""


@pytest.mark.process
def test_an_export_that_is_killed_leaves_nothing_and_is_repeated_to_the_same_bits(folder: Path) -> None:
    run = trained(lora=ALL_KINDS["nf4"]).run
    done = export(run, format="hf", out=folder / "whole").path
    process = forked.Forked(PAUSED + EXPORTING, str(run), str(folder / "out"))
    while "writing" not in process.stdout:  # the weights are written, the folder is not complete
        assert process.poll() is None, process.stderr
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (folder / "out").exists()
    again = export(run, format="hf", out=folder / "out").path
    contents = [{path.name: path.read_bytes() for path in each.iterdir()} for each in (done, again)]
    assert contents[0] == contents[1] and not list(folder.glob(".*.draft"))
