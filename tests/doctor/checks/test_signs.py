"""Simple signs in small loops: faulty programs are found, and their healthy twins are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loops import alarms

pytestmark = pytest.mark.slow
Watch = Callable[..., Any]


def mlp(width: int, outputs: int, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def policy(watch: Watch, faulty: bool, *, epochs: int = 4) -> None:
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with watch(model, optimizer):
        for _ in range(24 // epochs):
            states, actions, gains = torch.randn(64, 4), torch.randint(0, 3, (64, 1)), torch.randn(64)
            with torch.no_grad():
                stored = model(states).log_softmax(-1).gather(1, actions)[:, 0]
            for _ in range(epochs):
                new = model(states).log_softmax(-1).gather(1, actions)[:, 0]
                if faulty:
                    with torch.no_grad():
                        stored = model(states).log_softmax(-1).gather(1, actions)[:, 0]
                ratio = torch.exp(new - stored)
                update(optimizer, -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean())


def policy_on_few_prompts(watch: Watch, faulty: bool) -> None:
    """The same states are read in each step, each time with new actions and one update, as in GRPO."""
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    states = torch.randn(32, 4)
    with watch(model, optimizer):
        for _ in range(24):
            scores = model(states).log_softmax(-1)
            actions, gains = torch.multinomial(scores.detach().exp(), 1), torch.randn(32)
            new = scores.gather(1, actions)[:, 0]
            update(optimizer, -((new - new.detach()).exp() * gains).mean())


def policy_with_second_pass(watch: Watch, faulty: bool) -> None:
    """GRPO on few prompts: new actions in each step, and their old log-probabilities come from a second pass."""
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    states = torch.randn(8, 4).repeat_interleave(4, 0)
    with watch(model, optimizer):
        for _ in range(24):
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=model(states)).sample()[:, None]
                old = model(states).log_softmax(-1).gather(1, actions)[:, 0]
            new = model(states).log_softmax(-1).gather(1, actions)[:, 0]
            gains = torch.randn(32)
            update(optimizer, -((new - old).exp() * gains).mean())


def policy_of_one_update(watch: Watch, faulty: bool) -> None:
    policy(watch, True, epochs=1)


class Autoencoder(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
        super().__init__()
        self.encoder, self.decoder, self.noise = nn.Linear(64, 8), mlp(4, 64), noise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        deviation = (0.5 * log_variance).exp()
        return self.decoder(mean + self.noise(deviation) * deviation), mean, log_variance


def variational(watch: Watch, averaged: bool, noise: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
    model = Autoencoder(noise)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    basis = torch.randn(4, 64)
    with watch(model, optimizer):
        for _ in range(100):
            x = torch.randn(64, 4) @ basis
            output, mean, log_variance = model(x)
            error = F.mse_loss(output, x) if averaged else F.mse_loss(output, x, reduction="sum") / len(x)
            divergence = (-0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)).mean()
            update(optimizer, error / 10 + divergence if averaged else error + divergence)


def sampled_uniformly(watch: Watch, faulty: bool) -> None:
    variational(watch, False, torch.rand_like if faulty else torch.randn_like)


def diffusion(watch: Watch, faulty: bool, *, by_hand: bool = False, width: int = 64) -> None:
    model = mlp(width, width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(24):
            x, share = torch.randn(96, width), torch.rand(96, 1)
            noise = torch.rand_like(x) if faulty else torch.randn_like(x)
            output = model(share.sqrt() * x + (1 - share).sqrt() * noise)
            update(optimizer, ((output - noise) ** 2).mean() if by_hand else F.mse_loss(output, noise))


def diffusion_by_hand(watch: Watch, faulty: bool) -> None:
    diffusion(watch, faulty, by_hand=True)


def diffusion_of_points(watch: Watch, faulty: bool) -> None:
    diffusion(watch, faulty, width=2)


def uniform_data(watch: Watch, faulty: bool) -> None:
    """The data themselves are uniform, and noise is added to them."""
    model = mlp(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(24):
            x = torch.rand(32, 64)
            update(optimizer, F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x))


def in_bfloat16(watch: Watch, faulty: bool) -> None:
    """The findings of the first steps still hold when only some of the steps are observed."""
    dtype = torch.bfloat16 if faulty else torch.float32
    model = mlp(8, 2).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    with watch(model, optimizer):
        for _ in range(100):
            x = torch.randn(16, 8)
            update(optimizer, F.cross_entropy(model(x.to(dtype)).float(), (x[:, 0] > 0).long()))


def accumulated(watch: Watch, faulty: bool) -> None:
    """Micro-batches that no loader has yielded."""
    model = mlp(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer):
        for micro in range(48):
            x = torch.randn(16, 8)
            if faulty or micro % 4 == 0:
                optimizer.zero_grad()
            (F.cross_entropy(model(x), (x[:, 0] > 0).long()) / 4).backward()
            if micro % 4 == 3:
                optimizer.step()


class TokenModel(nn.Module):
    """A language model that computes its loss, with the configuration of a library."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(eos_token_id=end)
        self.table, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.out(self.table(ids).tanh())
        return F.cross_entropy(scores[:, :-1].reshape(-1, 30), labels[:, 1:].reshape(-1)), scores


