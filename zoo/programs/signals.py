"""Legal techniques with signals: complex spectra, synthesised sound, state spaces, warped time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Training


class ComplexLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int):
        super().__init__()
        # Trabelsi et al.: Rayleigh modulus, uniform phase; torch's complex normal is exactly that
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in, dtype=torch.cfloat) / math.sqrt(fan_in))

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.weight.T


class ModReLU(nn.Module):
    """Keeps the phase, thresholds the modulus (Arjovsky et al., 2016)."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, z: Tensor) -> Tensor:
        modulus = z.abs()
        return F.relu(modulus + self.bias) * (z / (modulus + 1e-5))


class ComplexNet(nn.Module):
    def __init__(self, width: int = 24, classes: int = 4):
        super().__init__()
        self.body = nn.Sequential(ComplexLinear(9, width), ModReLU(width), ComplexLinear(width, width), ModReLU(width))
        self.readout = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.squeeze(-1), norm="ortho")  # (n, 9)
        return self.readout(self.body(spectrum).abs())


def complex_spectrum(t: Training) -> None:
    """Deep complex network on the spectrum of a series (Trabelsi et al., 2018)."""
    t.model = ComplexNet()
    t.epochs, t.lr = 6, 5e-3


RATE, SAMPLES, FRAMES, HARMONICS = 8000, 1024, 16, 8


def _oscillate(f0: Tensor, amplitudes: Tensor, begin: Tensor | float = 0.0) -> Tensor:
    """Sines at the multiples of f0 (n, FRAMES) with amplitudes (n, HARMONICS, FRAMES): (n, SAMPLES)."""
    up = lambda v: F.interpolate(v, SAMPLES, mode="linear", align_corners=True)  # noqa: E731
    number = torch.arange(1, HARMONICS + 1.0)[:, None]
    phase = 2 * math.pi * torch.cumsum(up(f0[:, None]) / RATE, -1) * number + begin
    return (up(amplitudes) * phase.sin()).sum(1)


