"""Metrics of the model itself, and tasks of lm-eval, which are such metrics."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.finetune.tiny import llama, supervised
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import MissingExtra, UsageError
from trainwright.finetune.lm_eval import LmEval

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm_eval and transformers
TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{right}}"
doc_to_choice: ["{{a}}", "{{b}}"]
target_delimiter: " "
metric_list: [{metric: acc}]
"""
RECORDS = [
    {"question": f"The colour of {thing} is", "a": a, "b": b, "right": right}
    for thing, a, b, right in (
        *(("grass", "green", "red", 0), ("snow", "black", "white", 1), ("coal", "black", "pink", 0)),
        *(("the sky", "brown", "blue", 1), ("a fox", "red", "green", 0), ("a lemon", "violet", "yellow", 1)),
    )
]


class Norms:
    """A metric of the model: the norm of its weights, in which mode it is measured, and draws of random numbers."""

    def measure(self, model: nn.Module) -> Mapping[str, float]:
        random.random(), np.random.random(), torch.rand(1)
        norm = torch.stack([each.norm() for each in model.parameters()]).norm()
        return {"weights": float(norm), "training": float(model.training)}


def test_a_metric_of_the_model_is_measured_in_each_evaluation_without_effect_on_the_training() -> None:
    results = [
        tw.fit(
            llama(),
            supervised(),
            "hf_causal_lm",
            val=supervised()[:4],
            batch=4,
            steps=4,
            seed=1,
            metrics=metrics,
            quiet=True,
            settings={"evaluation.every": "2steps"},
        )
        for metrics in (None, {"norms": Norms()})
    ]
    measured = results[1]
    norm = torch.stack([each.norm() for each in measured.state.model.parameters()]).norm()
    assert measured.metrics["norms.weights"] == pytest.approx(float(norm)) and measured.metrics["norms.training"] == 0
    weights = [each.state.model.state_dict() for each in results]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in RECORDS))
    (folder / "colours.yaml").write_text(TASK.replace("FILE", str(folder / "colours.jsonl")))
    return folder


def model_with_tokenizer(folder: Path) -> tuple[Any, Any]:
    tokenizer = make_tokenizer()
    model = llama(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_the_score_of_a_task_is_that_of_the_calculation_by_hand(task: Path, tmp_path: Path) -> None:
    model, tokenizer = model_with_tokenizer(tmp_path / "base")
    model.eval()

    def log_prob(prompt: str, answer: str) -> float:
        ids = tokenizer(f"{prompt} {answer}")["input_ids"]
        begin = len(tokenizer(prompt)["input_ids"])
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logits[at - 1, ids[at]].detach()) for at in range(begin, len(ids)))

    right = [
        (log_prob(each["question"], each["a"]) < log_prob(each["question"], each["b"])) == each["right"]
        for each in RECORDS
    ]
    metric = LmEval(["colours"], include_path=task, tokenizer=tmp_path / "base")
    with torch.no_grad():
        assert metric.measure(model) == {"colours.acc": pytest.approx(sum(right) / len(right))}


def test_a_recipe_measures_tasks_before_training_and_after_each_evaluation(task: Path, tmp_path: Path) -> None:
    model_with_tokenizer(tmp_path / "base")
    result = tw.fit(
        str(tmp_path / "base"),
        supervised(),
        "hf_causal_lm",
        val=supervised()[:4],
        batch=4,
        steps=2,
        metrics=[{"use": "lm_eval", "args": {"tasks": ["colours"], "include_path": str(task), "limit": 4}}],
        quiet=True,
    )
    assert 0 <= result.metrics["lm_eval.colours.acc"] <= 1
    log = (result.run / "log.jsonl").read_text()
    assert len(re.findall(r'"lm_eval.colours.acc"', log)) >= 2


def test_an_unknown_task_is_named(task: Path) -> None:
    with pytest.raises(UsageError, match="no task 'colors'"):
        LmEval(["colors"], include_path=task)


def test_the_package_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match="lm_eval"):
        LmEval(["arc_easy"])


def test_a_model_that_is_not_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = type("TaskManager", (), {"__init__": lambda self, include_path: None, "all_tasks": ("arc_easy",)})
    tasks = ModuleType("lm_eval.tasks")
    tasks.TaskManager = manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    with pytest.raises(UsageError, match="cannot evaluate a Linear"):
        LmEval(["arc_easy"]).measure(nn.Linear(1, 1))
