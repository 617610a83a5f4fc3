"""Policy gradient (REINFORCE, Williams 1992): the data are seeds of episodes, and the loss plays them.

The sampled actions come from torch's generator, which is part of a checkpoint: a resumed run plays the same episodes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from corridor import MOST, play, policy
from torch import Tensor, nn

import trainwright as tw


def loss(model: nn.Module, batch: tuple[Tensor]) -> tw.Loss:
    (seeds,) = batch
    seen, actions, returns = play(model, seeds)
    log_prob = torch.distributions.Categorical(logits=model(seen)).log_prob(actions)
    baseline = returns.mean(dim=1, keepdim=True)
    return tw.Loss(-(log_prob * (returns - baseline)).sum() / MOST, float(len(seeds)), {"reward": returns[0].sum()})


def main(steps: int = 200, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    return tw.fit(
        policy(),
        (torch.arange(4096),),
        loss,
        batch=64,
        steps=steps,
        lr=1e-2,
        schedule="cosine",
        clip=1.0,
        resume=resume,
    )


if __name__ == "__main__":
    main()
