"""``trainwright convert``: files of three other trainers as people write them, and files that are made to harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trainwright as tw
from tests.forked import COMMAND_LINE, run
from trainwright.cli import app
from trainwright.commands.convert.convert import FORMATS, NAMES, Conversion
from trainwright.errors import StorageError, UsageError
from trainwright.recipe import load

TRAINER = {
    "output_dir": "./out/bert-mrpc",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 2e-05,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 2e-06},
    "warmup_steps": 0.1,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "fp16": False,
    "tf32": None,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "eval_strategy": "steps",
    "eval_steps": 200,
    "save_strategy": "epoch",
    "save_steps": 500,
    "save_total_limit": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_f1",
    "greater_is_better": True,
    "logging_steps": 50,
    "report_to": ["wandb", "clearml"],
    "deepspeed": "ds_zero3.json",
    "hub_token": "hf_abcdef",
    "push_to_hub": True,
    "dataloader_num_workers": 4,
    "seed": 7,
    "ddp_timeout": 1800,
    "debug": [],
    "eval_delay": 0,
    "torch_compile": False,
    "a_key_of_next_year": 3,
}
LIGHTNING = """
# lightning.pytorch==2.5.1
seed_everything: 42
trainer:
  accelerator: cpu
  strategy: ddp
  devices: 4
  precision: 16-mixed
  logger:
  - class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: logs}
  - class_path: lightning.pytorch.loggers.CometLogger
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {monitor: val/acc, mode: max, save_top_k: 3, filename: best, every_n_epochs: 2}
  - class_path: lightning.pytorch.callbacks.EarlyStopping
    init_args: {monitor: val_loss, patience: 5, min_delta: 1e-4}
  - class_path: lightning.pytorch.callbacks.LearningRateMonitor
  - class_path: mine.callbacks.Confetti
  max_epochs: 90
  max_steps: -1
  accumulate_grad_batches: 2
  gradient_clip_val: 1
  gradient_clip_algorithm: norm
  val_check_interval: 0.5
  log_every_n_steps: 20
  limit_val_batches: 10
  enable_progress_bar: true
  detect_anomaly: false
model:
  class_path: mine.Classifier
  init_args: {width: 8, classes: 3}
data:
  class_path: mine.Points
  init_args: {root: /data, batch_size: 64, num_workers: 0}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1, momentum: 0.9, weight_decay: 1e-4, nesterov: true}
lr_scheduler:
  class_path: torch.optim.lr_scheduler.StepLR
  init_args: {step_size: 30, gamma: 0.1}
ckpt_path: null
"""
AXOLOTL = """
base_model: tiny
trust_remote_code: true
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
output_dir: ./outputs/out/qlora-llama3
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 512
sample_packing: false
wandb_project: tuning
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
logging_steps: 1
weight_decay: 0.0
early_stopping_patience: 3
special_tokens:
  pad_token: "<|end_of_text|>"
