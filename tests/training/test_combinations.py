"""Each way to train a model on each layout of ranks: it equals one process, or is refused before the ranks meet.

python -m tests.training.test_combinations > docs/reference/combinations.md
"""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import ranks
from trainwright.errors import RecipeError
from trainwright.recipe import Loaded, from_mapping
from trainwright.training.run import require_trainable

PAGE = Path(__file__).parents[2] / "docs/reference/combinations.md"
TOLERANCE = 1e-5
"""Maximum difference of losses, norms and weights. Both are of about 1; the steps add up eight roundings in fp32."""
MODEL = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": 16, "tied": False}
EXPERTS = {"experts": 4, "active": 2, "bias_rate": 0.1, "expert_width": 8}
MUON = {"use": "muon", "lr": 1e-2, "args": {"adamw_eps": 1e-3, "ns_dtype": "float32"}}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    # a short batch would be compiled again
    "compile": {
        "model": {"use": "gpt", "args": MODEL, "compile": True},
        "data": {"train": "combined:train_set", "drop_last": True},
    },
    "LoRA": {"model": {"use": "gpt", "args": MODEL, "lora": {"rank": 2}}},
    "Muon": {"optimizer": MUON},
    "tied": {"model": {"use": "gpt", "args": {**MODEL, "tied": True}}, "optimizer": MUON},
    "MoE": {"model": {"use": "moe-gpt", "args": {**MODEL, **EXPERTS}}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2},
    "expert-shard": {"expert": 2, "shard": 2},
}
RECIPE: dict[str, Any] = {
    "until": "4steps",
    "device": "cpu",
    "precision": "fp32",
    "model": {"use": "gpt", "args": MODEL},
    "data": {"train": "combined:train_set"},
    "loss": "language_model",
    "batch": {"size": 8, "micro": 4},
    "optimizer": {"use": "adamw", "lr": 1e-2, "args": {"eps": 1e-3}, "clip": {"by": "norm", "at": 0.5}},
    "schedule": {"use": "constant"},
    "checkpoint": {"every": "4steps"},
    "log": {"every": "1steps", "doctor": False},
}
MODULE = """
import torch

def train_set():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (23, 9), generator=draw)
    return torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
"""
TRAIN = """
import sys
import trainwright as tw
from trainwright.assembly.assemble import compile_in_place

compile_in_place.__defaults__ = ("aot_eager", "auto")  # traces and divides graphs as inductor does, without C++
for path in sys.argv[1:]:
    tw.train(tw.load(path), quiet=True)
"""
NAMES = [(feature, layout) for feature in FEATURES for layout in LAYOUTS]


def recipe_of(feature: str, layout: str | None) -> dict[str, Any]:
    parallel = LAYOUTS[layout] if layout else {}
    return {**RECIPE, **FEATURES[feature], "name": f"{feature}-{layout}", "parallel": parallel}


def num_ranks(layout: str) -> int:
    return 4 if "-" in layout else 2


def refusal(feature: str, layout: str) -> str | None:
    """Return why a combination is refused. Ranks that do not exist are not waited for."""
    loaded: Loaded = from_mapping(recipe_of(feature, layout))
    try:
        require_trainable(loaded, None, num_ranks(layout))
    except RecipeError as error:
        return "; ".join(f"`{each.path}` {each.rule}" for each in error.problems)
    return None


def trained(folder: Path, count: int, recipes: dict[str, dict[str, Any]]) -> None:
    """Train the recipes one after another, in one process or on ranks."""
    folder.mkdir()
    (folder / "combined.py").write_text(MODULE)
    for name, recipe in recipes.items():
        (folder / f"{name}.json").write_text(json.dumps(recipe))
    done = ranks.run(TRAIN, count, *(f"{name}.json" for name in recipes), cwd=folder, timeout=550)
    assert [each.returncode for each in done] == [0] * count, "\n".join(each.stderr[-3000:] for each in done)


