"""Measures the cost of ``tw.watch``: the same plain PyTorch loop with and without it, in interleaved runs.

    python -m benchmarks.watch_overhead [--quick] [--device cuda] [--only mlp,gpt]

Programs: an MLP (0.5 ms per step), a GPT (4 blocks of width 128, 12 x 64 tokens, 50 ms per step), the same GPT for half
a minute, and three programs that call the model many times per step: REINFORCE (50 calls with gradients), an
actor-critic (50 calls without gradients), and a language model that generates 24 tokens before each step.

``total`` is the ratio of full runs, with all costs of the watch: start and end, run folder, page, and examinations.
``work`` is the same in CPU time, which other load affects less. ``step`` is the ratio of the median steps after the
first 64. ``examined`` is the time of examinations as a fraction of the training time. ``memory`` is the memory that the
recorder held. ``collections`` is the number of full garbage collections; each takes 0.1 s or more.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import trainwright as tw
from benchmarks.figures import about, arguments, figure, interleaved, ratios
from trainwright.models.gpt import gpt as gpt_model

FIRST = 64
"""Number of first steps that ``step`` leaves out."""
CALLS, TOKENS = 50, 24
Step = Callable[[], Tensor]
"""Returns the loss of the next step."""


def mlp(device: str) -> tuple[nn.Module, Step]:
    """An MLP whose step takes 0.5 ms."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    return model, lambda: F.cross_entropy(model(x.clone().to(device)), y.clone().to(device))


def gpt(device: str) -> tuple[nn.Module, Step]:
    """A GPT of nanoGPT's size for CPUs."""
    model = gpt_model(vocab_size=65, block_size=64, layers=4, heads=4, d_model=128).to(device)
    ids = torch.randint(65, (12, 65))

    def loss() -> Tensor:
        now = ids.clone().to(device)
        return F.cross_entropy(model(now[:, :-1]).flatten(0, 1), now[:, 1:].flatten())

    return model, loss


def reinforce(device: str) -> tuple[nn.Module, Step]:
    """REINFORCE with one model call with gradients per action."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)

    def loss() -> Tensor:
        chances, rewards = [], []
        for _ in range(CALLS):
            drawn = Categorical(logits=policy(torch.randn(4, device=device)))
            action = drawn.sample()
            chances.append(drawn.log_prob(action))
            rewards.append(float(action))
        gains = torch.tensor(rewards, device=device)
        return -(torch.stack(chances) * (gains - gains.mean())).sum()

    return policy, loss


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(state))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def actor_critic(device: str) -> tuple[nn.Module, Step]:
    """An actor-critic that acts without gradients, and learns from all actions in one call."""
    model = ActorCritic().to(device)

    def loss() -> Tensor:
        states, actions = [], []
        with torch.no_grad():
            for _ in range(CALLS):
                states.append(torch.randn(4, device=device))
                actions.append(Categorical(logits=model(states[-1])[0]).sample())
        logits, values = model(torch.stack(states))
        action = torch.stack(actions)
        gain = action.float() - values
        return -(Categorical(logits=logits).log_prob(action) * gain.detach()).mean() + gain.square().mean()

    return model, loss


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(64, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, ids_BT: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(ids_BT))[0])
        return out


def generation(device: str) -> tuple[nn.Module, Step]:
    """A language model that generates tokens in eval mode, and is trained on them."""
    model = Language().to(device)

    def loss() -> Tensor:
        ids_BT = torch.randint(64, (4, 4), device=device)
        model.eval()
        with torch.no_grad():
            for _ in range(TOKENS):
                ids_BT = torch.cat([ids_BT, model(ids_BT)[:, -1].argmax(-1, keepdim=True)], 1)
        model.train()
        return F.cross_entropy(model(ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten())

    return model, loss


MAKE = {
    "mlp": mlp,
    "gpt": gpt,
    "half_a_minute": gpt,
    "reinforce": reinforce,
    "actor_critic": actor_critic,
    "generation": generation,
}


@dataclass
class Runs:
    """Runs of ``steps`` steps, each with its own run folder. Keeps the figures of each run."""

    make: Callable[[str], tuple[nn.Module, Step]]
    steps: int
    device: str
    watches: bool
    work_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    examined: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Makes a run. Returns its time in seconds."""
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model, loss = self.make(self.device)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            before, times = _full_collections(), []
            begin_s, begin_work_s = time.perf_counter(), time.process_time()
            watch: Any = tw.watch(model, optimizer, out=Path(folder) / "run", quiet=True) if self.watches else None
            with watch or nullcontext():
                for _ in range(self.steps):
                    step_begin_s = time.perf_counter()
                    optimizer.zero_grad()
                    loss().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    times.append(time.perf_counter() - step_begin_s)
                if self.device != "cpu":
                    torch.cuda.synchronize()
            seconds = time.perf_counter() - begin_s
        self.work_s.append(time.process_time() - begin_work_s)
        self.step_s.append(statistics.median(times[FIRST:] or times))
        self.collections.append(_full_collections() - before)
        if watch is not None:
            budget = watch.session.budget
            self.examined.append(budget.spent_s / budget.trained_s)
            self.held.append(watch.held_bytes / 2**20)
        return seconds


def _full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def main() -> None:
    """Prints seven JSON lines for each program."""
    options = arguments(
        __doc__,
        rounds=(5, 2),
        mlp_steps=(2000, 50),
        gpt_steps=(200, 8),
        half_a_minute_steps=(600, 8),
        reinforce_steps=(300, 10),
        actor_critic_steps=(600, 10),
        generation_steps=(300, 10),
        only=("all", "all"),
        device=("cpu", "cpu"),
    )
    about("watch_overhead")
    torch.set_num_threads(options.threads)
    for name, make in MAKE.items():
        if options.only != "all" and name not in options.only.split(","):
            continue
        steps = getattr(options, f"{name}_steps")
        plain, ours = (Runs(make, steps, options.device, watches) for watches in (False, True))
        seen = interleaved({"plain": partial(plain), "watched": partial(ours)}, options.rounds)
        uncounted = len(ours.step_s) - options.rounds
        show = partial(figure, "watch_overhead")
        show(f"{name}_total", ratios(seen["watched"], seen["plain"]), unit="ratio", against="no watch")
        show(f"{name}_work", ratios(ours.work_s, plain.work_s)[uncounted:], unit="ratio", against="no watch")
        show(f"{name}_step", ratios(ours.step_s, plain.step_s)[uncounted:], unit="ratio", against="no watch")
        show(f"{name}_plain_step", [1e3 * s for s in plain.step_s[uncounted:]], unit="ms", against="")
        show(f"{name}_examined", ours.examined[uncounted:], unit="ratio", against="the training time")
        show(f"{name}_memory", ours.held[uncounted:], unit="MiB", against="")
        show(f"{name}_collections", ours.collections[uncounted:], unit="of all objects", against="")


if __name__ == "__main__":
    main()