tensor_parallel_size: 2
"""


def converted(folder: Path, content: object, name: str = "file.yaml", **how: Any) -> Conversion:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return tw.convert(file, **how)


def outcomes(conversion: Conversion, outcome: str) -> set[str]:
    return {row.key for row in conversion.of(outcome)}


def check_complete(conversion: Conversion, tmp_path: Path) -> dict[str, Any]:
    """Each row says what to do, and the recipe that is printed loads. Returns the recipe."""
    assert all(row.paths for row in conversion.of("taken")) and all(row.note for row in conversion.of("no meaning"))
    assert all(row.remedy and row.note for row in conversion.of("not supported"))
    file = tmp_path / "converted.yaml"
    file.write_text(conversion.recipe)
    load(file, environ={})
    assert all(f"#   {path}: " in conversion.recipe for path in conversion.to_fill_in)
    recipe: dict[str, Any] = yaml.safe_load(conversion.recipe)
    return recipe


def test_training_arguments(tmp_path: Path) -> None:
    conversion = converted(tmp_path, TRAINER, "args.json")
    recipe = check_complete(conversion, tmp_path)
    assert {row.key for row in conversion.rows} >= {*TRAINER}
    assert recipe["optimizer"] == {
        "use": "adamw",
        "lr": 2e-5,
        "weight_decay": 0.01,
        "decay_norms_and_biases": False,  # Trainer decays neither
        "args": {"betas": [0.9, 0.95], "eps": 1e-8},
        "clip": {"by": "norm", "at": 1.0},
    }
    assert recipe["batch"] == {"micro": 16, "accumulation": 2} and recipe["until"] == "3ep"
    assert recipe["schedule"] == {"use": "cosine", "floor": 0.1, "warmup": "0.1run"}
    assert recipe["checkpoint"] == {"every": "1ep", "keep": 3, "restore_best": True, "best": "f1", "best_mode": "max"}
    assert recipe["evaluation"]["every"] == "200steps" and recipe["metrics"] == ["f1"]
    assert (recipe["name"], recipe["seed"], recipe["precision"]) == ("bert-mrpc", 7, "bf16")
    assert recipe["model"] == {"use": "model:make_model", "activation_checkpointing": "block"}
    assert (recipe["loss"], recipe["log"]) == ("of_model", {"every": "50steps", "sinks": ["wandb"]})
    refused = {"deepspeed", "label_smoothing_factor", "report_to", "a_key_of_next_year"}
    assert outcomes(conversion, "not supported") == refused
    assert {"push_to_hub", "ddp_timeout", "save_steps", "fp16"} <= outcomes(conversion, "no meaning")
    assert "hf_abcdef" not in json.dumps(conversion.to_json())
    assert [*conversion.to_fill_in] == ["model.use", "data.train", "data.val"]


def test_defaults_of_the_trainer_are_stated(tmp_path: Path) -> None:
    """The library clips at 1 and decays linearly where a file says nothing, and a recipe does neither."""
    conversion = converted(tmp_path, {"output_dir": "out", "num_train_epochs": 1}, "args.json")
    recipe = check_complete(conversion, tmp_path)
    assert recipe["optimizer"]["clip"] == {"by": "norm", "at": 1.0} and recipe["optimizer"]["lr"] == 5e-5
    assert recipe["schedule"] == {"use": "linear"} and recipe["batch"] == {"micro": 8, "accumulation": 1}
    notes = {row.key: row.note for row in conversion.of("taken")}
    assert notes["max_grad_norm"] == "the default there" and notes["num_train_epochs"] == ""


def test_lightning_cli(tmp_path: Path) -> None:
    conversion = converted(tmp_path, LIGHTNING)
    recipe = check_complete(conversion, tmp_path)
    args = {"momentum": 0.9, "nesterov": True}
    clip = {"by": "norm", "at": 1.0}
    assert recipe["optimizer"] == {"use": "sgd", "lr": 0.1, "weight_decay": 1e-4, "args": args, "clip": clip}
    schedule = {"use": "torch.optim.lr_scheduler:StepLR", "every": "1ep", "args": {"step_size": 30, "gamma": 0.1}}
    assert recipe["schedule"] == schedule
    assert recipe["model"] == {"use": "mine:Classifier", "args": {"width": 8, "classes": 3}}
    assert recipe["batch"] == {"micro": 64, "accumulation": 2} and recipe["until"] == "90ep"
    assert (recipe["precision"], recipe["device"], recipe["seed"]) == ("fp16", "cpu", 42)
    assert recipe["evaluation"] == {"every": "0.5ep", "batches": 10} and recipe["log"]["sinks"] == ["tensorboard"]
    assert recipe["checkpoint"] == {"every": "2ep", "best": "accuracy", "best_mode": "max"}
    stopping = {"metric": "loss", "patience": 5, "min_delta": 1e-4}
    assert recipe["observers"] == [{"use": "early_stopping", "args": stopping}]
    assert outcomes(conversion, "not supported") == {
        *("trainer.devices", "trainer.logger", "trainer.callbacks.Confetti", "data"),
        "trainer.callbacks.ModelCheckpoint.save_top_k",
    }
    assert {*conversion.to_fill_in} == {"data.train", "data.val", "loss"}


def test_axolotl(tmp_path: Path) -> None:
    conversion = converted(tmp_path, AXOLOTL)
    recipe = check_complete(conversion, tmp_path)
    assert recipe["model"]["use"] == "hf"
    assert recipe["model"]["args"] == {"name": "tiny", "attn_implementation": "flash_attention_2"}
    lora = {"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": ["all-linear"], "quantize": "nf4"}
    assert recipe["model"]["lora"] == lora
    assert recipe["optimizer"]["lr"] == 2e-4 and recipe["optimizer"]["clip"]["at"] == 1.0
    assert recipe["schedule"] == {"use": "cosine", "floor": 0.1, "warmup": "10steps"}
    assert (recipe["evaluation"]["every"], recipe["checkpoint"]["every"]) == ("0.25ep", "1ep")
    assert recipe["parallel"] == {"tensor": 2} and recipe["loss"] == "hf_causal_lm" and recipe["precision"] == "auto"
    assert outcomes(conversion, "not supported") == {
        *("trust_remote_code", "special_tokens"),
    }
    assert recipe["optimizer"]["use"] == "adamw8bit"
    args = {"path": "tatsu-lab/alpaca", "val_fraction": 0.05, "max_length": 512, "truncate": "drop"}
    assert recipe["data"]["train"] == {"use": "instruct", "args": args}
    assert recipe["data"]["val"] == {"use": "instruct", "args": {**args, "split": "val"}}
    assert not conversion.to_fill_in


AXOLOTL_CHATS = {"base_model": "tiny", "datasets": [{"path": "chats.jsonl", "type": "chat_template"}]}


@pytest.mark.parametrize(
    ("changed", "path", "value"),
    [
        ({"sequence_len": 64, "sample_packing": True}, "data.packing", {"by": "bfd", "max_length": 64}),
        ({"train_on_inputs": True}, "data.train.args.train_on", "all"),
        ({"chat_template_jinja": "{{ messages }}"}, "data.train.args.chat_template", "{{ messages }}"),
        ({"neftune_noise_alpha": 5}, "loss.args.neftune_alpha", 5.0),
        ({"rl": "dpo", "dpo_beta": 0.2}, "loss", {"use": "dpo", "args": {"beta": 0.2}}),
        ({"rl": "dpo"}, "data.train.use", "preference"),
    ],
    ids=["packing", "inputs", "template", "neftune", "dpo", "pairs"],
)
def test_data_of_axolotl(tmp_path: Path, changed: dict[str, Any], path: str, value: object) -> None:
    conversion = converted(tmp_path, {**AXOLOTL_CHATS, **changed}, "axolotl.json", source="axolotl")
    found: Any = check_complete(conversion, tmp_path)
    for name in path.split("."):
        found = found[name]
    assert found == value and not conversion.to_fill_in


@pytest.mark.parametrize(
    ("changed", "key", "remedy"),
    [
        ({"datasets": [{"path": "a", "type": "alpaca"}] * 2}, "datasets", "join them"),
        ({"datasets": [{"path": "a", "type": "mine"}]}, "datasets", "convert it to chat"),
        ({"rl": "kto"}, "rl", "docs/how-to/dpo.md"),
        ({"val_set_size": 100}, "val_set_size", "val_fraction"),
        ({"chat_template": "llama3"}, "chat_template", "into a file"),
    ],
    ids=["two", "unknown type", "kto", "count", "by name"],
)
def test_data_of_axolotl_that_is_not_converted(tmp_path: Path, changed: Any, key: str, remedy: str) -> None:
    conversion = converted(tmp_path, {**AXOLOTL_CHATS, **changed}, "axolotl.json", source="axolotl")
    assert [remedy in row.remedy for row in conversion.of("not supported") if row.key == key] == [True]


MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)

def points():
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(9) + index) % 32
        return ids[:-1], ids[1:]

def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)
"""
FILLED_IN = {
    "lightning": ["data.train=mine:points", "data.val=mine:points", "loss=mine:loss", "until=2ep", "metrics=[]",
                  "precision=fp32", "log.sinks=[]", "checkpoint.best=loss"],
    "axolotl": ["data.train=mine:Rows", "data.val=mine:Rows", "device=cpu", "precision=fp32", "log.sinks=[]",
                "model.args.attn_implementation=sdpa", "parallel.tensor=1", "until=12steps"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("source", FILLED_IN)
def test_a_converted_recipe_trains_when_it_is_filled_in(source: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    if source == "axolotl":
        transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    converted(tmp_path, {"lightning": LIGHTNING, "axolotl": AXOLOTL}[source], out=tmp_path / "recipe.yaml")
    settings = [word for each in FILLED_IN[source] for word in ("--set", each)]
    done = run(COMMAND_LINE, "train", "recipe.yaml", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_value_that_no_recipe_allows_is_left_out_and_named(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {**TRAINER, "learning_rate": -1, "dataloader_num_workers": "many"}, "args.json")
    recipe = check_complete(conversion, tmp_path)
    assert {"learning_rate", "dataloader_num_workers"} <= outcomes(conversion, "not supported")
    assert "lr" not in recipe["optimizer"] and "workers" not in recipe["data"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.yaml", "just a text", "is not a mapping"),
        ("a.yaml", "a: [1, 2", "is not YAML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.yaml", "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\n" + "".join(
            f"{chr(99 + n)}: &{chr(99 + n)} [{', '.join(4 * [f'*{chr(98 + n)}'])}]\n" for n in range(9)), "more than"),
        ("a.yaml", "optimizer: adamw\n", "none of the keys"),
    ],
    ids=["text", "no yaml", "no json", "deep", "aliases", "other"],
)  # fmt: skip
def test_files_that_are_no_settings(tmp_path: Path, name: str, content: str, error: str) -> None:
    with pytest.raises(UsageError, match=error) as caught:
        converted(tmp_path, content, name)
    assert caught.value.remedy


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe.yaml", "large.yaml", "missing.yaml"):
        with pytest.raises(StorageError, match="cannot be read"):
            tw.convert(tmp_path / name)


def test_tags_are_not_followed(tmp_path: Path) -> None:
    tag = f"!!python/object/apply:os.mkdir [{tmp_path / 'made'}]"
    conversion = converted(tmp_path, f"base_model: tiny\nlearning_rate: 1e-4\nseed: {tag}\n")
    assert not (tmp_path / "made").exists()
    assert "custom tags are not allowed" in {row.note for row in conversion.of("not supported")}
    check_complete(conversion, tmp_path)


def test_nothing_that_the_file_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harm.py").write_text("open('harm.txt', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = "trainer: {callbacks: [{class_path: harm.Callback}]}\nmodel: {class_path: harm.Model}\n"
    assert converted(tmp_path, text).source == "lightning" and not (tmp_path / "harm.txt").exists()


def test_the_command_writes_the_recipe_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    words = ["convert", str(tmp_path / "a.yaml"), "--output", str(tmp_path / "recipe.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"wrote {tmp_path / 'recipe.yaml'}" in done.output
    assert "  remedy: read it, then set model.trust_remote_code: true" in done.output
    assert "wandb_entity" not in done.output  # it is off
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "exists already" in again.stderr
    printed = CliRunner().invoke(app, [*words[:2], "--from", "axolotl", "--json"])
    said = json.loads(printed.output)
    assert said["recipe"] == (tmp_path / "recipe.yaml").read_text() and said["path"] is None
    unknown = CliRunner().invoke(app, [*words[:2], "--from", "axolotle"])
    assert unknown.exit_code == 2 and "did you mean 'axolotl'?" in unknown.stderr


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/how-to/convert-settings.md").read_text()
    assert [name for name in (*FORMATS, *NAMES.values()) if f"`{name}`" not in page] == []
