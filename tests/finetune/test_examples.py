"""The recipes in ``examples/`` train a tiny model that the test writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as tw
from tests.finetune.sets import chat, lines, pair
from tests.finetune.tokenizers import make_tokenizer
from trainwright.commands.verify.packing import verify_packing
from trainwright.errors import RecipeError
from trainwright.plan.trace.blueprint import make_blueprint
from trainwright.recipe import load

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained("my-model")
    tokenizer.save_pretrained("my-model")
    Path("chats.jsonl").write_bytes(lines([chat(at) for at in range(80)]))
    Path("pairs.jsonl").write_bytes(lines([pair(at) for at in range(60)]))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sft", ["optimizer.lr=1e-3", "observers=[{use: generate, args: {prompts: ['a\\x1b[2J']}}]"]),
        ("dpo", ["optimizer.lr=1e-4", "batch.size=8"]),
    ],
    ids=["sft", "dpo"],
)
def test_an_example_trains(name: str, changed: list[str], folder: Path) -> None:
    result = tw.train(load(EXAMPLES / f"{name}.yaml", overrides=changed), quiet=True)
    assert [each.code for each in result.findings if each.severity != "info"] == []
    assert result.loss is not None and result.val_loss is not None
    first, *_, last = [each["loss"] for each in steps(Path(result.run))]
    assert last < first
    log = [json.loads(line) for line in (Path(result.run) / "log.jsonl").read_text().splitlines()]
    evaluated = [each for each in log if each.get("kind") == "evaluated"]
    assert evaluated[0]["step"] == 0 and evaluated[-1]["loss"] < evaluated[0]["loss"]
    if name == "sft":
        samples = (Path(result.run) / "samples/samples.txt").read_text()
        assert samples.startswith("--- the start\n> a")
        assert samples.count("--- step") == len({each["step"] for each in evaluated}) - 1
        assert "\x1b" not in samples
    if name == "dpo":
        assert first == pytest.approx(0.6931, abs=1e-3)
        assert {"reward_margin", "reward_accuracy"} <= set(result.metrics)


def steps(run: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [each for each in found if each.get("kind") == "step"]


def test_packing_is_proved_by_a_command(folder: Path) -> None:
    proof = verify_packing(EXAMPLES / "sft.yaml", settings=["batch.micro=8"])
    assert proof.exit_code == 0 and proof.samples == 8 and proof.difference < 1e-5


def test_a_plan_has_samples_with_the_reference(folder: Path) -> None:
    blueprint = make_blueprint(load(EXAMPLES / "dpo.yaml"))
    assert isinstance(blueprint.sample, dict) and "reference_chosen" in blueprint.sample


def test_packing_without_packed_rows_is_an_error(folder: Path) -> None:
    with pytest.raises(RecipeError, match="is none, so no samples share a row"):
        verify_packing(EXAMPLES / "sft.yaml", settings=["data.packing=none"])


def test_the_grpo_example_trains(folder: Path) -> None:
    ask = {"role": "user", "content": "What is 2 + 3?"}
    Path("prompts.jsonl").write_bytes(lines([{"prompt": [ask], "answer": str(at)} for at in range(20)]))
    small = ["batch.size=2", "until=2steps", "loss.args.completions=2", "loss.args.max_new_tokens=4"]
    result = tw.train(load(EXAMPLES / "grpo.yaml", overrides=[*small, "checkpoint.best=null"]), quiet=True)
    assert [each.code for each in result.findings if each.severity != "info"] == []
    assert {"reward", "kl", "completions_cut", "groups_of_equal_reward"} <= set(result.metrics)
