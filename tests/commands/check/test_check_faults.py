"""Each planted fault is found, and healthy recipes that look odd raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands.check.checked import AMPLE, PARTS, UNTRAINED, checked, model, recipe
from trainwright.commands.check.learning import RANGE_STEPS, range_test
from trainwright.commands.check.sandbox import Sandbox
from trainwright.recipe import from_mapping
from trainwright.training.prepare import prepare

BUDGETS = {
    **dict.fromkeys(("output", "activations", "weights"), replace(AMPLE, smoke_s=0.0)),
    "learning rate": replace(UNTRAINED, range_s=AMPLE.range_s),
    "step": replace(UNTRAINED, smoke_s=AMPLE.smoke_s),
    "": AMPLE,
}
"""Budgets by the topic of a verdict that needs training. "step" stands for findings of the doctor in the smoke run."""


def blobs(fault: str) -> dict[str, Any]:
    return {"data.train.args": {"fault": fault}}


def train(name: str, **args: Any) -> dict[str, Any]:
    data = {split: {"use": f"{PARTS}:{name}", "args": {"split": split, **args}} for split in ("train", "val")}
    return {"data.train": data["train"], "data.val": {**data["val"], "args": {"split": "val"}}}


def loss(name: str) -> dict[str, Any]:
    return {"loss": f"{PARTS}:{name}"}


LM = {**train("tokens"), **model("Transformer"), "loss": "language_model"}
SEEN_AT_ONCE = {**LM, "until": "2steps"}
"""The doctor looks at the first step; later looks cost as much and tell the same."""

MANY_SHUFFLED = {"data.train.args": {"fault": "shuffled", "count": 512}}
"""Too many to be learned by heart in the smoke run."""

# name: (changes, how grave, what the line is about, words that it must say)
FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "shifted labels": (blobs("shifted"), "fail", "alignment", "shifted"),
    "shuffled labels": (MANY_SHUFFLED, "warn", "", "data.label_feature_misaligned"),
    "labels from one": (blobs("from one"), "fail", "labels", "out of range"),
    "one wild label": (blobs("one wild label"), "fail", "labels", "sample 253 has 17"),
    "one class only": (blobs("one class"), "fail", "labels", "all 256 are 0"),
    "equal inputs, two labels": (blobs("two labels"), "warn", "alignment", "a different label"),
    "constant features": (blobs("constant"), "fail", "inputs", "same input"),
    "inputs of 0 to 255": (blobs("bytes"), "warn", "inputs", "not normalised"),
    "normalised twice": (blobs("double normalised"), "warn", "inputs", "hardly vary"),
    "one column far larger": (blobs("uneven columns"), "warn", "inputs", ""),
    "NaN in the data": (blobs("nan"), "fail", "values", "samples: 5"),
    "integers as inputs": (blobs("integers"), "fail", "first batch", "int64"),
    "duplicates": (blobs("duplicates"), "warn", "duplicates", "75%"),
    "a sample that cannot be read": (train("Torn"), "fail", "samples", "sample 40"),
    "a sample that ends its process": (train("Fatal"), "fail", "samples", "exit code 3 while it read sample 40"),
    "validation is training": ({"data.val.args": {"fault": "val is train"}}, "fail", "validation", "100%"),
    "no validation": ({"data.val": None}, "warn", "validation", "no validation"),
    "augmentation destroys labels": (train("Augmented", destroy=True), "fail", "alignment", "hides the class"),
    "slow loader": ({"data.train": f"{PARTS}:Slow", "until": "10steps"}, "warn", "loading", "waiting"),
    "batch larger than the data": ({"batch.size": 1024}, "warn", "batch size", "larger than"),
    "batch norm with batches of one": ({**model("net", norm=True), "batch.micro": 1}, "fail", "batch norm", "1 sample"),
    "batch norm, last batch of one": (
        {**model("net", norm=True), "data.train.args": {"count": 257}},
        "warn",
        "batch norm",
        "last micro-batch",
    ),
    "frozen everything": (model("frozen"), "fail", "gradients", "nothing is trained"),
    "detached branch": (model("Detached"), "fail", "gradients", "two.0.weight"),
    "loss cut from the model": (loss("cut"), "fail", "gradients", "nothing is trained"),
    "dead ReLU": (model("dead"), "fail", "activations", "every unit of 1 is 0"),
    "all weights zero": (model("zeros"), "fail", "weights", "stay 0"),
    "weights too large": (model("large"), "warn", "initial loss", ""),
    "deep without residuals": (model("Deep"), "fail", "output", "same for every sample"),
    "output ignores the input": (model("Blind"), "fail", "output", "same for every sample"),
    "output of the wrong size": (model("net", outputs=3), "fail", "labels", "0 to 2"),
    "input of the wrong size": (model("net", inputs=7), "fail", "first batch", "mat1 and mat2"),
    "model larger than memory": (model("Huge"), "fail", "memory", "are available"),
    "softmax before cross-entropy": (loss("softmax_first"), "fail", "loss", "softmax"),
    "nll of probabilities": (loss("probabilities"), "fail", "loss", "logarithms"),
    "sign of the loss": (loss("upwards"), "fail", "initial loss", "minus"),
    "mse on classes": ({**model("net", outputs=1), **loss("as_numbers")}, "warn", "loss", "classes"),
    "mse that broadcasts": ({**train("numbers"), **model("net", outputs=1), **loss("broadcast")}, "fail", "loss", ""),
    "logarithm of zero": (loss("logarithm"), "fail", "initial loss", "inf"),
    "lr of 1000": ({"optimizer.lr": 1e3}, "fail", "learning rate", "times their size"),
    "lr of 1e-9": ({"optimizer.lr": 1e-9}, "fail", "learning rate", "nothing would move"),
    "targets of a million": (
        {**train("numbers", scale=1e6), **model("net", outputs=1), "loss": "mse"},
        "warn",
        "targets",
        "",
    ),
    "tokens not shifted": ({**SEEN_AT_ONCE, **train("tokens", offset=0)}, "fail", "step", "loss.no_shift"),
    "an id beyond the vocabulary": ({**LM, **train("tokens", wild=True)}, "fail", "inputs", "sample 200 has id 99"),
    "a target beyond the vocabulary": ({**LM, **train("tokens", wild=True)}, "fail", "labels", "sample 200 has 99"),
    "no causal mask": ({**SEEN_AT_ONCE, **model("Transformer", causal=False)}, "fail", "step", "model.future_leak"),
}

HEALTHY: dict[str, dict[str, Any]] = {
    "language model": LM,
    "regression": {**train("numbers"), **model("net", outputs=1), "loss": "mse"},
    "batch norm, and a bad sample in quarantine": {
        **model("net", norm=True, depth=3),
        **train("Fatal"),
        "data.quarantine": [40],
    },
    "imbalanced": {**train("imbalanced"), **model("net", outputs=2)},
    "tiny dataset": {"data.train.args": {"count": 24}, "batch.size": 8},
    "convolutions": {**train("images"), **model("convolutions")},
    "stream": {"data.train": f"{PARTS}:Stream", "until": "200steps"},
    "batches by name": {**train("Named"), **model("Normed"), **loss("named_loss")},
    "part of it frozen, and dropout": {**model("net", dropout=0.5), "model.freeze": ["0.*"]},
    "warm-up, sgd, accumulation": {
        "optimizer": {"use": "sgd", "lr": 0.1},
        "schedule": {"use": "cosine", "warmup": "0.1run"},
        "batch.micro": 8,
    },
    "augmented by workers": {**train("Augmented"), "data.workers": 1},
}


@pytest.fixture(autouse=True)
def _outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provenance of each job has the state of the repository, which git takes a tenth of a second to find."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_finds_the_planted_fault(name: str) -> None:
    changes, word, what, words = FAULTS[name]
    found = checked(changes, BUDGETS.get(what, UNTRAINED))
    lines = [f"{v.word} {v.what}: {v.seen} [{v.code}]" for v in found.verdicts]
    graver = [v for v in found.verdicts if v.word in (word, "fail") and what in v.what]
    assert any(words in f"{v.seen} {v.code}" and v.remedy for v in graver), "\n".join(lines)
    if word == "fail":
        assert found.exit_code == 3


@pytest.mark.parametrize(("budget_s", "step_s"), [(1.0, 0.1), (1e-9, 0.0)])
def test_a_range_test_has_all_of_its_steps_or_gives_no_verdict(budget_s: float, step_s: float) -> None:
    job = prepare(from_mapping(recipe({})))
    sandbox = Sandbox(job)
    sandbox.keep(1.0)
    assert range_test(sandbox, budget_s=budget_s, step_s=step_s) is None
    whole = range_test(sandbox, budget_s=60.0, step_s=1e-3)
    assert whole is not None and (whole.stopped_at or len(whole.lrs) == RANGE_STEPS)


@pytest.mark.slow
def test_no_time_is_no_fault() -> None:
    """A validation set whose first batch took all of it has been evaluated on that batch."""
    found = checked({}, UNTRAINED)
    assert found.trains is None and found.exit_code == 0, "nothing is claimed"
    assert [v for v in found.verdicts if v.word in ("warn", "fail")] == []
    assert "evaluation" in [v.what for v in found.verdicts if v.word == "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_raises_no_false_alarm(name: str) -> None:
    found = checked(HEALTHY[name])
    waits = "resources.waits_for_data"  # on a busy machine that is so
    alarms = [v for v in found.verdicts if v.word in ("warn", "fail") and v.what != "loading" and v.code != waits]
    assert [f"{v.word} {v.what}: {v.seen} [{v.code}]" for v in alarms] == []
    assert found.exit_code == 0 and len(found.verdicts) >= 10
