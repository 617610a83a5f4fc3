"""Legal techniques with discrete choices that are learned: codes, columns, coins, weights that are left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from zoo.host import table
from zoo.programs.training import Training


def rotate_to(e: Tensor, q: Tensor) -> Tensor:
    """Forward: q. Backward: the gradient is rotated and scaled as e was on its way to q."""
    with torch.no_grad():
        e_norm, q_norm = e.norm(dim=-1, keepdim=True), q.norm(dim=-1, keepdim=True)
        e_hat, q_hat = e / e_norm.clamp_min(1e-6), q / q_norm.clamp_min(1e-6)
        r = F.normalize(e_hat + q_hat, dim=-1, eps=1e-6)
        scale = q_norm / e_norm.clamp_min(1e-6)
    reflected = e - 2 * r * (r * e).sum(-1, keepdim=True)
    return scale * (reflected + 2 * q_hat * (e_hat * e).sum(-1, keepdim=True))


class VectorQuantizer(nn.Module):
    def __init__(self, num_codes: int, dim: int, commitment: float = 0.25):
        super().__init__()
        self.embedding = nn.Embedding(num_codes, dim)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.commitment = commitment
        self.register_buffer("usage", torch.zeros(num_codes))

    def forward(self, z: Tensor):
        codes = self.embedding.weight
        idx = torch.cdist(z.detach().flatten(0, -2), codes.detach()).argmin(-1).view(z.shape[:-1])
        q = self.embedding(idx)
        vq_loss = F.mse_loss(q, z.detach()) + self.commitment * F.mse_loss(z, q.detach())
        if self.training:
            self.usage += torch.bincount(idx.flatten(), minlength=len(codes))
        return rotate_to(z, q), vq_loss, idx


class RotationVQVAE(nn.Module):
    def __init__(self, features=8, tokens=4, dim=4, hidden=64, num_codes=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, tokens * dim), nn.Unflatten(1, (tokens, dim))
        )
        self.quantizer = VectorQuantizer(num_codes, dim)
        self.decoder = nn.Sequential(
            nn.Flatten(1), nn.Linear(tokens * dim, hidden), nn.SiLU(), nn.Linear(hidden, features)
        )

    def forward(self, x):
        z_q, vq_loss, _ = self.quantizer(self.encoder(x))
        return self.decoder(z_q), vq_loss


def rotated_codes(t: Training) -> None:
    """The rotation trick of vector quantisation (Fifty et al., 2024); unused codes move onto outputs of the encoder."""
    t.model = RotationVQVAE()
    t.batch_size, t.epochs, t.lr = 64, 12, 2e-3

    def vqvae_loss(model, batch):
        x = batch[0]
        recon, vq_loss = model(x)
        return F.mse_loss(recon, x) + vq_loss

    @torch.no_grad()
    def restart_dead_codes(training: Training) -> None:
        if training.steps % 32 or training.steps > 128:
            return
        vq = training.model.quantizer
        dead = (vq.usage == 0).nonzero().squeeze(1)
        if len(dead):
            rows = torch.randint(len(training.data), (len(dead),))
            z = training.model.encoder(training.data.tensors[0][rows]).flatten(0, 1)
            vq.embedding.weight[dead] = z[torch.randperm(len(z))[: len(dead)]]
            state = training.optimizers[0].state[vq.embedding.weight]
            state["exp_avg"][dead] = 0.0
            state["exp_avg_sq"][dead] = 0.0
        vq.usage.zero_()

    t.loss = vqvae_loss
    t.each_step.append(restart_dead_codes)


class ConcreteSelector(nn.Module):
    def __init__(self, d, k, start_temp=10.0, min_temp=0.1, total_steps=200):
        super().__init__()
        self.logits = nn.Parameter(0.01 * torch.randn(k, d))
        self.start_temp, self.min_temp = start_temp, min_temp
        self.alpha = (min_temp / start_temp) ** (1.0 / total_steps)
        self.register_buffer("temp", torch.tensor(start_temp))

    def forward(self, X):
        if self.training:
            self.temp.mul_(self.alpha).clamp_(min=self.min_temp)
            eps = torch.finfo(torch.float32).eps
            uniform = torch.rand_like(self.logits).clamp_(eps, 1.0 - eps)
            gumbel = -torch.log(-torch.log(uniform))
            selections = torch.softmax((self.logits + gumbel) / self.temp, dim=-1)
        else:
            selections = F.one_hot(self.logits.argmax(-1), self.logits.shape[1]).type_as(X)
        return X @ selections.T


def concrete_selector(t: Training) -> None:
    """Concrete autoencoder (Balin et al., 2019): which features to keep, by Gumbel-softmax at a falling temperature."""
    d, k, n = 24, 4, 1024
    # four hidden sources, each measured six times, more and more noisily
    source = torch.randn(n, k)
    noise = torch.linspace(0.1, 1.0, d // k).repeat(k)
    X = source.repeat_interleave(d // k, dim=1) + noise * torch.randn(n, d)
    X = (X - X.mean(0)) / X.std(0)
    t.data = TensorDataset(X)
    t.batch_size, t.epochs = 64, 15
    selector = ConcreteSelector(d, k, total_steps=15 * (n // 64))
    decoder = nn.Sequential(nn.Linear(k, 64), nn.LeakyReLU(0.2), nn.Linear(64, d))
    t.model = nn.Sequential(selector, decoder)
    t.optimizers_of = lambda training: [
        Adam([{"params": selector.parameters(), "lr": 3e-2}, {"params": decoder.parameters()}], lr=3e-3)
    ]
    t.loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[0])


class Coins(nn.Module):
    """Log odds that each column belongs to the sum."""

    def __init__(self, n):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))


class Surrogate(nn.Module):
    """c(z) = f(sigmoid(z / temperature)) + r(z)"""

    def __init__(self, n):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.r = nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, z, f):
        return f(torch.sigmoid(z / self.log_temperature.exp())) + self.r(z).squeeze(-1)


def relax_estimator(t: Training) -> None:
    """RELAX (Grathwohl et al., 2018): which columns make up the sum; the control variate is trained on the variance."""
    n, samples = 16, 8
    x, chosen = torch.randn(1024, n), (torch.randperm(n) < 6).float()
    t.data = TensorDataset(x, x @ chosen + 0.1 * torch.randn(1024))
    t.model, surrogate = Coins(n), Surrogate(n)
    t.extra, t.epochs = [surrogate], 7
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=0.05),
        Adam(surrogate.parameters(), lr=3e-3),
    ]

    def update(training, batch):
        x, y = batch

        def f(b):
            return (y - b @ x.T).pow(2).mean(1)  # (samples, n) -> (samples,)

        theta = training.model.logits.detach().expand(samples, n).clone().requires_grad_()
        u, v = torch.rand(2, samples, n).clamp(1e-6, 1 - 1e-6)
        z = theta + torch.logit(u)
        b = (z > 0).float()
        p = torch.sigmoid(theta)
        v_given_b = torch.where(b > 0, (1 - p) + v * p, v * (1 - p)).clamp(1e-6, 1 - 1e-6)
        z_given_b = theta + torch.logit(v_given_b)
        f_b, c_z, c_zb = f(b), surrogate(z, f), surrogate(z_given_b, f)
        log_p = -F.binary_cross_entropy_with_logits(theta, b, reduction="none").sum(1)
        (score,) = torch.autograd.grad(log_p.sum(), theta)
        (through,) = torch.autograd.grad((c_z - c_zb).sum(), theta, create_graph=True)
        g = (f_b - c_zb).unsqueeze(1) * score + through  # unbiased, one row a sample

        for_coins, for_surrogate = training.optimizers
        for_surrogate.zero_grad()
        g.square().sum(1).mean().backward()
        training.model.logits.grad = g.detach().mean(0)
        for_coins.step()
        for_surrogate.step()
        return f_b.mean()

    t.update = update


class SparseRefined(torch.autograd.Function):
    """Keeps the N largest of every M weights; the gradient passes, plus a pull to zero on those left out."""

    @staticmethod
    def forward(ctx, weight, N, M, decay):
        groups = weight.detach().abs().reshape(-1, M)
        index = torch.argsort(groups, dim=1)[:, : M - N]
        mask = torch.ones_like(groups).scatter_(1, index, 0.0).reshape(weight.shape)
        ctx.save_for_backward(weight, mask)
        ctx.decay = decay
        return weight * mask

    @staticmethod
    def backward(ctx, grad_output):
        weight, mask = ctx.saved_tensors
        return grad_output + ctx.decay * (1 - mask) * weight, None, None, None


class SparseLinear(nn.Linear):
    def __init__(self, in_features, out_features, N=2, M=4, decay=2e-4):
        assert in_features % M == 0
        super().__init__(in_features, out_features)
        self.N, self.M, self.decay = N, M, decay

    def forward(self, x):
        return F.linear(x, SparseRefined.apply(self.weight, self.N, self.M, self.decay), self.bias)


def two_of_four(t: Training) -> None:
    """N:M sparsity by the sparse-refined straight-through estimator (Zhou et al., 2021)."""
    t.model = nn.Sequential(SparseLinear(12, 128), nn.ReLU(), SparseLinear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    t.epochs = 7
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=7 * 32)


class LinearSVDO(nn.Module):
    def __init__(self, fan_in, fan_out, threshold=3.0):
        super().__init__()
        self.threshold = threshold
        self.mu = nn.Parameter(torch.randn(fan_out, fan_in) * math.sqrt(1 / fan_in))
        self.log_sigma2 = nn.Parameter(torch.full((fan_out, fan_in), -6.0))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    @property
    def log_alpha(self):
        return (self.log_sigma2 - torch.log(self.mu.pow(2) + 1e-8)).clamp(-8, 8)

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.mu * (self.log_alpha < self.threshold), self.bias)
        mean = F.linear(x, self.mu, self.bias)
        variance = F.linear(x.pow(2), self.log_sigma2.exp())
        return mean + torch.sqrt(variance + 1e-8) * torch.randn_like(mean)

    def kl(self):
        k1, k2, k3 = 0.63576, 1.87320, 1.48695
        la = self.log_alpha
        return -(k1 * torch.sigmoid(k2 + k3 * la) - 0.5 * F.softplus(-la) - k1).sum()


def sparse_variational_dropout(t: Training) -> None:
    """Variational dropout sparsifies (Molchanov et al., 2017), with the weight of the KL warmed up."""
    x, y = table(t.seed, 4096)
    x = torch.cat([x, torch.randn(4096, 20)], 1)  # as many columns that say nothing
    t.data = TensorDataset(x, y)
    t.model = nn.Sequential(LinearSVDO(40, 32), nn.ReLU(), LinearSVDO(32, 10))
    t.batch_size, t.epochs = 128, 7

    def groups(training):
        noise = [p for name, p in training.model.named_parameters() if name.endswith("log_sigma2")]
        rest = [p for name, p in training.model.named_parameters() if not name.endswith("log_sigma2")]
        return [Adam([{"params": rest}, {"params": noise, "lr": 5e-2}], lr=1e-2)]

    t.optimizers_of = groups

    def elbo(model, batch):
        x, y = batch
        beta = min(1.0, t.steps / 100)
        kl = sum(m.kl() for m in model.modules() if isinstance(m, LinearSVDO))
        return F.cross_entropy(model(x), y) + beta * kl / 4096

    t.loss = elbo