def padded_with_the_end(watch: Watch, faulty: bool) -> None:
    end, padding = 1, 1 if faulty else 0
    model = TokenModel(end)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(16):
            ids = torch.full((16, 20), padding)
            for row, length in enumerate(torch.randint(6, 17, (16,)).tolist()):
                ids[row, :length], ids[row, length] = torch.randint(2, 30, (length,)), end
            update(optimizer, model(ids, ids.masked_fill(ids == padding, -100))[0])


class Tokenizer:
    def __init__(self, padding: int) -> None:
        self.pad_token_id, self.eos_token_id = padding, 1


def padded_by_a_tokenizer(watch: Watch, faulty: bool) -> None:
    """Only the tokenizer of the collate function says which token ends a text."""
    tokenizer = Tokenizer(1 if faulty else 0)
    table, head = nn.Embedding(30, 16), nn.Linear(16, 30)
    model = nn.Sequential(table, head)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(16):
            ids = torch.full((16, 20), tokenizer.pad_token_id)
            for row, length in enumerate(torch.randint(6, 17, (16,)).tolist()):
                ids[row, :length], ids[row, length] = torch.randint(2, 30, (length,)), tokenizer.eos_token_id
            labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
            update(optimizer, F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def attached(watch: Watch, faulty: bool) -> None:
    online = mlp(4, 2)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3)
    with watch(online, optimizer):
        for _ in range(24):
            state, action, reward = torch.randn(32, 4), torch.randint(0, 2, (32, 1)), torch.rand(32)
            wanted = reward + 0.9 * online(state + 1).max(1).values
            update(
                optimizer, F.mse_loss(online(state).gather(1, action).squeeze(1), wanted if faulty else wanted.detach())
            )


def terminal(watch: Watch, faulty: bool, *, by_hand: bool = False) -> None:
    online, fixed = mlp(4, 2), mlp(4, 2).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3)
    with watch(online, optimizer):
        for _ in range(24):
            state, action, reward = torch.randn(32, 4), torch.randint(0, 2, (32, 1)), torch.rand(32)
            done = (torch.rand(32) < 0.2).float()
            following = fixed(state + 1).max(1).values
            wanted = reward + 0.9 * following * (1 if faulty else 1 - done)
            value = online(state).gather(1, action).squeeze(1)
            update(optimizer, (value - wanted).square().mean() if by_hand else F.smooth_l1_loss(value, wanted))


def terminal_by_hand(watch: Watch, faulty: bool) -> None:
    terminal(watch, faulty, by_hand=True)


def continuing(watch: Watch, faulty: bool) -> None:
    """Rewards are 0 or 1, and episodes do not end."""
    online = mlp(4, 2)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3)
    with watch(online, optimizer):
        for _ in range(24):
            state, action, reward = torch.randn(32, 4), torch.randint(0, 2, (32, 1)), (torch.rand(32) < 0.3).float()
            following = online(state + 1).max(1).values.detach()
            wanted = reward + 0.9 * following
            update(optimizer, F.mse_loss(online(state).gather(1, action).squeeze(1), wanted))