def largest_difference(run: Path, other: Path) -> float:
    """The largest difference of losses, gradient norms and weights; infinite if there are others."""
    logs = [map(json.loads, (each / "log.jsonl").read_text().splitlines()) for each in (run, other)]
    mine, theirs = ([(x["step"], x["loss"], x["grad_norm"]) for x in log if x["kind"] == "step"] for log in logs)
    weights, others = (ranks.tensors_in(each / "checkpoints/step-00000004") for each in (run, other))
    if [step for step, *_ in mine] != [step for step, *_ in theirs] or weights.keys() != others.keys():
        return float("inf")
    apart = [abs(a - b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return max(*apart, *(float((weights[name] - others[name]).abs().max()) for name in weights))


HEAD = """# Combinations of features and layouts

Two ranks train a small GPT in fp32 with each feature and each layout, four ranks with `expert` and `shard`.

- **equal**: losses, gradient norms and weights of four steps differ from those of one process by at most {tolerance:g}.
- **refused**: the run ends with an error before the ranks connect.

`pytest tests/training/test_combinations.py` trains and compares all of them. It also compares this page with the output
of `python -m tests.training.test_combinations`.

| | {layouts} |
|---|{lines}|
"""
NOTES = """
- sequence: `tensor` with `sequence: true`.
- compile: one graph for the model or for the stage of a rank; with `shard`, one for each block. The backend is
  `aot_eager`, which generates no code.
- LoRA: without DoRA and without quantization, which `tensor` and `pipeline` refuse.
- Muon: with `shard` and `tensor`, each rank gathers the updates of divided matrices and orthogonalizes them.
- Muon: with `pipeline`, the output layer of the full model is trained with AdamW, as in one process.
- tied: embedding and output layer share a weight. Trained with Muon, which leaves this weight to AdamW. With
  `pipeline`, the first and the last stage have a copy each, and the sum of their gradients updates both.
- pipeline: the schedule `1f1b`. `tests/training/test_tensor_ranks.py` compares the other schedules.
- MoE: only `expert` computes different experts on different ranks. With `shard`, each rank gathers all experts of a
  block; with `tensor`, it has all of them. The router biases follow the load of all ranks. In a pipeline, forward
  passes of a step follow its first backward pass, and short batches are padded, so the load would not be that of one
  process.
"""


def page() -> str:
    """The table, and the reasons of refusals."""
    refusals = {name: refusal(*name) for name in NAMES}
    head = HEAD.format(tolerance=TOLERANCE, layouts=" | ".join(LAYOUTS), lines="|".join(["---"] * len(LAYOUTS)))
    rows = [[feature, *("refused" if refusals[feature, each] else "equal" for each in LAYOUTS)] for feature in FEATURES]
    reasons = [f"- {feature} with {layout}: {why}" for (feature, layout), why in refusals.items() if why]
    return head + "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *reasons, NOTES])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "combined.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_is_what_is_refused(project: Path) -> None:
    assert PAGE.read_text() == page(), "python -m tests.training.test_combinations > docs/reference/combinations.md"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_not_refused_equals_one_process(project: Path) -> None:
    works = [name for name in NAMES if refusal(*name) is None]
    trained(project / "one", 1, {feature: {**recipe_of(feature, None), "name": feature} for feature in FEATURES})
    for count in (2, 4):
        those = [name for name in works if num_ranks(name[1]) == count]
        trained(project / str(count), count, {"-".join(name): recipe_of(*name) for name in those})
    apart = {
        name: largest_difference(
            project / str(num_ranks(name[1])) / "runs" / "-".join(name), project / "one/runs" / name[0]
        )
        for name in works
    }
    assert {name: number for name, number in apart.items() if number > TOLERANCE} == {}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        file = Path(folder, "combined.py")
        file.write_text(MODULE)
        spec = spec_from_file_location("combined", file)
        assert spec is not None and spec.loader is not None
        sys.modules["combined"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.stdout.write(page())
