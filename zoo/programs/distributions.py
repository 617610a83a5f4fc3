"""Legal techniques with distributions: generated, normalised by noise, bounded, adapted to another domain."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Training


def softmin(eps, C, h):
    """-eps * log mean_j exp((h_j - C_ij) / eps), for uniform weights."""
    return -eps * (torch.logsumexp((h[None, :] - C) / eps, dim=1) - math.log(C.shape[1]))


def half_sq(x, y):
    return 0.5 * (x[:, None, :] - y[None, :, :]).pow(2).sum(-1)


def sinkhorn_divergence(x, y, eps=0.05, scaling=0.7):
    """Debiased Sinkhorn divergence. Potentials without graph, then one differentiable extrapolation step each."""
    with torch.no_grad():
        Cxy, Cxx, Cyy = half_sq(x, y), half_sq(x, x), half_sq(y, y)
        Cyx = Cxy.T.contiguous()
        e = float(Cxy.max())
        f_xy, g_yx = softmin(e, Cxy, torch.zeros(len(y))), softmin(e, Cyx, torch.zeros(len(x)))
        f_xx, g_yy = softmin(e, Cxx, torch.zeros(len(x))), softmin(e, Cyy, torch.zeros(len(y)))
        annealed = [e * scaling**k for k in range(1 + int(math.log(eps / e, scaling)))]
        for e in [*annealed, *[eps] * 5]:
            a, b = softmin(e, Cxy, g_yx), softmin(e, Cyx, f_xy)
            f_xy, g_yx = 0.5 * (f_xy + a), 0.5 * (g_yx + b)
            f_xx = 0.5 * (f_xx + softmin(e, Cxx, f_xx))
            g_yy = 0.5 * (g_yy + softmin(e, Cyy, g_yy))
    f_x = softmin(eps, half_sq(x, y.detach()), g_yx) - softmin(eps, half_sq(x, x.detach()), f_xx)
    g_y = softmin(eps, half_sq(y, x.detach()), f_xy) - softmin(eps, half_sq(y, y.detach()), g_yy)
    return f_x.mean() + g_y.mean()


def sinkhorn_generator(t: Training) -> None:
    """A generator without a critic: Sinkhorn divergences (Genevay et al., 2018; Feydy et al., 2019)."""
    angle = 2 * math.pi * torch.rand(2048)
    radius = 1 + 0.08 * torch.randn(2048)
    ring = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    t.data = TensorDataset(ring)
    t.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    t.batch_size, t.epochs, t.lr = 96, 8, 5e-3

    def loss(model, batch):
        (real,) = batch
        fake = model(torch.randn(len(real), 2))
        return sinkhorn_divergence(fake, real)

    t.loss = loss


class Unnormalised(nn.Module):
    """log p(x) = f(x) + c; c is a parameter like any other."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1, bias=False))
        self.c = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.f(x).squeeze(-1) + self.c


def noise_contrastive(t: Training) -> None:
    """NCE (Gutmann and Hyvarinen, 2010): a density and its normaliser from telling data and noise apart."""
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    x = corners[torch.randint(4, (2048,))] + 0.25 * torch.randn(2048, 2)
    x = (x - x.mean(0)) / x.std(0)
    t.data, t.model = TensorDataset(x), Unnormalised()
    t.batch_size, t.epochs, t.lr = 128, 12, 1.5e-2
    t.scheduler_of = lambda opt: CosineAnnealingLR(opt, T_max=12 * 16)
    noise, k = MultivariateNormal(x.mean(0), 1.5 * torch.cov(x.T)), 4

    def nce(model, batch):
        real = batch[0]
        fake = noise.sample((k * len(real),))
        logit_real = model(real) - noise.log_prob(real) - math.log(k)
        logit_fake = model(fake) - noise.log_prob(fake) - math.log(k)
        return -F.logsigmoid(logit_real).mean() - k * F.logsigmoid(-logit_fake).mean()

    t.loss = nce


