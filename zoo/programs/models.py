"""Legal techniques within the model: estimators, reparametrisations, parts that stand still, parts that are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from zoo.programs.training import Batch, Training

Layer = nn.Linear | nn.Conv2d


def _layers(model: nn.Module) -> list[Layer]:
    """Those that compute with a weight of their own, the last one left out."""
    return [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)][:-1]


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, make(child))


def _bodies(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Square linear layers, by the module that holds them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.in_features == child.out_features:
                yield parent, name, child


class RoundThrough(torch.autograd.Function):
    """Rounds to a grid; the gradient passes as if nothing had happened."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, scale: float) -> Tensor:
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Reversed(torch.autograd.Function):
    """The identity; its gradient has the other sign."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class SignThrough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hard = torch.where(x > 0, 1.0, -1.0)
        soft = x.clamp(-1, 1)
        return soft + (hard - soft).detach()


class Quantised(nn.Module):
    """A parametrisation: weights of 4 bits, trained through the rounding."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().amax() / 7 + 1e-8
        return torch.fake_quantize_per_tensor_affine(weight, float(scale), 0, -8, 7)


class Experts(nn.Module):
    """Four experts, of which the gate takes one for each row; a loss that keeps them busy lies in ``balance``."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, 4)
        self.experts = nn.ModuleList([nn.Linear(features, features) for _ in range(4)])
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        weight, chosen = shares.max(-1)
        out = torch.stack([expert(x) for expert in self.experts], -1)
        busy = F.one_hot(chosen, 4).float().flatten(0, -2).mean(0)
        self.balance = 4 * (busy * shares.flatten(0, -2).mean(0)).sum()
        picked = out.gather(-1, chosen[..., None, None].expand(*out.shape[:-1], 1)).squeeze(-1)
        return picked * weight.unsqueeze(-1)


class SometimesSkipped(nn.Module):
    """Stochastic depth: a residual branch that is left out in one of four steps."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < 0.25:
            return x
        return x + self.body(x)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def sign_through(t: Training) -> None:
    _replace(t.model, nn.ReLU, lambda _: SignThrough())


def round_through(t: Training) -> None:
    _hook_first(t, lambda h: RoundThrough.apply(h, 8.0))


def fake_quantised(t: Training) -> None:
    for layer in _layers(t.model):
        parametrize.register_parametrization(layer, "weight", Quantised())


def gradient_reversal(t: Training) -> None:
    """A second head must not be able to tell the sign of an input from the hidden layer."""
    kept: list[Tensor] = []
    first = _layers(t.model)[0]
    width = first.weight.shape[0]
    judge = nn.Linear(width, 2)
    t.extra.append(judge)
    first.register_forward_hook(lambda module, args, out: kept.append(out))
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        kept.clear()
        main = plain(model, batch)
        hidden = kept.pop()
        hidden = hidden.mean((2, 3)) if hidden.dim() == 4 else hidden
        side = (batch[0].flatten(1)[:, 0] > 0).long()
        return main + 0.5 * F.cross_entropy(judge(Reversed.apply(hidden)), side)

    t.loss = loss


def spectral(t: Training) -> None:
    for layer in _layers(t.model):
        spectral_norm(layer)


def weight_normed(t: Training) -> None:
    for layer in _layers(t.model):
        weight_norm(layer)


def orthogonal_weights(t: Training) -> None:
    for _, _, layer in _bodies(t.model):
        orthogonal(layer)


def experts(t: Training) -> None:
    made = []
    for parent, name, child in list(_bodies(t.model)):
        made.append(Experts(child.in_features))
        setattr(parent, name, made[-1])
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + 0.01 * sum(each.balance for each in made)


def tied(t: Training) -> None:
    """One weight in two places."""
    if t.base == "text":
        t.model.head.weight = t.model.tokens.weight
        nn.init.normal_(t.model.tokens.weight, std=0.05)
        return
    bodies = list(_bodies(t.model))
    if len(bodies) > 1:
        bodies[1][2].weight = bodies[0][2].weight
        return
    for parent, name, child in bodies:
        setattr(parent, name, nn.Sequential(child, nn.ReLU(), child))


def frozen_first(t: Training) -> None:
    _layers(t.model)[0].requires_grad_(False)


def unfrozen_later(t: Training) -> None:
    """The first layer joins after two epochs, with a group of its own."""
    first = _layers(t.model)[0].requires_grad_(False)

    def join(training: Training, epoch: int) -> None:
        if epoch == 2:
            first.requires_grad_(True)
            training.optimizers[0].add_param_group({"params": list(first.parameters()), "lr": training.lr / 3})

    t.each_epoch.append(join)


