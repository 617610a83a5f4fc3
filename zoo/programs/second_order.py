"""Legal techniques with derivatives of derivatives, differentiated solvers, natural gradients."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


class HeatNet(nn.Module):
    """u(x, t) and the logarithm of the diffusivity."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_nu = nn.Parameter(torch.tensor(math.log(0.4)))

    def forward(self, xt):
        return self.net(xt)

    def residual(self, xt):
        xt = xt.clone().requires_grad_(True)
        u = self.net(xt)
        du = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
        u_x, u_t = du[:, 0], du[:, 1]
        u_xx = torch.autograd.grad(u_x.sum(), xt, create_graph=True)[0][:, 0]
        return u_t - self.log_nu.exp() * u_xx


def unknown_diffusivity(t: Training) -> None:
    """Inverse PINN (Raissi et al., 2019): u_t = nu u_xx with nu = 0.1 to be found from noisy measurements; L-BFGS."""
    nu = 0.1
    at = torch.rand(400, 2) * torch.tensor([2.0, 2.0]) - torch.tensor([1.0, 0.0])  # x in [-1, 1], t in [0, 2]
    x, time = at[:, :1], at[:, 1:]
    u = torch.exp(-nu * math.pi**2 * time) * torch.sin(math.pi * x)
    u = u + 0.5 * torch.exp(-4 * nu * math.pi**2 * time) * torch.sin(2 * math.pi * x)
    u = u + 0.02 * torch.randn_like(u)
    collocation = torch.rand(300, 2) * torch.tensor([2.0, 2.0]) - torch.tensor([1.0, 0.0])
    t.data, t.model, t.loaded = TensorDataset(at, u), HeatNet(), False
    t.optimizers_of = lambda training: [
        LBFGS(training.model.parameters(), max_iter=4, history_size=30, line_search_fn="strong_wolfe")
    ]

    def fit(training):
        model, (opt,) = training.model, training.optimizers

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(at), u) + 0.1 * model.residual(collocation).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(110):
            yield opt.step(closure).detach()

    t.loop = fit


def _geometric(width: int = 64, depth: int = 3, radius: float = 0.5) -> nn.Sequential:
    """Begins as the signed distance of a circle, about (Atzmon and Lipman, 2020)."""
    sizes, layers = [2] + [width] * depth, []
    for into, out in itertools.pairwise(sizes):
        layer = nn.Linear(into, out)
        nn.init.normal_(layer.weight, 0.0, math.sqrt(2 / out))
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Softplus(beta=100)]
    last = nn.Linear(width, 1)
    nn.init.normal_(last.weight, math.sqrt(math.pi / width), 1e-5)
    nn.init.constant_(last.bias, -radius)
    return nn.Sequential(*layers, last)


