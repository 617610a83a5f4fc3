"""GRPO: the loss of TRL, completions that follow from the random state, and reward functions of the user."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainwright as tw
from tests.finetune.sets import lines
from tests.finetune.tiny import EOS, PAD, llama
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.grpo import GRPO, CompletionGroups
from trainwright.finetune.prompts import Prompts

PROMPTS, COMPLETIONS, LONGEST = 3, 4, 6


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def even(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """A reward: the number of even ids."""
    return [float(sum(each % 2 == 0 for each in ids)) for ids in completion_ids]


def constant(completions: list[Any]) -> list[float]:
    return [1.0] * len(completions)


def policy() -> Any:
    """A model whose vocabulary is that of the tokenizer."""
    tokenizer = make_tokenizer()
    return llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def prompts(count: int = 8) -> Prompts:
    return Prompts([{"prompt": "say " * (1 + at % 3), "answer": at} for at in range(count)], tokenizer=make_tokenizer())


def grpo(reward: Any = even, **changed: Any) -> GRPO:
    options: dict[str, Any] = {"completions": COMPLETIONS, "max_new_tokens": LONGEST, "tokenizer": make_tokenizer()}
    return GRPO(reward, **{**options, **changed})


def rollout() -> tuple[CompletionGroups, dict[str, Tensor]]:
    """Completions of an earlier policy, and the same as TRL has them: prompts are padded on the left."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for row in range(PROMPTS * COMPLETIONS):
        prompt = torch.randint(60, (2 + row // COMPLETIONS,), generator=draw)
        completion = torch.randint(60, (1 + row % LONGEST,), generator=draw)
        rows.append((prompt, completion, -3 * torch.rand(len(completion), generator=draw)))
    rewards = torch.rand(PROMPTS, COMPLETIONS, generator=draw)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def pad(parts: list[Tensor], fill: float, side: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill, padding_side=side)

    ones = torch.ones_like
    ours = CompletionGroups(
        pad([torch.cat([p, c]) for p, c, _ in rows], PAD, "right"),
        pad([torch.cat([-100 * ones(p), c]) for p, c, _ in rows], -100, "right"),
        pad([ones(torch.cat([p, c])) for p, c, _ in rows], 0, "right"),
        advantages,
        pad([torch.cat([0.0 * p, old]) for p, _, old in rows], 0, "right"),
    )
    theirs = {
        "prompt_ids": pad([p for p, _, _ in rows], PAD, "left"),
        "prompt_mask": pad([ones(p) for p, _, _ in rows], 0, "left"),
        "completion_ids": pad([c for _, c, _ in rows], PAD, "right"),
        "completion_mask": pad([ones(c) for _, c, _ in rows], 0, "right"),
        "old_per_token_logps": pad([old for _, _, old in rows], 0, "right"),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(sum(len(c) for _, c, _ in rows)),
    }
    return ours, theirs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_loss_of_trl(loss_type: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl
    from datasets import Dataset
    from trl.trainer.utils import add_fused_lm_head

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, base = llama(eos_token_id=EOS), llama(eos_token_id=EOS)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(5)
        for each in model.parameters():
            each += 0.05 * torch.randn(each.shape, generator=draw)
    args = trl.GRPOConfig(  # type: ignore[attr-defined]
        output_dir="out",
        report_to="none",
        use_cpu=True,
        bf16=False,
        beta=0.0,  # else it loads a reference by name
        loss_type=loss_type,
        temperature=0.8,
        epsilon_high=0.3,
        num_generations=COMPLETIONS,
        per_device_train_batch_size=PROMPTS * COMPLETIONS,
        max_completion_length=LONGEST,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list([{"prompt": "a"}] * 4)
    plain = copy.deepcopy(model)
    trainer = trl.GRPOTrainer(model, constant, args, data, processing_class=make_tokenizer())  # type: ignore[attr-defined]
    given, inputs = rollout()
    trainer.beta, trainer.current_gradient_accumulation_steps = 0.1, 1
    loss = grpo(beta=0.1, loss_type=loss_type, temperature=0.8, clip_high=0.3)
    loss.keep_reference(base)
    both = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    masks = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    longest = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        score = trainer._get_per_token_logps_and_entropies
        reference = copy.deepcopy(base)
        add_fused_lm_head(reference, temperature=0.8)
        inputs["ref_per_token_logps"], _, _ = score(reference, both, masks, longest)
    model.zero_grad()
    expected = trainer._compute_loss(model, inputs)
    expected.backward()
    batch = {
        "input_ids": given.ids,
        "labels": given.labels,
        "attention_mask": given.mask,
        "advantages": given.advantages,
        "old_log_probs": given.old,
    }
    found = loss(plain, batch)
    mean = found.total / found.weight
    mean.backward()
    assert float(mean) == pytest.approx(float(expected), abs=1e-5)
    for each, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(each.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_advantages_compare_the_completions_of_a_prompt() -> None:
    torch.manual_seed(0)
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completion_ids: list[list[int]], answer: list[int]) -> list[float]:
        seen.update(prompts=prompts, answer=answer, ids=completion_ids)
        return even(completion_ids)

    data, loss = prompts(2), grpo(reward)
    made = loss._generate_rollout(policy(), data.fetch_batch(torch.arange(2).numpy()))
    assert seen["answer"] == [0] * COMPLETIONS + [1] * COMPLETIONS
    assert seen["prompts"][0] == "say " and seen["prompts"][-1] == "say say "
    rewards_BG = torch.tensor(even(seen["ids"])).view(2, COMPLETIONS)
    expected = (rewards_BG - rewards_BG.mean(1, keepdim=True)) / (rewards_BG.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(made.advantages, expected.flatten())
    for row, ids in enumerate(seen["ids"]):  # prompt, completion up to its end token, padding
        prompt = data[row // COMPLETIONS]["input_ids"].tolist()
        length = len(prompt) + len(ids)
        assert made.ids[row, :length].tolist() == prompt + ids
        assert made.labels[row, :length].tolist() == [-100] * len(prompt) + ids
        assert made.mask[row].tolist() == [1] * length + [0] * (made.mask.shape[1] - length)


def test_a_policy_that_gets_a_reward_learns_it() -> None:
    model, data = policy(), prompts()
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]]) -> list[float]:
        found = [sum(each < 40 for each in ids) / LONGEST for ids in completion_ids]
        rewards.append(sum(found) / len(found))
        return found

    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-2), grpo(reward, completions=8)
    torch.manual_seed(0)
    batch = data.fetch_batch(torch.arange(8).numpy())
    for _ in range(12):
        optimizer.zero_grad()
        found = loss(model, batch)
        (found.total / found.weight).backward()
        optimizer.step()
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["without KL", "with KL"])
def test_generation_under_autocast_leaves_all_gradients(beta: float) -> None:
    model, loss = policy(), grpo(lambda completions: [float(at) for at in range(len(completions))], beta=beta)
    loss.keep_reference(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(model, prompts().fetch_batch(torch.arange(2).numpy()))
    found.total.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


@pytest.mark.filterwarnings("ignore")
def test_the_reference_is_the_model_at_the_start_also_of_trained_adapters() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(policy(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    loss = grpo(beta=1.0)
    loss.keep_reference(model)
    assert all("lora_" in name for name in loss.get_extra_state())
    ids = torch.randint(60, (2, 5))
    made = CompletionGroups(ids, ids, torch.ones_like(ids), torch.zeros(2))
    before = loss.log_probs(model.eval(), made)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_" in name:
                each += 0.1
    torch.testing.assert_close(loss._reference_log_probs(model, made), before.detach())
    assert not torch.allclose(loss.log_probs(model, made), before)
    later = GRPO(even, beta=1.0)
    later.load_state_dict(loss.state_dict())  # as a resume of a loop by hand does
    torch.testing.assert_close(later._reference_log_probs(model, made), before.detach())


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (lambda completions: [1.0], "returned 1 values for 8 completions"),
        (lambda completions: [float("nan")] * len(completions), "returned nan for 8"),
        (lambda completions, solution: [], "has the parameter 'solution'"),
    ],
    ids=["too few", "nan", "unknown column"],
)
def test_a_reward_that_cannot_be_used(reward: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        grpo(reward)._score(['{"prompt": "a"}'] * 2, [[1]] * 8, make_tokenizer())


def test_settings_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="no reward function 'nowhere:f'"):
        GRPO("nowhere:f")
    with pytest.raises(UsageError, match="none to compare with"):
        GRPO(even, completions=1)
    with pytest.raises(UsageError, match=r"clip_high=-0\.2 must"):
        GRPO(even, clip_high=-0.2)
    with pytest.raises(UsageError, match="list of rewards is empty"):
        GRPO([])
    with pytest.raises(UsageError, match="records have a key 'completions'"):
        grpo(even)._score(['{"prompt": "a", "completions": ["b"]}'] * 2, [[1]] * 8, make_tokenizer())
    with pytest.raises(UsageError, match="needs batches of prompts"):
        grpo()(policy(), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})


def test_prompts_from_a_file(tmp_path: Path) -> None:
    records = [{"prompt": [{"role": "user", "content": f"say {at}"}], "answer": at} for at in range(20)]
    Path("prompts.jsonl").write_bytes(lines(records))
    tokenizer = make_tokenizer()
    options: dict[str, Any] = {"tokenizer": tokenizer, "val_fraction": 0.3}
    train, val = Prompts("prompts.jsonl", **options), Prompts("prompts.jsonl", split="val", **options)
    assert len(train) + len(val) == 20 and not {*train.records} & {*val.records}
    text = tokenizer.decode(train[0]["input_ids"])
    assert text.startswith("<|im_start|>user") and text.endswith("<|im_start|>assistant\n")
    with pytest.raises(UsageError, match=r"prompts.jsonl:\d+: the prompt has \d+ tokens, more than max_length: 3"):
        Prompts("prompts.jsonl", tokenizer=tokenizer, max_length=3)
    Path("bad.jsonl").write_bytes(lines([*records[:2], {"question": "?"}]))
    with pytest.raises(UsageError, match=r"bad.jsonl:3: the record has no prompt"):
        Prompts("bad.jsonl", tokenizer=tokenizer)


@pytest.mark.slow
def test_a_resumed_run_generates_the_same_completions() -> None:
    def train(steps: int, **more: Any) -> tuple[list[float], Any]:
        losses: list[float] = []
        result = tw.fit(
            policy(),
            prompts(),
            grpo(beta=0.05),
            batch=4,
            steps=steps,
            lr=1e-2,
            seed=1,
            quiet=True,
            settings={"log.doctor": False, "schedule": "constant"},
            observers=[lambda result, state: losses.append(float(result.loss))],
            **more,
        )
        return losses, result

    straight, whole = train(6, name="straight")
    first, _ = train(3, name="part")
    second, last = train(6, name="part", resume="runs/part")
    assert first + second == straight and len({*straight}) == 6
    for one, other in zip(whole.state.model.parameters(), last.state.model.parameters(), strict=True):
        assert one.equal(other)
    kept = grpo(beta=0.05)
    kept.keep_reference(policy())
    for name, each in last.state.loss.get_extra_state().items():
        assert each.equal(kept.get_extra_state()[name])