class BarsVAE(nn.Module):
    def __init__(self, pixels=64, hidden=96, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(pixels, hidden), nn.GELU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def draw_bars(n, size=8, p=0.15):
    rows = torch.rand(n, size, 1) < p
    columns = torch.rand(n, 1, size) < p
    picture = (rows | columns).expand(n, size, size)
    return (picture ^ (torch.rand(n, size, size) < 0.01)).float().flatten(1)


def switched_average(t: Training) -> None:
    """A VAE with KL warm-up, whose weights are switched to their moving average each epoch (Li et al., 2024)."""
    t.model = BarsVAE()
    t.data = TensorDataset(draw_bars(1024))
    t.batch_size, t.epochs, t.lr = 64, 14, 3e-3
    momentum, warmup_steps = 0.9, 80
    ema = copy.deepcopy(t.model).requires_grad_(False)
    t.history = []

    def negative_elbo(model, batch):
        x = batch[0]
        logits, mu, logvar = model(x)
        nll = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        beta = min(1.0, t.steps / warmup_steps)
        t.history.append((nll.item(), kl.item()))
        return nll + beta * kl

    @torch.no_grad()
    def ema_update(training):
        for slow, fast in zip(ema.parameters(), training.model.parameters()):
            slow.lerp_(fast, 1 - momentum)

    def switch(training, epoch):
        if epoch > 0:
            training.model.load_state_dict(ema.state_dict())

    t.loss = negative_elbo
    t.each_step.append(ema_update)
    t.each_epoch.append(switch)


def one_class_radius(t: Training) -> None:
    """Deep SVDD (Ruff et al., 2018) with a soft boundary: an autoencoder first, then a ball around the codes."""
    nu, warm_up = 0.1, 2
    at = 2 * torch.rand(1024, 2) - 1
    more = torch.stack([at.prod(1), (3 * at.sum(1)).cos()], 1)
    bent = torch.cat([at, at.square(), (3 * at).sin(), more], 1)
    x = bent + 0.05 * torch.randn(1024, 8)
    low, high = x.amin(0), x.amax(0)
    t.data = TensorDataset((x - low) / (high - low), torch.zeros(1024))
    encoder = nn.Sequential(
        nn.Linear(8, 32, bias=False), nn.LeakyReLU(0.1), nn.Linear(32, 16, bias=False), nn.LeakyReLU(0.1)
    )
    encoder.append(nn.Linear(16, 4, bias=False))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.1), nn.Linear(32, 8))
    t.model, t.batch_size = encoder, 64
    t.extra.append(decoder)
    t.optimizers_of = lambda training: [
        Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3),
        Adam(encoder.parameters(), lr=3e-3, weight_decay=1e-6),
    ]

    @torch.no_grad()
    def centre_of(x: Tensor, eps: float = 0.1) -> Tensor:
        c = encoder(x).mean(0)
        c[(c.abs() < eps) & (c < 0)] = -eps
        c[(c.abs() < eps) & (c >= 0)] = eps
        return c

    def loop(training: Training) -> Iterator[Tensor]:
        whole, ball = training.optimizers
        for _ in range(3):
            for x, _ in training.batches:
                whole.zero_grad()
                loss = F.mse_loss(decoder(encoder(x)), x)
                loss.backward()
                whole.step()
                yield loss.detach()
        c, radius = centre_of(training.data.tensors[0]), torch.zeros(())
        for epoch in range(10):
            for x, _ in training.batches:
                ball.zero_grad()
                dist = (encoder(x) - c).square().sum(1)
                loss = radius**2 + (dist - radius**2).clamp(min=0).mean() / nu
                loss.backward()
                ball.step()
                if epoch >= warm_up:
                    radius = dist.detach().sqrt().quantile(1 - nu)
                yield loss.detach()

    t.loop = loop


def two_moons(n, degrees=0.0, noise=0.1):
    angle = math.pi * torch.rand(n)
    label = torch.randint(2, (n,))
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    xy = torch.where(label[:, None] == 0, upper, lower) + noise * torch.randn(n, 2) - torch.tensor([0.5, 0.25])
    a = math.radians(degrees)
    return xy @ torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]), label


def discrepancy(out1, out2):
    return torch.mean(torch.abs(F.softmax(out1, dim=1) - F.softmax(out2, dim=1)))


def classifier_discrepancy(t: Training) -> None:
    """Maximum classifier discrepancy (Saito et al., 2018), on two moons that are turned by 25 degrees."""
    source, labels = two_moons(1024)
    target, target_labels = two_moons(1024, degrees=25)
    t.data, t.batch_size, t.epochs = TensorDataset(source, labels, target), 64, 14

    warmup = 48  # steps on the source alone, until the classifiers know it

    G = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())

    class Classifiers(nn.Module):
        def __init__(self):
            super().__init__()
            self.F1, self.F2 = (nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))

        def forward(self, feat):
            return self.F1(feat), self.F2(feat)

    C = Classifiers()
    t.model = G
    t.extra.append(C)
    t.optimizers_of = lambda training: [
        Adam(G.parameters(), lr=2e-3, weight_decay=5e-4),
        Adam(C.parameters(), lr=5e-3, weight_decay=5e-4),
    ]

    def source_loss(img, lab):
        o1, o2 = C(G(img))
        return F.cross_entropy(o1, lab) + F.cross_entropy(o2, lab)

    def update(training, batch):
        opt_g, opt_c = training.optimizers
        img_s, lab_s, img_t = batch

        def reset_grad():
            opt_g.zero_grad()
            opt_c.zero_grad()

        # step A: both classifiers and the generator learn the source
        reset_grad()
        loss_s = source_loss(img_s, lab_s)
        loss_s.backward()
        opt_g.step()
        opt_c.step()
        if training.steps < warmup:
            return loss_s.detach()
        # step B: the classifiers disagree on the target as much as they can
        reset_grad()
        loss_b = source_loss(img_s, lab_s) - discrepancy(*C(G(img_t)))
        loss_b.backward()
        opt_c.step()
        # step C: the generator makes them agree
        for _ in range(3):
            reset_grad()
            discrepancy(*C(G(img_t))).backward()
            opt_g.step()
        return loss_s.detach()

    @torch.no_grad()
    def evaluate(training, epoch):
        o1, o2 = C(G(target))
        t.history.append(((o1 + o2).argmax(1) == target_labels).float().mean().item())

    t.history = []
    t.update = update
    t.each_epoch.append(evaluate)
