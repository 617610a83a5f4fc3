"""The losses of SFT, DPO and reward models equal those of TRL step by step, with the same model, data and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests import ranks
from tests.finetune.tiny import EOS, PAD, llama, pairs, prompt_length, reward_llama, supervised

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = 5
DISTINCT = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
"""Lengths without ties, so that both libraries pack the same rows."""


@pytest.fixture(autouse=True)
def _quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(PAD)} | {"<pad>": PAD, "<eos>": EOS}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def trl_losses(
    kind: str, model: nn.Module, rows: list[dict[str, Any]], batch: int, accumulation: int, **config: Any
) -> Any:
    """Trains with a trainer of TRL in the order of the data; returns the loss of each step."""
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    micro: list[float] = []

    class InOrder(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            micro.append(float(loss))
            return loss

    if kind == "DPO":
        InOrder._prepare_dataset = lambda self, dataset, *args, **kwargs: dataset  # the ids are given
    args = getattr(trl, f"{kind}Config")(
        output_dir="out",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_steps=STEPS,
        per_device_train_batch_size=batch // accumulation,
        gradient_accumulation_steps=accumulation,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **config,
    )
    more = {"ref_model": llama()} if kind == "DPO" and not hasattr(model, "peft_config") else {}
    InOrder(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **more).train()
    return [sum(micro[at : at + accumulation]) for at in range(0, len(micro), accumulation)]


def our_losses(
    model: nn.Module, data: list[dict[str, Tensor]], loss: str, batch: int, accumulation: int, **more: Any
) -> Any:
    losses: list[float] = []
    settings = {"data.shuffle": False, "optimizer.weight_decay": 0.0, "log.doctor": False, **more}
    tw.fit(
        model,
        data,
        loss,
        batch=batch,
        accumulation=accumulation,
        steps=STEPS,
        lr=1e-3,
        seed=1,
        precision="fp32",
        quiet=True,
        settings=settings,
        observers=[lambda result, state: losses.append(float(result.loss))],
    )
    return losses


def assert_equal(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(ours[0] - ours[-1]) > 1e-2, "it trains"


def as_lists(samples: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    return [{name: value.tolist() for name, value in sample.items()} for sample in samples]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_sft(accumulation: int) -> None:
    data = supervised()
    theirs = trl_losses("SFT", llama(), as_lists(data), 8, accumulation, max_length=64)
    assert_equal(our_losses(llama(), data, "hf_causal_lm", 8, accumulation), theirs)


def test_sft_packed() -> None:
    data = supervised(DISTINCT)
    theirs = trl_losses("SFT", llama(), as_lists(data), 4, 2, max_length=40, packing=True)
    packing = {"data.packing": {"by": "bfd", "max_length": 40}}
    assert_equal(our_losses(llama(), data, "hf_causal_lm", 4, 2, **packing), theirs)


def test_sft_padding_free() -> None:
    data = supervised()
    theirs = trl_losses("SFT", llama(), as_lists(data), 8, 2, max_length=None, padding_free=True)
    assert_equal(our_losses(llama(), data, "hf_causal_lm", 8, 2, **{"data.packing": "padding_free"}), theirs)


def preference_rows(data: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    rows = []
    for sample in data:
        prompt = prompt_length(sample)
        rows.append(
            {
                "prompt_ids": sample["chosen_input_ids"][:prompt].tolist(),
                "chosen_ids": sample["chosen_input_ids"][prompt:].tolist(),
                "rejected_ids": sample["rejected_input_ids"][prompt:].tolist(),
            }
        )
    return rows


def test_dpo() -> None:
    data = pairs()
    theirs = trl_losses("DPO", llama(), preference_rows(data), 8, 2, beta=0.5, max_length=None)
    assert_equal(our_losses(llama(), data, "dpo", 8, 2, **{"loss.args": {"beta": 0.5}}), theirs)


def test_reward_model() -> None:
    data = pairs()
    rows = [
        {"chosen_ids": each["chosen_input_ids"].tolist(), "rejected_ids": each["rejected_input_ids"].tolist()}
        for each in data
    ]
    theirs = trl_losses("Reward", reward_llama(), rows, 8, 2, max_length=None)
    assert_equal(our_losses(reward_llama(), data, "bradley_terry", 8, 2), theirs)


ON_RANKS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.finetune import test_against_trl as same
from tests.finetune.tiny import llama, supervised

data = supervised(same.DISTINCT[:16])
for batch, theirs, ours in json.loads(sys.argv[1]):
    theirs = same.trl_losses("SFT", llama(), same.as_lists(data), batch // 2, 2, **theirs)
    print(json.dumps([theirs, same.our_losses(llama(), data, "hf_causal_lm", batch, 2, **ours)]))
"""


@pytest.mark.process
def test_sft_on_two_ranks(tmp_path: Path) -> None:
    packed = {"data.packing": {"by": "bfd", "max_length": 48}}  # 4 rows, so that every epoch has one step
    cases = [(8, {"max_length": 64}, {}), (4, {"max_length": 48, "packing": True}, packed)]
    done = ranks.finish(ON_RANKS, 2, json.dumps(cases), cwd=tmp_path, timeout=250)
    printed = [[json.loads(line) for line in each.stdout.splitlines() if line[0] == "["] for each in done]
    for (first, ours), (second, _) in zip(*printed, strict=True):
        # The trainer of TRL returns the sum of a rank over the mean number of tokens of the ranks.
        assert_equal(ours, [sum(each) / 2 for each in zip(first, second, strict=True)])
    assert len(printed[0]) == len(cases)


def with_lora(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    return wrapped.train()


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def test_lora_of_peft() -> None:
    data, theirs, ours = supervised(), with_lora(llama()), with_lora(llama())
    expected = trl_losses("SFT", theirs, as_lists(data), 8, 2, max_length=64)
    losses = our_losses(ours, data, "hf_causal_lm", 8, 2, **{"data.packing": "padding_free"})
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(adapters(ours)) == 8
    for name, weight in adapters(ours).items():
        torch.testing.assert_close(weight, adapters(theirs)[name], atol=1e-5, rtol=0)


def test_dpo_with_lora() -> None:
    data = pairs()
    theirs, ours = with_lora(llama()), with_lora(llama())
    expected = trl_losses("DPO", theirs, preference_rows(data), 8, 2, max_length=None, beta=2.0)
    losses = our_losses(ours, data, "dpo", 8, 2, **{"loss.args": {"beta": 2.0}})
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, weight in adapters(ours).items():
        torch.testing.assert_close(weight, adapters(theirs)[name], atol=1e-5, rtol=0)