def signed_distance(t: Training) -> None:
    """Implicit geometric regularisation (Gropp et al., 2020): zero on the curve, gradients of length one around it."""
    angle = 2 * math.pi * torch.rand(1024)
    r, dr = 0.6 + 0.15 * torch.cos(3 * angle), -0.45 * torch.sin(3 * angle)
    on = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    along = torch.stack([dr * angle.cos() - r * angle.sin(), dr * angle.sin() + r * angle.cos()], 1)
    normals = F.normalize(torch.stack([along[:, 1], -along[:, 0]], 1), dim=1)
    t.data, t.model = TensorDataset(on, normals), _geometric()
    t.batch_size, t.epochs, t.lr = 64, 12, 2e-3

    def gradient(f: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(f, x, torch.ones_like(f), create_graph=True)[0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        surface, normal = batch[0].clone().requires_grad_(), batch[1]
        near = surface.detach() + 0.1 * torch.randn_like(surface)
        free = torch.cat([near, 2.4 * torch.rand(len(near) // 2, 2) - 1.2]).requires_grad_()
        on_surface = model(surface)
        eikonal = (gradient(model(free), free).norm(dim=1) - 1).square().mean()
        turned = (gradient(on_surface, surface) - normal).norm(dim=1).mean()
        return on_surface.abs().mean() + 0.1 * eikonal + turned

    t.loss = loss


class RidgeHead(nn.Module):
    """Features, and the ridge regression on them that a support set asks for; gradients flow through the solver."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, width))
        self.log_ridge = nn.Parameter(torch.zeros(()))

    def forward(self, support_x: Tensor, support_y: Tensor, query_x: Tensor) -> Tensor:
        phi = F.pad(self.features(support_x), (0, 1), value=1.0)  # (tasks, shots, width + 1)
        gram = torch.einsum("tif,tjf->tij", phi, phi)  # Woodbury: a system of the size of the support
        eye = torch.eye(phi.shape[1])
        weights = phi.mT @ torch.linalg.solve(gram + self.log_ridge.exp() * eye, support_y)
        return F.pad(self.features(query_x), (0, 1), value=1.0) @ weights


def ridge_head(t: Training) -> None:
    """R2-D2 (Bertinetto et al., 2019): meta-learning by differentiating a closed-form solver, on few-shot sines."""
    t.model, t.loaded = RidgeHead(), False
    t.optimizers_of = lambda training: [Adam(training.model.parameters(), lr=3e-3)]
    tasks, shots, queries = 16, 8, 12

    def episodes():
        while True:
            x = 2 * torch.rand(tasks, shots + queries, 1) - 1
            amplitude = 0.5 + 1.5 * torch.rand(tasks, 1, 1)
            phase = math.pi * torch.rand(tasks, 1, 1)
            yield x, amplitude * torch.sin(4 * x + phase)

    def meta_train(training):
        (opt,) = training.optimizers
        for _, (x, y) in zip(range(240), episodes()):
            prediction = training.model(x[:, :shots], y[:, :shots], x[:, shots:])
            loss = F.mse_loss(prediction, y[:, shots:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            yield loss.detach()

    t.loop = meta_train


class AdaHessian(Optimizer):
    def __init__(self, params, lr=0.1, betas=(0.9, 0.999), eps=1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def backward(self, loss: Tensor) -> None:
        """Fills p.grad and the magnitude of the Hutchinson estimate of the Hessian's diagonal."""
        params = [p for group in self.param_groups for p in group["params"]]
        grads = torch.autograd.grad(loss, params, create_graph=True)
        zs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
        hzs = torch.autograd.grad(grads, params, grad_outputs=zs)
        for p, g, hz in zip(params, grads, hzs):
            p.grad = g.detach()
            self.state[p]["hessian"] = hz.abs()  # |z * Hz| = |Hz| since z is +-1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if "t" not in s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(s["hessian"], s["hessian"], value=1 - b2)
                m_hat = s["m"] / (1 - b1 ** s["t"])
                v_hat = s["v"] / (1 - b2 ** s["t"])
                p.addcdiv_(m_hat, v_hat.sqrt_().add_(group["eps"]), value=-group["lr"])


def hutchinson_diagonal(t: Training) -> None:
    """AdaHessian (Yao et al., 2021): Adam whose second moment is that of the Hessian's diagonal."""
    t.batch_size, t.epochs = 64, 12
    t.optimizers_of = lambda training: [AdaHessian(training.model.parameters(), lr=0.15, eps=1e-2)]
    t.scheduler_of = lambda opt: LambdaLR(opt, lambda step: min(1.0, (step + 1) / 20))

    def update(training, batch):
        opt = training.optimizers[0]
        loss = F.mse_loss(training.model(batch[0]), batch[1])
        opt.backward(loss)
        opt.step()
        return loss.detach()

    t.update = update


class Unmixing(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.W = nn.Parameter(torch.eye(n))

    def forward(self, x):
        return x @ self.W.T


def natural_gradient_ica(t: Training) -> None:
    """Infomax ICA by the natural gradient, W += lr (I - tanh(y) y') W (Amari et al., 1996); no backward at all."""
    sources = torch.distributions.Laplace(0.0, 1.0).sample((2048, 5))
    x = sources @ torch.randn(5, 5).T
    t.data = TensorDataset((x - x.mean(0)) / x.std(0))
    t.model = Unmixing(5)
    t.batch_size, t.epochs = 64, 7
    t.optimizers_of = lambda training: [SGD(training.model.parameters(), lr=0.3)]
    t.scheduler_of = lambda opt: CosineAnnealingLR(opt, T_max=7 * 32, eta_min=0.01)

    @torch.no_grad()
    def update(training, batch):
        (x,) = batch
        W = training.model.W
        y = training.model(x)
        # -log-likelihood under p(s) = 1 / (pi cosh s)
        log_cosh = y.abs() + F.softplus(-2 * y.abs()) - math.log(2)
        nll = log_cosh.sum(1).mean() + 5 * math.log(math.pi) - torch.linalg.slogdet(W).logabsdet
        W.grad = -(torch.eye(5) - torch.tanh(y).T @ y / len(y)) @ W
        training.optimizers[0].step()
        return nll

    t.update = update
