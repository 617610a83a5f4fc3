"""``trainwright init finetune``: recipes for a model and a file, and three commands to a merged model."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trainwright as tw
from tests.finetune.sets import chat, lines, pair
from tests.finetune.tokenizers import make_tokenizer
from tests.forked import COMMAND_LINE, run
from tests.models.hub_server import serving
from trainwright.cli import app
from trainwright.commands.init_finetune import gather
from trainwright.errors import UsageError
from trainwright.recipe import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and its tokenizer in base/ and conversations in chats.jsonl."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained("base")
    tokenizer.save_pretrained("base")
    Path("chats.jsonl").write_bytes(lines([*map(chat, range(40))]))
    return tmp_path


@pytest.mark.process
def test_three_commands_from_a_file_of_conversations_to_a_merged_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown = run(COMMAND_LINE, *shlex.split("init finetune tuned --model base --data chats.jsonl"))
    assert shown.returncode == 0, shown.stderr
    commands = [line.strip() for line in shown.stdout.splitlines() if line.startswith("  trainwright ")]
    assert len(commands) == 2 and commands[1].endswith("--merge --hf merged")
    with serving() as hub:
        online = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": "hf_test",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hf"),
        }
        short = {"TRAINWRIGHT_UNTIL": "8steps"}
        for command, env in ((commands[0], short), (f"{commands[1]} --push user/tiny", online)):
            done = run(COMMAND_LINE, *shlex.split(command)[1:], cwd=folder / "tuned", env=env)
            assert done.returncode == 0, done.stdout + done.stderr
    assert f"uploaded: {hub.address}/user/tiny" in done.stderr
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= hub.content.keys()
    merged = AutoModelForCausalLM.from_pretrained(folder / "tuned" / "merged")
    base = AutoModelForCausalLM.from_pretrained("base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned" / "merged")
    assert tokenizer.chat_template == make_tokenizer().chat_template
    turns = [{"role": "user", "content": "Please tell me how to boil an egg."}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert not torch.allclose(merged(ids).logits, base(ids).logits, atol=1e-4)
    names = [[name for name, _ in each.named_parameters()] for each in (merged, base)]
    assert names[0] == names[1]


def test_the_recipes_state_what_the_model_and_the_file_require(folder: Path) -> None:
    project = tw.init("finetune", model="base", data="chats.jsonl")
    assert project.folder == Path("finetune") and project.missing == ()
    assert set(project.files) == {"README.md", "full.yaml", "recipe.schema.json", "recipe.yaml"}
    lora, full = (load(project.folder / name, environ={}).recipe for name in ("recipe.yaml", "full.yaml"))
    assert lora.model.args == {"name": str(folder / "base"), "dtype": "fp32"}
    assert lora.model.lora is not None and lora.model.lora.targets == ("all-linear",) and full.model.lora is None
    assert lora.data.train.use == "chat" and lora.data.train.args["val_fraction"] == 0.1
    assert lora.data.val is not None and lora.data.val.args["split"] == "val"
    assert lora.batch.size == 2 and lora.name == "base-chats" and full.name == "base-chats-full"
    assert lora.loss.use == full.loss.use == "hf_causal_lm" and lora.data.packing.by == "none"
    text = (project.folder / "recipe.yaml").read_text()
    assert "40 samples (messages)" in text and "LlamaForCausalLM with" in text


def test_samples_of_very_different_lengths_share_a_row(folder: Path) -> None:
    answers = ["egg", "fox " * 60]
    turns = [
        [{"role": "user", "content": f"{at}"}, {"role": "assistant", "content": answers[at % 8 == 0]}]
        for at in range(160)
    ]
    Path("chats.jsonl").write_bytes(lines([{"messages": each} for each in turns]))
    project = tw.init("finetune", model="base", data="chats.jsonl")
    text = (project.folder / "recipe.yaml").read_text()
    assert re.search(
        r"# in rows of their own, [3-9]\d% of the tokens of a batch would be padding\n  packing: padd", text
    )
    loaded = load(project.folder / "recipe.yaml", environ={}, overrides=["until=2steps"])
    assert loaded.recipe.data.packing.by == "padding_free"
    assert tw.train(loaded, quiet=True).ending == "finished"


RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sharegpt": ("chat", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}),
    "alpaca": ("instruct", {"instruction": "Add", "input": "1 2", "output": "3"}),
    "completion": ("completion", {"prompt": "Name a bird:", "completion": " a heron"}),
    "text": ("text", {"text": "The quick brown fox."}),
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_layout_of_the_records_decides_the_data_set(folder: Path, name: str) -> None:
    use, record = RECORDS[name]
    Path("other.jsonl").write_text((json.dumps(record) + "\n") * 3)
    project = tw.init("finetune", model="base", data="other.jsonl")
    recipe = load(project.folder / "recipe.yaml", environ={}).recipe
    assert recipe.data.train.use == use and recipe.data.val is None


def test_samples_that_are_too_long_are_cut_and_said(folder: Path) -> None:
    long = {"messages": [{"role": "user", "content": "fox " * 30}, {"role": "assistant", "content": "dog " * 500}]}
    with Path("chats.jsonl").open("ab") as file:
        file.write(lines([long]))
    project = tw.init("finetune", model="base", data="chats.jsonl")
    text = (project.folder / "recipe.yaml").read_text()
    assert "1 samples are longer than the 256 positions" in text
    train = load(project.folder / "recipe.yaml", environ={}).recipe.data.train
    assert (train.args["max_length"], train.args["truncate"]) == (256, "right")


@pytest.mark.examined
def test_preferences_are_trained_on_by_dpo(folder: Path) -> None:
    records = [pair(at) for at in range(40)]
    records[7]["rejected"] = [{"role": "assistant", "content": "dog " * 500}]
    Path("pairs.jsonl").write_bytes(lines(records))
    project = tw.init("finetune", model="base", data="pairs.jsonl")
    text = (project.folder / "recipe.yaml").read_text()
    assert (
        "40 pairs (preference)" in text
        and "1 pairs are longer than the 256 positions of the model, and are left out" in text
    )
    short = ["until=6steps"]
    lora, full = (load(project.folder / name, overrides=short, environ={}) for name in ("recipe.yaml", "full.yaml"))
    assert (lora.recipe.loss.use, lora.recipe.loss.args) == ("dpo", {"beta": 0.1})
    assert lora.recipe.data.train.use == "preference" and lora.recipe.data.train.args["truncate"] == "drop"
    assert lora.recipe.checkpoint.best == "reward_accuracy" and full.recipe.model.lora is None
    for loaded in (lora, full):
        result = tw.train(loaded, quiet=True)
        assert result.ending == "finished" and {"reward_margin", "reward_accuracy"} <= set(result.metrics)
        assert [each.code for each in result.findings if each.severity != "info"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "base"], "needs a model and a file of data"),
        (["--model", "bse", "--data", "chats.jsonl"], "bse is no folder"),
        (["--model", "base", "--data", "chat.jsonl"], "there is no file"),
        (["--model", "base", "--data", "odd.jsonl"], "of no known layout (their keys: ask, reply)"),
        (["--model", "base", "--data", "page.jsonl"], "is an HTML page"),
        (["--model", "base", "--data", "empty.jsonl"], "of no known layout (their keys: none)"),
    ],
)
def test_a_model_or_file_that_cannot_be_used(folder: Path, arguments: list[str], message: str) -> None:
    Path("odd.jsonl").write_text('{"ask": "a", "reply": "b"}\n')
    Path("empty.jsonl").write_text("")
    Path("page.jsonl").write_text("<!DOCTYPE html>\n<html></html>\n")
    done = CliRunner().invoke(app, ["init", "finetune", *arguments])
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
    assert not Path("finetune").exists()


@pytest.mark.parametrize(
    "arguments", [{"model": "base"}, {"on_bad_record": "skip"}, {"chat_template": "chat.jinja"}], ids=str
)
def test_other_kinds_take_no_options_of_finetune(folder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="are for finetune, not for table"):
        tw.init("table", **arguments)


def test_a_tokenizer_without_a_template_gets_that_of_a_file(folder: Path) -> None:
    tokenizer = make_tokenizer()
    Path("chat.jinja").write_text(tokenizer.chat_template)
    tokenizer.chat_template = None
    for file in Path("base").glob("*.jinja"):
        file.unlink()
    tokenizer.save_pretrained("base")
    with pytest.raises(UsageError, match="has no chat template") as caught:
        tw.init("finetune", model="base", data="chats.jsonl")
    assert "--chat-template FILE" in caught.value.remedy
    done = CliRunner().invoke(
        app, shlex.split("init finetune --model base --data chats.jsonl --chat-template chat.jinja")
    )
    assert done.exit_code == 0, done.output
    data = load(Path("finetune/recipe.yaml"), environ={}).recipe.data
    assert data.val is not None
    assert [each.args["chat_template"] for each in (data.train, data.val)] == [str(folder / "chat.jinja")] * 2
    assert "with the chat template" in Path("finetune/README.md").read_text()
    from transformers import AutoTokenizer

    result = tw.train(load("finetune/recipe.yaml", overrides=["until=1steps", "log.doctor=false"]), quiet=True)
    kept = AutoTokenizer.from_pretrained(Path(result.run) / "hub")  # an export takes its tokenizer from there
    assert kept.chat_template == Path("chat.jinja").read_text()


def test_records_that_cannot_be_used_are_skipped_on_request(folder: Path) -> None:
    with Path("chats.jsonl").open("ab") as file:
        file.write(lines([{"messages": "no list"}]))
    with pytest.raises(UsageError, match="1 record cannot be used") as caught:
        tw.init("finetune", model="base", data="chats.jsonl")
    assert "--on-bad-record skip" in caught.value.remedy
    tw.init("finetune", model="base", data="chats.jsonl", on_bad_record="skip")
    data = load(Path("finetune/recipe.yaml"), environ={}).recipe.data
    assert data.val is not None and data.train.args["on_bad_record"] == data.val.args["on_bad_record"] == "skip"
    with pytest.raises(UsageError, match="on_bad_record must be one of stop, skip"):
        tw.init("finetune", "other", model="base", data="chats.jsonl", on_bad_record="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "is a BertForMaskedLM"),
        ({"architectures": ["LlamaModel"], "model_type": "llama"}, "is a LlamaModel"),
    ],
    ids=["encoder-decoder", "encoder", "without a head"],
)
def test_a_model_that_predicts_no_next_token_is_refused(folder: Path, config: Any, says: str) -> None:
    file = Path("base/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(UsageError, match=says) as caught:
        gather("base", "chats.jsonl")
    assert "tw.fit" in caught.value.remedy
