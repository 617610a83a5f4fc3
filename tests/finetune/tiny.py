"""Tiny models and samples for the tests of fine-tuning; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, PAD, EOS = 64, 62, 63
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def llama(**changed: Any) -> Any:
    """Returns a Llama with random weights, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changed}))


def reward_llama(**changed: Any) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_labels": 1, **changed}))


def supervised(lengths: list[int] | None = None) -> list[dict[str, Tensor]]:
    """Returns a sample for each length. Up to three first labels are ignored."""
    draw = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths or [9, 5, 6, 14, 13, 14, 7, 13, 12, 18, 9, 11, 5, 4, 12, 10]:
        ids_T = torch.randint(60, (length,), generator=draw)
        labels_T = ids_T.clone()
        labels_T[: int(torch.randint(0, 4, (), generator=draw))] = -100
        samples.append({"input_ids": ids_T, "labels": labels_T})
    return samples


def pairs(count: int = 16) -> list[dict[str, Tensor]]:
    """Returns preference samples: a prompt with ignored labels, and two completions."""
    draw = torch.Generator().manual_seed(2)

    def ids(low: int, high: int) -> Tensor:
        return torch.randint(60, (int(torch.randint(low, high, (), generator=draw)),), generator=draw)

    made = []
    for _ in range(count):
        prompt, sample = ids(2, 8), dict[str, Tensor]()
        for which in ("chosen", "rejected"):
            completion = torch.cat([ids(2, 9), torch.tensor([EOS])])
            sample[f"{which}_input_ids"] = torch.cat([prompt, completion])
            sample[f"{which}_labels"] = torch.cat([torch.full_like(prompt, -100), completion])
        made.append(sample)
    return made


def prompt_length(sample: dict[str, Tensor]) -> int:
    return int((sample["chosen_labels"] == -100).sum())


def log_prob(model: nn.Module, sample: dict[str, Tensor], which: str) -> Tensor:
    """Returns the log-probability of a completion, computed without other samples."""
    ids_T, labels_T = sample[f"{which}_input_ids"], sample[f"{which}_labels"]
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    chosen_T = labels_T[1:] != -100
    return logits_TV[chosen_T].gather(1, labels_T[1:][chosen_T][:, None]).sum()