class Pooled(nn.Module):
    """Pools a sequence with attention weights over ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.score, self.out, self.dim = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 2), dim

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        return self.out((self.score(hidden).softmax(self.dim) * hidden).sum(1))


def attention(watch: Watch, faulty: bool, *, length: int | None = None) -> None:
    model = Pooled(-1 if faulty else 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for step in range(24):
            x = torch.randn(16, length or 1 + step % 5, 8)
            for half in x.chunk(2):
                loss = F.cross_entropy(model(half), (half[:, 0, 0] > 0).long())
            update(optimizer, loss + F.cross_entropy(model(x), (x[:, 0, 0] > 0).long()))


def speech(watch: Watch, faulty: bool) -> None:
    """Labels begin at 0 and the blank is the last class, or they begin at 1. Rows are padded with the blank."""
    model = mlp(8, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = nn.CTCLoss()
    with watch(model, optimizer):
        for _ in range(12):
            lengths = torch.randint(2, 5, (8,))
            labels = torch.randint(0 if faulty else 1, 5, (8, 4)).masked_fill(torch.arange(4) >= lengths[:, None], 0)
            labels[0, 0] = 0 if faulty else 1
            scores = model(torch.randn(12, 8, 8)).log_softmax(2)
            update(optimizer, loss(scores, labels, torch.full((8,), 12), lengths))


def short_speech(watch: Watch, faulty: bool) -> None:
    """Labels are joined without padding. Three of eight utterances have too few frames for their repeated labels."""
    model = mlp(8, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(12):
            frames, lengths = torch.tensor([4, 4, 4, 12, 12, 12, 12, 12]), torch.full((8,), 3)
            labels = torch.randint(1, 6, (8, 1)) if faulty else torch.tensor([[1, 2, 3]])
            scores = model(torch.randn(12, 8, 8)).log_softmax(2)
            loss = F.ctc_loss(scores, labels.expand(8, 3).flatten(), frames, lengths, zero_infinity=True)
            update(optimizer, loss)


def tagger(watch: Watch, faulty: bool) -> None:
    model = mlp(8, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(12):
            scores = model(torch.randn(16, 12, 8))
            by_class = scores.view(16, 5, 12) if faulty else scores.transpose(1, 2)
            update(optimizer, F.cross_entropy(by_class, torch.randint(0, 5, (16, 12))))


class LowRank(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, outputs: int = 5) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, base.in_features)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapters_without_gradient(watch: Watch, faulty: bool) -> None:
    """The adapters are behind a part that runs without gradients; only the head learns."""
    base, head = nn.Sequential(LowRank(nn.Linear(8, 8), 8), nn.Tanh(), LowRank(nn.Linear(8, 8), 8)), nn.Linear(8, 5)
    model = nn.ModuleList([base, head])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with watch(model, optimizer):
        for _ in range(24):
            x = torch.randn(32, 8)
            with torch.set_grad_enabled(not faulty):
                hidden = base(x)
            update(optimizer, F.cross_entropy(head(hidden), x[:, :5].argmax(1)))


REPLAYED = ("gradient.accumulation_discarded", "loss.eos_ignored")


FAULTS = {
    "gradient.accumulation_discarded": (accumulated,),
    "loss.eos_ignored": (padded_with_the_end, padded_by_a_tokenizer),
    "precision.lost_updates": (in_bfloat16,),
    "loss.bootstrapped_target_attached": (attached,),
    "loss.ends_ignored": (terminal, terminal_by_hand),
    "loss.ratio_always_one": (policy,),
    "loss.posterior_collapse": (variational,),
    "model.uniform_noise": (sampled_uniformly, diffusion, diffusion_by_hand, diffusion_of_points),
    "loss.ctc_blank_is_label": (speech,),
    "loss.ctc_infeasible": (short_speech,),
    "model.view_reorders_axes": (tagger,),
    "optim.weights_never_move": (adapters_without_gradient, attention),
}
HEALTHY = {
    "loss.ends_ignored": (continuing,),
    "loss.ratio_always_one": (policy_of_one_update, policy_on_few_prompts, policy_with_second_pass),
    "model.uniform_noise": (uniform_data,),
}


def found(program: Callable[[Watch, bool], None], faulty: bool, *, replays: bool = False) -> list[str]:
    torch.manual_seed(0)
    watches: list[tw.Watch] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> tw.Watch:
        examine = "all" if replays else "listen"
        watches.append(tw.watch(model, optimizer, out=None, quiet=True, examine=examine))
        return watches[-1]

    program(watch, faulty)
    assert watches[0].session.failures == []
    return alarms(watches[0])


@pytest.mark.parametrize(
    ("code", "program"),
    [pytest.param(code, each, id=f"{code}-{each.__name__}") for code, all_ in FAULTS.items() for each in all_],
)
def test_the_fault_is_found_and_its_twin_is_not(code: str, program: Callable[[Watch, bool], None]) -> None:
    replays = code in REPLAYED
    assert code in found(program, True, replays=replays)
    assert code not in found(program, False, replays=replays)


@pytest.mark.parametrize(
    ("code", "program"),
    [pytest.param(code, each, id=f"{code}-{each.__name__}") for code, all_ in HEALTHY.items() for each in all_],
)
def test_a_similar_program_is_healthy(code: str, program: Callable[[Watch, bool], None]) -> None:
    assert code not in found(program, False)