def _notes(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pitch in hertz, loudness in decibels (both n, FRAMES) and sound (n, SAMPLES) of an instrument."""
    time = torch.linspace(0, 1, FRAMES)
    f0 = 150 + 300 * torch.rand(n, 1) * (1 + 0.02 * torch.sin(12 * time))
    strength = torch.exp(-3 * torch.rand(n, 1) * time) * (0.2 + 0.8 * torch.rand(n, 1))
    fall = 0.3 + 0.8 * (f0 - 150) / 300 + 0.8 * (1 - strength)  # high or soft notes have fewer overtones
    shares = torch.softmax(-fall[:, None] * torch.arange(HARMONICS)[:, None], 1)
    sound = _oscillate(f0, strength[:, None] * shares, 2 * math.pi * torch.rand(n, HARMONICS, 1))
    sound = sound + 0.01 * torch.randn(n, SAMPLES)
    power = sound.view(n, FRAMES, -1).square().mean(-1)
    return f0, 10 * torch.log10(power + 1e-6), sound


class Instrument(nn.Module):
    """The decoder of DDSP: harmonics and noise from pitch and loudness."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.LeakyReLU())
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.post = nn.Linear(32, 1 + HARMONICS + 1)

    @staticmethod
    def positive(x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(x) ** math.log(10) + 1e-7

    def forward(self, f0: Tensor, loudness: Tensor) -> Tensor:
        control = torch.stack([(torch.log2(f0) - 8.2) / 0.4, (loudness + 20) / 8], -1)
        raw = self.positive(self.post(self.gru(self.pre(control))[0])).transpose(1, 2)
        total, shares, hiss = raw.split([1, HARMONICS, 1], 1)
        shares = shares / shares.sum(1, keepdim=True)
        hiss = F.interpolate(hiss, SAMPLES, mode="linear", align_corners=True)[:, 0]
        return _oscillate(f0, total * shares) + 0.1 * hiss * torch.randn(len(f0), SAMPLES)


def harmonic_synth(t: Training) -> None:
    """DDSP (Engel et al., 2020): a spectral loss at several resolutions, which does not see phases."""
    t.data = TensorDataset(*_notes(320))
    t.model, t.batch_size, t.epochs, t.lr = Instrument(), 16, 6, 5e-3
    windows = {size: torch.hann_window(size) for size in (256, 128, 64)}

    def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
        total = made.new_zeros(())
        for size, window in windows.items():
            a, b = (torch.stft(s, size, size // 4, window=window, return_complex=True).abs() for s in (made, real))
            total = total + F.l1_loss(a, b) + F.l1_loss((a + 1e-5).log(), (b + 1e-5).log())
        return total

    t.loss = lambda model, batch: spectral_loss(model(batch[0], batch[1]), batch[2])


class S4D(nn.Module):
    """A diagonal state space for each channel, as a long convolution (batch, channels, length)."""

    def __init__(self, channels: int, states: int = 16) -> None:
        super().__init__()
        half = states // 2
        self.log_dt = nn.Parameter(torch.rand(channels) * math.log(100) + math.log(1e-3))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(channels, half, dtype=torch.cfloat)))
        self.log_A_real = nn.Parameter(torch.full((channels, half), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(half).float().repeat(channels, 1))
        self.D = nn.Parameter(torch.randn(channels))
        self.mix = nn.Sequential(nn.GELU(), nn.Conv1d(channels, 2 * channels, 1), nn.GLU(dim=1))

    def kernel(self, length: int) -> Tensor:
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        dtA = A * self.log_dt.exp().unsqueeze(-1)
        C = torch.view_as_complex(self.C) * (torch.exp(dtA) - 1) / A
        powers = torch.exp(dtA.unsqueeze(-1) * torch.arange(length))
        return 2 * torch.einsum("hn,hnl->hl", C, powers).real

    def forward(self, u: Tensor) -> Tensor:
        L = u.shape[-1]
        spectrum = torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(self.kernel(L), n=2 * L)
        return self.mix(torch.fft.irfft(spectrum, n=2 * L)[..., :L] + u * self.D.unsqueeze(-1))


class S4Model(nn.Module):
    def __init__(self, classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(1, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList([S4D(width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x).transpose(1, 2)).transpose(1, 2)
        return self.decoder(x.mean(1))


def diagonal_state_space(t: Training) -> None:
    """S4D-Lin (Gu et al., 2022): complex states, which have a rate of their own and do not decay."""
    n, length = 640, 64
    y = torch.randint(4, (n,))
    cycles = torch.tensor([1.5, 2.5, 4.0, 6.0])[y].unsqueeze(1)
    wave = torch.sin(2 * math.pi * (cycles * torch.linspace(0, 1, length) + torch.rand(n, 1)))
    t.data = TensorDataset((wave + 0.7 * torch.randn(n, length)).unsqueeze(-1), y)
    t.model, t.epochs = S4Model(4), 12

    def groups(training: Training) -> list[Optimizer]:
        special = ("log_dt", "log_A_real", "A_imag", ".C")
        named = list(training.model.named_parameters())
        states = [p for name, p in named if name.endswith(special)]
        others = [p for name, p in named if not name.endswith(special)]
        return [AdamW([{"params": others}, {"params": states, "lr": 1e-3, "weight_decay": 0.0}], lr=1e-2)]

    t.optimizers_of = groups
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=t.epochs * (n // t.batch_size))


class MarginRNN(nn.Module):
    def __init__(self, symbols=8, hidden=48, margin=0.02):
        super().__init__()
        self.rnn = nn.RNN(symbols, hidden, nonlinearity="tanh", batch_first=True)
        self.readout = nn.Linear(hidden, symbols)
        self.margin = margin
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)

    def forward(self, x):
        _, last = self.rnn(x)
        return self.readout(last.squeeze(0))

    @torch.no_grad()
    def project(self):
        W = self.rnn.weight_hh_l0
        U, S, Vh = torch.linalg.svd(W)
        W.copy_(U @ torch.diag(S.clamp(1 - self.margin, 1 + self.margin)) @ Vh)


def singular_margin(t: Training) -> None:
    """Singular values of the recurrent matrix are put back into a margin about 1 (Vorontsov et al., 2017)."""
    n, length, symbols = 1280, 30, 8
    cue = torch.randint(symbols, (n,))
    x = 0.1 * torch.randn(n, length, symbols)
    x[:, 0] += F.one_hot(cue, symbols)
    t.data = TensorDataset(x, cue)
    t.model = MarginRNN(symbols)
    t.batch_size, t.epochs = 64, 10
    t.optimizers_of = lambda training: [torch.optim.RMSprop(training.parameters(), lr=3e-3, alpha=0.9)]

    def step_and_project(training, batch):
        inputs, targets = batch
        (optimizer,) = training.optimizers
        loss = F.cross_entropy(training.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        optimizer.step()
        training.model.project()
        return loss.detach()

    t.update = step_and_project


class SoftDTW(torch.autograd.Function):
    """D (batch, n, m) -> (batch,); both recursions by hand, in numpy (Cuturi and Blondel, 2017, algorithms 1 and 2)."""

    @staticmethod
    def forward(ctx, D, gamma):
        d = D.detach().double().numpy()
        B, n, m = d.shape
        R = np.full((B, n + 2, m + 2), np.inf)
        R[:, 0, 0] = 0
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                options = -np.stack([R[:, i - 1, j - 1], R[:, i - 1, j], R[:, i, j - 1]]) / gamma
                top = options.max(0)
                R[:, i, j] = d[:, i - 1, j - 1] - gamma * (np.log(np.exp(options - top).sum(0)) + top)
        ctx.saved, ctx.gamma = (d, R), gamma
        return torch.from_numpy(R[:, n, m].copy()).to(D.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (d, R), gamma = ctx.saved, ctx.gamma
        B, n, m = d.shape
        D = np.zeros((B, n + 2, m + 2))
        D[:, 1 : n + 1, 1 : m + 1] = d
        R = R.copy()
        R[:, :, m + 1] = R[:, n + 1, :] = -np.inf
        R[:, n + 1, m + 1] = R[:, n, m]
        E = np.zeros((B, n + 2, m + 2))
        E[:, n + 1, m + 1] = 1
        for j in range(m, 0, -1):
            for i in range(n, 0, -1):
                a = np.exp((R[:, i + 1, j] - R[:, i, j] - D[:, i + 1, j]) / gamma)
                b = np.exp((R[:, i, j + 1] - R[:, i, j] - D[:, i, j + 1]) / gamma)
                c = np.exp((R[:, i + 1, j + 1] - R[:, i, j] - D[:, i + 1, j + 1]) / gamma)
                E[:, i, j] = E[:, i + 1, j] * a + E[:, i, j + 1] * b + E[:, i + 1, j + 1] * c
        grad = torch.from_numpy(E[:, 1 : n + 1, 1 : m + 1]).to(grad_output.dtype)
        return grad_output[:, None, None] * grad, None


def soft_time_warping(t: Training) -> None:
    """The second half of a series from the first, under soft-DTW."""
    time = torch.arange(24.0)
    frequency, phase = 0.4 + 0.5 * torch.rand(640, 1), 2 * math.pi * torch.rand(640, 1)
    series = torch.sin(frequency * time + phase) + 0.05 * torch.randn(640, 24)
    t.data = TensorDataset(series[:, :12], series[:, 12:])
    t.model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
    t.epochs, t.lr = 9, 3e-3

    def loss(model, batch):
        past, future = batch
        D = (model(past).unsqueeze(2) - future.unsqueeze(1)).square()
        return SoftDTW.apply(D, 0.1).mean() / 12

    t.loss = loss
