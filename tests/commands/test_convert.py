"""``trainwright convert``: files as people write them, and files that are made to harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.commands.convert import Conversion
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
        ("a.yaml", "optimizer: adamw\n", "no keys of TrainingArguments"),
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
    conversion = converted(tmp_path, f"output_dir: out\nlearning_rate: 1e-4\nseed: {tag}\n")
    assert not (tmp_path / "made").exists()
    assert "custom tags are not allowed" in {row.note for row in conversion.of("not supported")}
    check_complete(conversion, tmp_path)


def test_nothing_that_the_file_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harm.py").write_text("open('harm.txt', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    converted(tmp_path, "output_dir: out\nreport_to: harm\noptim: harm.Optimizer\n")
    assert not (tmp_path / "harm.txt").exists()


def test_the_command_writes_the_recipe_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps(TRAINER))
    words = ["convert", str(tmp_path / "args.json"), "--output", str(tmp_path / "recipe.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"wrote {tmp_path / 'recipe.yaml'}" in done.output
    assert "  remedy: see docs/how-to/trackers.md for custom trackers" in done.output
    assert "torch_compile" not in done.output  # it is off
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "exists already" in again.stderr
    printed = CliRunner().invoke(app, [*words[:2], "--json"])
    said = json.loads(printed.output)
    assert said["recipe"] == (tmp_path / "recipe.yaml").read_text() and said["path"] is None
