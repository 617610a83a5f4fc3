"""Reference log-probabilities: from the initial weights, computed once, on any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests import ranks
from tests.finetune.tiny import llama, log_prob, pairs
from trainwright.data.unwrap import unwrap
from trainwright.errors import DataError, TrainwrightError
from trainwright.finetune.losses import DPO, WithReference, fill, require_preferences, weights_digest, with_reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))


def filled(model: Any, data: list[Any], batch: int = 4) -> WithReference:
    wrapped = with_reference(DPO(), unwrap(data))
    assert wrapped is not None
    fill([wrapped, None], model, CPU, batch=batch)
    dataset: WithReference = wrapped.dataset
    return dataset


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_they_are_those_of_each_completion_alone(batch: int) -> None:
    model, data = llama(), pairs()
    found = filled(model, data, batch)
    with torch.no_grad():
        for position in range(len(data)):
            for which in ("chosen", "rejected"):
                expected = log_prob(model.eval(), data[position], which).item()
                assert float(found[position][f"reference_{which}"]) == pytest.approx(expected, rel=1e-5)


def test_the_cache_is_read_and_keyed_by_weights_and_samples(tmp_path: Path) -> None:
    first, files = filled(llama(), pairs()), lambda: sorted((tmp_path / "cache" / "reference").iterdir())
    assert len(files()) == 1
    model = llama()
    model.forward = None  # a call would fail
    assert filled(model, pairs()).values.equal(first.values)
    changed = llama()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1e-3
    assert filled(changed, pairs()).content_sha256() != first.content_sha256()
    filled(llama(), pairs()[1:])
    assert len(files()) == 3
    assert weights_digest(changed) != weights_digest(llama())


def test_samples_that_have_them_are_left_alone() -> None:
    data = [{**each, "reference_chosen": 0.0, "reference_rejected": 0.0} for each in pairs()]
    given = unwrap(data)
    assert with_reference(DPO(), given) is given


def test_pairs_without_preference_are_refused() -> None:
    data = pairs(4)
    data[2]["rejected_labels"][:] = -100
    with pytest.raises(
        DataError, match="1 of 4 pairs have a completion without a label, the first is pair 2"
    ) as caught:
        require_preferences(data)
    assert list(caught.value.sample_ids) == [2]
    same = [{**each, "rejected_input_ids": each["chosen_input_ids"]} for each in pairs(4)]
    with pytest.raises(DataError, match="equal in all 4 pairs"):
        require_preferences(same)


def test_doubtful_pairs_are_reported() -> None:
    said: list[str] = []
    require_preferences(pairs(4), said.append)
    assert not said
    data = pairs(4)
    other = {
        name.replace("chosen", "?").replace("rejected", "chosen").replace("?", "rejected"): value
        for name, value in data[0].items()
    }
    require_preferences([*data, other, {**data[1], "rejected_input_ids": data[1]["chosen_input_ids"]}], said.append)
    assert "1 of 6 pairs have equal completions" in said[0] and "the other way round" in said[1]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_reference() -> None:
    def train(steps: int, model: Any, **more: Any) -> list[float]:
        losses: list[float] = []
        tw.fit(
            model,
            pairs(),
            "dpo",
            batch=8,
            steps=steps,
            lr=1e-3,
            seed=1,
            quiet=True,
            settings={"log.doctor": False},
            observers=[lambda result, state: losses.append(float(result.loss))],
            **more,
        )
        return losses

    straight = train(6, llama())
    first = train(3, llama(), name="part")
    assert first + train(6, llama(), name="part", resume="runs/part") == straight
    other = llama()
    with torch.no_grad():
        next(other.parameters()).mul_(1.1)
    with pytest.raises(TrainwrightError, match="data"):  # another reference counts as other data
        train(9, other, name="part", resume="runs/part")


ON_RANKS = """
import json
import trainwright as tw
from tests.finetune.tiny import llama, pairs, reward_llama

for model, loss, data in ((llama(), "dpo", pairs(13)), (reward_llama(), "bradley_terry", pairs(13))):
    losses = []
    result = tw.fit(model, data, loss, batch=6, steps=3, lr=1e-3, seed=1, quiet=True, precision="fp32",
                    settings={"log.doctor": False, "log.every": "1steps", "name": loss},
                    observers=[lambda result, state: losses.append(float(result.loss))])
    print(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    found = {}
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        os.environ["TRAINWRIGHT_CACHE"] = str(tmp_path / str(count) / "cache")
        done = ranks.finish(ON_RANKS, count, cwd=tmp_path / str(count), timeout=120)
        found[count] = [json.loads(line) for line in done[0].stdout.splitlines() if line.startswith("[")]
    assert len(found[1]) == 2 and all(len(losses) == 3 for losses in found[1])
    for one, two in zip(found[1], found[2], strict=True):
        assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers
def test_the_reference_of_trained_adapters_is_the_model_with_them() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, data = peft.get_peft_model(llama(), config), pairs(4)
    found = filled(model, data)
    with torch.no_grad(), model.disable_adapter():
        base = [log_prob(model.eval(), each, "chosen").item() for each in data]
    with torch.no_grad():
        policy = [log_prob(model.eval(), each, "chosen").item() for each in data]
    assert [float(each["reference_chosen"]) for each in found] == pytest.approx(policy, rel=1e-5)
    assert policy != pytest.approx(base, rel=1e-3)
