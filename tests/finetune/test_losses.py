"""DPO, Bradley-Terry and distillation equal the hand calculation; NEFTune draws noise in training only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.finetune.tiny import EOS, llama, log_prob, pairs, reward_llama, supervised
from trainwright.data.padding import TokenRows
from trainwright.engine.losses import hf_causal_lm
from trainwright.engine.token_batch import sample_lengths, token_batch
from trainwright.errors import UsageError
from trainwright.finetune.losses import DPO, UNKNOWN, Distillation, bradley_terry, require_preferences


def policy_and_reference() -> tuple[Any, Any]:
    policy, reference = llama(), llama()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.3)
    return policy, reference


def with_reference(data: list[dict[str, Tensor]], reference: nn.Module) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        return [
            {**each, **{f"reference_{which}": log_prob(reference, each, which) for which in ("chosen", "rejected")}}
            for each in data
        ]


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.2)])
def test_dpo_by_hand(beta: float, smoothing: float) -> None:
    policy, reference = policy_and_reference()
    data = with_reference(pairs(), reference)
    expected, margins = torch.zeros(()), []
    for sample in data:
        gain = {
            which: beta * (log_prob(policy, sample, which) - sample[f"reference_{which}"])
            for which in ("chosen", "rejected")
        }
        margin = gain["chosen"] - gain["rejected"]
        expected = expected - (1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        margins.append(margin.item())
    loss = DPO(beta, smoothing)(policy, TokenRows()(data))
    assert float(loss.weight) == len(data)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(loss.metrics["reward_margin"]) == pytest.approx(sum(margins), rel=1e-4)
    assert int(loss.metrics["reward_accuracy"]) == sum(margin > 0 for margin in margins)
    found, wanted = (torch.autograd.grad(each, list(policy.parameters())) for each in (loss.total, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dpo_begins_at_log_2_before_the_reference_is_known() -> None:
    unknown = [{**each, "reference_chosen": UNKNOWN, "reference_rejected": UNKNOWN} for each in pairs()]
    loss = DPO()(llama(), TokenRows()(unknown))
    assert loss.total.item() / float(loss.weight) == pytest.approx(math.log(2), rel=1e-6)


def test_dpo_without_reference_names_the_remedy() -> None:
    with pytest.raises(UsageError, match="no reference_chosen"):
        DPO()(llama(), TokenRows()(pairs()))


@pytest.mark.parametrize("args", [{"beta": 0.0}, {"label_smoothing": 0.5}])
def test_dpo_refuses_values_without_meaning(args: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(args))):
        DPO(**args)


@pytest.mark.parametrize("pad", [None, 62, EOS], ids=["no pad token", "pad token", "padding is the end of the text"])
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_bradley_terry_by_hand(pad: int | None, center: float) -> None:
    model, data = reward_llama(pad_token_id=pad), pairs()

    def reward(ids_T: Tensor) -> Tensor:
        hidden_TD = model.model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return model.score(hidden_TD[-1]).squeeze()

    expected = torch.zeros(())
    for sample in data:
        chosen, rejected = (reward(sample[f"{which}_input_ids"]) for which in ("chosen", "rejected"))
        expected = expected - F.logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2
    loss = bradley_terry(model, TokenRows()(data), center=center)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.config.pad_token_id == pad


def test_bradley_terry_needs_one_logit() -> None:
    with pytest.raises(UsageError, match="one logit for each row"):
        bradley_terry(reward_llama(num_labels=2), TokenRows()(pairs()))


@pytest.mark.parametrize("loss", [bradley_terry, DPO()])
def test_batches_without_pairs_are_refused(loss: Any) -> None:
    with pytest.raises(UsageError, match="compares two completions"):
        loss(llama(), TokenRows()(supervised()))


def test_pairs_of_text_name_the_data_set_that_tokenizes_them() -> None:
    with pytest.raises(UsageError, match=r"sample 0 has prompt, chosen, rejected(.|\n)*use: preference"):
        require_preferences([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)


@pytest.mark.parametrize("layout", ["padded", "padding_free"])
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.0, 0.5)])
def test_distillation_by_hand(layout: str, temperature: float, weight: float) -> None:
    student, teacher = policy_and_reference()
    expected = torch.zeros(())
    for sample in supervised():
        target_T = sample["labels"][1:]
        counted_T = target_T != -100
        mine, other = (
            model(input_ids=sample["input_ids"][None], use_cache=False).logits[0, :-1][counted_T]
            for model in (student, teacher)
        )
        p = (other / temperature).softmax(-1)
        kl = (p * (p.log() - (mine / temperature).log_softmax(-1))).sum()
        cross_entropy = F.cross_entropy(mine, target_T[counted_T], reduction="sum")
        expected = expected + weight * temperature**2 * kl + (1 - weight) * cross_entropy
    loss = Distillation(teacher, temperature, weight)
    found = loss(student, TokenRows(padding_free=layout == "padding_free")(supervised()))
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-5)
    found.total.backward()
    assert all(weight.grad is None for weight in loss.teacher.parameters())
    assert loss.state_dict() == {} and not loss.train().teacher.training


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="the teacher has 70 tokens and the student 64"):
        Distillation(llama(vocab_size=70))(llama(), TokenRows()(supervised()))


def test_a_teacher_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="there is no folder /no/such/folder"):
        Distillation("/no/such/folder")


def test_the_weights_of_a_teacher_are_not_unpickled(tmp_path: Path) -> None:
    made = llama()
    made.save_pretrained(tmp_path)
    loaded = Distillation(str(tmp_path)).teacher
    assert all(map(torch.equal, loaded.state_dict().values(), made.state_dict().values()))
    (tmp_path / "model.safetensors").unlink()
    torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="are pickled"):
        Distillation(str(tmp_path))


def noise_of(model: Any, batch: Any, alpha: float) -> list[Tensor]:
    seen: list[Tensor] = []
    plain = model.get_input_embeddings().weight
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    hf_causal_lm(model, batch, neftune_alpha=alpha)
    handle.remove()
    return [seen[0], plain.detach()]


@pytest.mark.parametrize("padding_free", [False, True])
def test_noise_has_the_bound_of_each_sample(padding_free: bool) -> None:
    model, alpha, data = llama().train(), 5.0, supervised()
    batch = TokenRows(padding_free=padding_free)(data)
    called = token_batch(model, batch)
    torch.manual_seed(0)
    noisy, weight = noise_of(model, batch, alpha)
    noise_RTD = (noisy - F.embedding(called.inputs["input_ids"], weight)).abs()
    places = called.places or [(row, 0) for row in range(len(data))]
    for (row, start), sample in zip(places, data, strict=True):
        length = len(sample["input_ids"])
        limit = alpha / math.sqrt(length * weight.shape[1])
        assert 0.9 * limit < noise_RTD[row, start : start + length].max() < limit * (1 + 1e-5)
    torch.manual_seed(0)
    assert noise_of(model, batch, alpha)[0].equal(noisy), "the same generators give the same noise"


def test_no_noise_in_evaluation() -> None:
    model, batch = llama().eval(), TokenRows()(supervised())
    assert hf_causal_lm(model, batch, neftune_alpha=5.0).total.equal(hf_causal_lm(model, batch).total)
    model.train()
    assert not hf_causal_lm(model, batch, neftune_alpha=5.0).total.equal(hf_causal_lm(model, batch).total)


def test_noise_equals_that_of_transformers_without_padding() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    model, same = llama().train(), default_collate(supervised([9] * 4))
    torch.manual_seed(3)
    ours = hf_causal_lm(model, same, neftune_alpha=5.0).total
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(3)
    assert hf_causal_lm(model, same).total.item() == pytest.approx(ours.item(), rel=1e-6)


def test_lengths_of_packed_samples() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    found = sample_lengths({"input_ids": positions, "position_ids": positions})
    assert found.tolist() == [[3, 3, 3, 2, 2], [1, 4, 4, 4, 4]]