def frozen_statistics(t: Training) -> None:
    """Batch norm that keeps the statistics that it has: first fitted, then in evaluation mode."""
    norms = [each for each in t.model.modules() if isinstance(each, nn.BatchNorm2d)]

    def hold(training: Training, epoch: int) -> None:
        for norm in norms if epoch > 0 else []:
            norm.eval()

    t.each_epoch.append(hold)


def dropout_half(t: Training) -> None:
    _replace(t.model, nn.ReLU, lambda _: nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))


def stochastic_depth(t: Training) -> None:
    for parent, name, child in list(_bodies(t.model)):
        setattr(parent, name, SometimesSkipped(child))


def checkpointed(t: Training) -> None:
    for parent, name, child in list(_bodies(t.model)):
        setattr(parent, name, Checkpointed(nn.Sequential(child, nn.Tanh())))


def zero_residual(t: Training) -> None:
    """Residual branches that begin at zero."""
    for parent, name, child in list(_bodies(t.model)):
        last = nn.Linear(child.out_features, child.out_features)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        setattr(parent, name, Residual(nn.Sequential(child, nn.ReLU(), last)))


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def scaled_gradient(t: Training) -> None:
    """The first layer learns at a tenth, by a hook on its output."""
    _hook_first(t, lambda h: 0.1 * h + 0.9 * h.detach())


def hidden_noise(t: Training) -> None:
    _hook_first(t, lambda h: h + 0.1 * torch.randn_like(h) if t.model.training else h)


def _hook_first(t: Training, change: Callable[[Tensor], Tensor]) -> None:
    _layers(t.model)[0].register_forward_hook(lambda module, args, out: change(out))


def layer_normed(t: Training) -> None:
    for parent, name, child in list(_bodies(t.model)):
        setattr(parent, name, nn.Sequential(child, nn.LayerNorm(child.out_features)))


def double_precision(t: Training) -> None:
    t.model.double()
    t.transform = lambda batch: (
        batch[0].double() if batch[0].is_floating_point() else batch[0],
        batch[1].double() if batch[1].is_floating_point() else batch[1],
    )


class Pondering(nn.Module):
    """A cell that goes round; after each round it answers, and says how likely it stops there."""

    def __init__(self, features: int, classes: int, rounds: int = 6) -> None:
        super().__init__()
        self.cell, self.rounds = nn.GRUCell(features, 48), rounds
        self.answer, self.stop = nn.Linear(48, classes), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rounds, n, classes), and the odds (rounds, n) of having stopped at each round, which add up to 1."""
        h, left, answers, shares = x.new_zeros(len(x), 48), x.new_ones(len(x)), [], []
        for number in range(self.rounds):
            h = self.cell(x, h)
            ends = self.stop(h).squeeze(1).sigmoid() if number < self.rounds - 1 else torch.ones_like(left)
            answers.append(self.answer(h))
            shares.append(left * ends)
            left = left * (1 - ends)
        return torch.stack(answers), torch.stack(shares)


def pondering(t: Training) -> None:
    """PonderNet (Banino et al., 2021): the loss in the mean over when it stops, which is kept near a geometric."""
    t.model, t.epochs = Pondering(20, 10), 6
    prior = 0.4 * 0.6 ** torch.arange(6.0)
    prior = (prior / prior.sum()).unsqueeze(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        answers, shares = model(batch[0])
        each = F.cross_entropy(answers.flatten(0, 1), batch[1].repeat(len(answers)), reduction="none")
        surprise = (shares * ((shares + 1e-8) / prior).log()).sum(0)
        return ((shares * each.view_as(shares)).sum(0) + 0.01 * surprise).mean()

    t.loss = loss


class Generated(nn.Module):
    """Three convolutions whose kernels one small network makes, of a vector for each."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.channels, self.about = channels, nn.Parameter(torch.randn(3, 4))
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, channels * channels * 9))
        nn.init.normal_(self.maker[2].weight, std=0.75 / (9 * channels) ** 0.5)
        nn.init.zeros_(self.maker[2].bias)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.maker(self.about).view(3, self.channels, self.channels, 3, 3)
        for kernel, norm in zip(kernels, self.norms):
            x = x + norm(F.conv2d(x, kernel, padding=1)).relu()
        return x


def generated_weights(t: Training) -> None:
    """A hypernetwork (Ha et al., 2017): the weights of layers are what another network returns."""
    t.model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Generated(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
