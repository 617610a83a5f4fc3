"""A recipe that names a file of conversations and a model: the tokenizer, the audit and errors with their places."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests import forked
from tests.finetune.sets import chat, lines
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import RecipeError
from trainwright.finetune.datasets import Chat
from trainwright.runs.folder import RunFolder
from trainwright.runs.supervision import read_supervision

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RECIPE = """\
name: tuned
until: 3steps
model:
  use: "transformers:GPT2LMHeadModel.from_pretrained"
  args: {pretrained_model_name_or_path: model}
data:
  train: {use: chat, args: {path: chats.jsonl, val_fraction: 0.2, cache: cache}}
  val: {use: chat, args: {path: chats.jsonl, val_fraction: 0.2, split: val, cache: cache}}
loss: of_model
batch: {size: 4}
optimizer: {use: adamw, lr: 1e-3}
folder: runs
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and its tokenizer, a file of conversations, and a recipe."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_head=1, n_embd=8, n_positions=256, **ids)
    GPT2LMHeadModel(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("chats.jsonl").write_bytes(lines([*map(chat, range(20))]))
    Path("sft.yaml").write_text(RECIPE)
    return tmp_path


def test_a_recipe_trains_on_conversations(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tw.train(tw.load("sft.yaml"))
    assert result.ending == "finished"
    train, val = read_supervision(result.run / "supervision.json")
    assert (train.data, val.data) == ("train", "val") and train.samples + val.samples == 20
    assert train.findings == () and 0.3 < train.fraction < 0.8
    printed = capsys.readouterr().out
    assert "supervision: " in printed and "⟦" in printed and "carry loss" in printed
    assert "<mark>" in (result.run / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("chats.jsonl, val", "chat.jsonl, val"), ("did you mean chats.jsonl", "sft.yaml:7")),
        (("{path: chats.jsonl, val_fraction: 0.2, cache", "{path: bad.jsonl, cache"), ("bad.jsonl:2", "sft.yaml:7")),
        (("val_fraction: 0.2, cache", "val_fracton: 0.2, cache"), ("did you mean 'val_fraction'", "sft.yaml:7")),
    ],
    ids=["path", "record", "argument"],
)
def test_mistakes_are_named_with_their_place(project: Path, change: tuple[str, str], says: Any) -> None:
    Path("bad.jsonl").write_bytes(lines([chat(0), {"messages": 3}]))
    Path("sft.yaml").write_text(RECIPE.replace(*change, 1))
    with pytest.raises(RecipeError) as caught:
        tw.train(tw.load("sft.yaml"), quiet=True)
    assert all(each in str(caught.value) for each in says), caught.value


KILLED = """\
import os, signal
from pathlib import Path
from transformers import GPT2LMHeadModel
import trainwright as tw

forward = GPT2LMHeadModel.forward

def killing(self, *args, **kwargs):
    is_saved = any(Path("runs").glob("*/checkpoints/step-*"))
    if is_saved and not self.training:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, *args, **kwargs)

GPT2LMHeadModel.forward = killing
tw.train(tw.load("sft.yaml"), quiet=True)
"""


@pytest.mark.process
def test_a_run_that_is_killed_in_an_evaluation_is_resumed_to_the_same_bits(project: Path) -> None:
    more = "until: 6steps\nevaluation: {every: 3steps}\ncheckpoint: {every: 2steps}"
    recipe = RECIPE.replace("until: 3steps", more).replace("cache: cache}", "cache: cache, short_first: 1}", 1)
    Path("sft.yaml").write_text(recipe)
    process = forked.Forked(KILLED)
    assert process.wait() == -signal.SIGKILL, process.stderr
    [killed] = Path("runs").iterdir()
    resumed = tw.train(tw.load("sft.yaml"), resume=RunFolder(killed), quiet=True)
    whole = tw.train(tw.load("sft.yaml"), quiet=True)
    assert whole.state is not None and resumed.state is not None and whole.run != resumed.run
    weights = [each.state.model.state_dict() for each in (whole, resumed)]  # type: ignore[union-attr]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert whole.val_loss == resumed.val_loss and whole.step == resumed.step == 6


def test_figures_by_source(project: Path) -> None:
    records = [{**chat(at), "source": ("wiki", "forum")[at % 2]} for at in range(20)]
    Path("chats.jsonl").write_bytes(lines(records))
    recipe = RECIPE.replace("split: val,", "split: val, by_source: true,").replace(
        "val_fraction: 0.2", "val_fraction: 0.5"
    )
    Path("sft.yaml").write_text(recipe.replace("of_model", "hf_causal_lm") + "metrics: [perplexity]\n")
    result = tw.train(tw.load("sft.yaml"), quiet=True)
    assert result.state is not None and result.val_loss is not None
    losses = {name: result.metrics[f"{name}.loss"] for name in ("val", "wiki", "forum")}
    assert losses["val"] == result.val_loss and min(losses.values()) < losses["val"] < max(losses.values())
    assert result.metrics["wiki.perplexity"] == pytest.approx(math.exp(losses["wiki"]), rel=1e-5)
    data = Chat("chats.jsonl", tokenizer="model", cache="cache", split="val", val_fraction=0.5, by_source=True)
    parts = data.sources()
    weights = {name: sum(int((each["labels"] != -100).sum()) for each in part) for name, part in parts.items()}  # type: ignore[attr-defined]
    mean = sum(losses[name] * weights[name] for name in weights) / sum(weights.values())
    assert losses["val"] == pytest.approx(mean, rel=1e-5) and sum(map(len, parts.values())) == len(data)
