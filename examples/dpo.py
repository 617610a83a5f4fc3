"""Direct preference optimization (Rafailov et al. 2023): a model against a frozen copy of itself."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.models.gpt import gpt

VOCABULARY, PROMPT, LENGTH, BETA = 12, 3, 8, 0.5


def preferences(count: int = 256) -> tuple[Tensor, Tensor]:
    """Token ids (count, LENGTH) that are chosen, and others after the same prompt that are rejected: those fall."""
    torch.manual_seed(0)
    prompt = torch.randint(VOCABULARY, (count, PROMPT))
    answer = torch.randint(VOCABULARY, (count, LENGTH - PROMPT)).sort(dim=1).values
    return torch.cat([prompt, answer], dim=1), torch.cat([prompt, answer.flip(1)], dim=1)


def answer_log_prob(model: nn.Module, ids: Tensor) -> Tensor:
    """Of each row, without its prompt."""
    log_prob = F.log_softmax(model(ids[:, :-1]), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return log_prob[:, PROMPT - 1 :].sum(dim=1)


class Preference(nn.Module):
    """The loss, with the model as it was as its reference."""

    def __init__(self, reference: nn.Module) -> None:
        super().__init__()
        self.reference = copy.deepcopy(reference).eval().requires_grad_(False)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
        chosen, rejected = (answer_log_prob(model, ids) - answer_log_prob(self.reference, ids) for ids in batch)
        margin = BETA * (chosen - rejected)
        return tw.Loss(-F.logsigmoid(margin).sum(), float(len(margin)), {"preferred": (margin > 0).sum()})


def main(steps: int = 100, resume: Path | None = None) -> tw.Result:
    data = preferences()
    model = gpt(vocab_size=VOCABULARY, block_size=LENGTH, layers=1, heads=2, d_model=16)
    return tw.fit(
        model, data, Preference(model), batch=32, steps=steps, lr=3e-3, schedule="cosine", clip=1.0, resume=resume
    )


if __name__ == "__main__":
    main()
