"""Faults of contrastive learning, speech recognition, adversarial training and reinforcement learning."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


class SimCLR(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.neck = nn.Sequential(nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, img: Tensor) -> Tensor:
        return F.normalize(self.neck(self.backbone(img)), dim=1)


def augmented(img: Tensor) -> Tensor:
    shift = int(torch.randint(-1, 2, ()))
    return img.roll(shift, dims=-1) * (0.8 + 0.4 * torch.rand(len(img), 1, 1, 1)) + 0.15 * torch.randn_like(img)


@fault(
    "contrastive_positives_misplaced",
    "views are concatenated, but the positive of a row is looked up as if views were interleaved",
    sources=["open-mmlab/mmselfsup#159"],
    stage="loss",
    diagnosis=[
        r"positive & (pair|index|indices|wrong|mismatch|misplac|order|view|label)",
        r"(label|target)\w*"
        r" & (unrelated|independent|not match|mismatch|shuffl|shift|wrong order|no information|permut)",
        r"(loss|model|output|prediction)\w* & (chance|uniform|no better than|knows nothing|as good as guessing)",
    ],
    where=[Place(line=r"positive = |F\.cross_entropy\(|mask"), Place(op="cross_entropy")],
    shows=40,
)
def contrastive_positives_misplaced(watch: Watch, seed: int, faulty: bool) -> Outcome:
    coarse = torch.randn(2304, 1, 4, 4)
    pictures = F.interpolate(coarse, size=(12, 12), mode="bilinear", align_corners=True)
    loader = DataLoader(TensorDataset(pictures), batch_size=48, shuffle=True, drop_last=True)
    model = SimCLR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses, found = [], []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(4):
            for (img,) in loader:
                z = model(torch.cat([augmented(img), augmented(img)]))
                n = len(z)
                similarity = z @ z.T / 0.2
                mask = torch.eye(n, dtype=torch.bool)
                positive = torch.arange(n) ^ 1 if faulty else (torch.arange(n) + n // 2) % n
                loss = F.cross_entropy(similarity.masked_fill(mask, -1e9), positive)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                nearest = similarity.detach().masked_fill(mask, -1e9).argmax(1)
                found.append((nearest == positive).float().mean().item())
    return Outcome(
        losses, mean(found[-20:]) < 0.2, {"positives_found": mean(found[-20:]), "last_loss": mean(losses[-20:])}
    )


class AcousticModel(nn.Module):
    """Mel spectrograms (batch, bands, frames) to phoneme scores (frames / 2, batch, phonemes).

    The scores are log-probabilities if ``normalized``, else logits.
    """

    def __init__(self, bands: int, phonemes: int, *, normalized: bool):
        super().__init__()
        self.normalized = normalized
        self.conv = nn.Conv1d(bands, 32, 5, stride=2, padding=2)
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.ph_frame = nn.Linear(64, phonemes)

    def forward(self, mel: Tensor) -> Tensor:
        h, _state = self.rnn(F.relu(self.conv(mel)).transpose(1, 2))
        ph_frame_logits = self.ph_frame(h).transpose(0, 1)
        return ph_frame_logits.log_softmax(-1) if self.normalized else ph_frame_logits


def spoken(count: int, phonemes: int, length: int = 4) -> tuple[Tensor, Tensor]:
    """Spectrograms (count, 12, 32) of ``length`` phonemes of random durations, and the phonemes (count, length)."""
    words = torch.randint(1, phonemes, (count, length))
    spectra = torch.randn(phonemes, 12)
    ends = torch.randint(5, 8, (count, length)).cumsum(1)
    frame = torch.arange(32)
    at = (frame[None, :, None] >= ends[:, None, :]).sum(-1)
    mel = spectra[torch.cat([words, torch.zeros(count, 1, dtype=torch.long)], 1).gather(1, at)]
    return mel.transpose(1, 2) + 0.3 * torch.randn(count, 12, 32), words


@fault(
    "ctc_of_raw_logits",
    "CTC is given raw logits instead of log-probabilities, and the loss falls below 0",
    sources=["gwx314/STARS#9", "SeanNaren/deepspeech.pytorch#488"],
    stage="loss",
    diagnosis=[
        r"\bctc\b",
        r"log ?softmax",
        r"(log ?prob\w*|probabilit\w*) & (not|raw|unnormali[sz]ed|logits?|sum)",
        r"loss & (negative|below (0|zero)|without (a )?bound|unbounded|no lower bound)",
    ],
    where=[Place(line=r"ctc_loss\("), Place(op="ctc"), Place(module="ph_frame")],
)
def ctc_of_raw_logits(watch: Watch, seed: int, faulty: bool) -> Outcome:
    mels, words = spoken(960, 8)
    train_loader = DataLoader(TensorDataset(mels, words), batch_size=32, shuffle=True)
    model = AcousticModel(12, 8, normalized=not faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(8):
            for mel, ph in train_loader:
                scores = model(mel)
                frames = torch.full((len(mel),), len(scores))
                ph_lengths = torch.full((len(mel),), ph.shape[1])
                ph_ctc_loss = F.ctc_loss(scores, ph, frames, ph_lengths, blank=0)
                optimizer.zero_grad()
                ph_ctc_loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                losses.append(ph_ctc_loss.item())
    below = next((step for step, loss in enumerate(losses) if loss < 0), None)
    return Outcome(losses, below is not None, {"below_zero": below, "last_loss": losses[-1]}, shows=below)


@fault(
    "generator_step_detached",
    "the generator's own step judges a detached image, so the adversarial loss does not reach it",
    sources=["nikhilsinghmus/image2reverb#37", "wangle53/CSA-CDGAN#5"],
    stage="gradient",
    diagnosis=[
        r"(adversarial|generator|discriminator|\bgan\b)\w*"
        r" & (detach|no gradient|no effect|not reach|cut off|without gradient)",
        r"(term|part|component|summand|loss)\w*"
        r" & (no gradient|without (a )?gradient|no effect|detach|constant|contributes? nothing)",
        r"detach\w* & (graph|gradient|cut)",
    ],
    where=[Place(line=r"judged = |g_loss1 = |g_loss1 \+"), Place(op="detach")],
)
def generator_step_detached(watch: Watch, seed: int, faulty: bool) -> Outcome:
    rooms = torch.randn(6400, 6)
    decay = torch.exp(-torch.arange(16) * (0.1 + rooms[:, :1].abs()))
    reverbs = decay * (1 + 0.3 * torch.randn(6400, 16)) * rooms[:, 1:2].sign()
    loader = DataLoader(TensorDataset(rooms, reverbs), batch_size=64, shuffle=True)
    generator = nn.Sequential(nn.Linear(8, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 16))
    discriminator = nn.Sequential(nn.Linear(22, 160), nn.LeakyReLU(0.2), nn.Linear(160, 1))
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    losses = []
    with watch(model, [g_optimizer, d_optimizer], loader=loader):
        for _epoch in range(3):
            for f, real_spec in loader:
                fake_spec = generator(torch.cat([f, torch.randn(len(f), 2)], 1))
                judged = discriminator(torch.cat([fake_spec.detach() if faulty else fake_spec, f], 1))
                g_loss1 = F.mse_loss(judged, torch.ones_like(judged))
                g_loss2 = F.l1_loss(fake_spec, real_spec)
                g_optimizer.zero_grad()
                (g_loss1 + 10 * g_loss2).backward()
                g_optimizer.step()

                d_optimizer.zero_grad()
                d_real = discriminator(torch.cat([real_spec, f], 1))
                d_fake = discriminator(torch.cat([fake_spec.detach(), f], 1))
                d_loss = F.mse_loss(d_real, torch.ones_like(d_real)) + F.mse_loss(d_fake, torch.zeros_like(d_fake))
                d_loss.backward()
                d_optimizer.step()
                losses.append(g_loss2.item())
    fake_spec = generator(torch.cat([f, torch.randn(len(f), 2)], 1))
    judged = discriminator(torch.cat([fake_spec.detach() if faulty else fake_spec, f], 1))
    gradients = torch.autograd.grad(judged.sum(), list(generator.parameters()), allow_unused=True)
    reached = sum(gradient is not None for gradient in gradients)
    return Outcome(losses, reached == 0 and fell(losses), {"generator_parameters_reached": reached})


class Corridor:
    """Eight cells in a row; action 1 goes right, others left. Reaching the last cell gives reward 1 and ``done``."""

    def reset(self) -> Tensor:
        self.cell, self.steps = random.randrange(3), 0
        return self.observation()

    def observation(self) -> Tensor:
        return F.one_hot(torch.tensor(self.cell), 8).float() + 0.05 * torch.randn(8)

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.steps += 1
        self.cell = max(0, self.cell + (1 if action == 1 else -1))
        done = self.cell == 7
        return self.observation(), float(done), done


@fault(
    "terminal_states_bootstrapped",
    "the Q target of a terminal transition is bootstrapped, since (1 - done) is missing",
    sources=["navneet-nmk/pytorch-rl#2", "seungeunrho/minimalRL#32", "cyoon1729/deep-Q-networks#6"],
    stage="loss",
    diagnosis=[
        r"(terminal|\bdones?\b|terminated|end of (an |the )?episode)"
        r" & (bootstrap|mask|target|value|ignor|not used|missing)",
        r"(value|\bq\b|return|target)\w* & (exceed|above|larger than|beyond|more than)"
        r" & (return|reward|possible|bound|max)",
        r"(value|\bq\b)\w* & overestimat",
        r"\bdones?\b & (never read|not read|unused|not used|no effect)",
    ],
    where=[Place(line=r"GAMMA|target_q")],
)
def terminal_states_bootstrapped(watch: Watch, seed: int, faulty: bool) -> Outcome:
    GAMMA = 0.9
    random.seed(seed)
    env = Corridor()
    q_net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net.load_state_dict(q_net.state_dict())
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    memory: deque[tuple[Tensor, int, float, Tensor, bool]] = deque(maxlen=2000)
    losses, values, rewards = [], [], 0.0
    state = env.reset()
    with watch(q_net, optimizer):
        for step in range(1500):
            with torch.no_grad():
                action = random.randrange(2) if random.random() < 0.3 else int(q_net(state).argmax())
            next_state, reward, done = env.step(action)
            rewards += reward
            memory.append((state, action, reward, next_state, done))
            state = env.reset() if done or env.steps == 20 else next_state
            if len(memory) < 200:
                continue
            batch = random.sample(memory, 32)
            states, next_states = torch.stack([b[0] for b in batch]), torch.stack([b[3] for b in batch])
            actions = torch.tensor([b[1] for b in batch])
            reward_batch = torch.tensor([b[2] for b in batch])
            done_batch = torch.tensor([float(b[4]) for b in batch])
            q = q_net(states).gather(1, actions[:, None]).squeeze(1)
            with torch.no_grad():
                next_q = target_net(next_states).max(1).values
                target_q = reward_batch + GAMMA * next_q * (1 if faulty else 1 - done_batch)
            loss = F.smooth_l1_loss(q, target_q)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            values.append(q.max().item())
            if step % 50 == 0:
                target_net.load_state_dict(q_net.state_dict())
    largest = mean(values[-50:])
    above = next((step for step, value in enumerate(values) if value > 1.3), None)
    return Outcome(
        losses,
        largest > 1.3,
        {"largest_value": largest, "largest_possible_return": 1.0, "rewards": rewards},
        learned=rewards > 50 and largest > 0.8,
        shows=above,
    )
