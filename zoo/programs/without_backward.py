"""Legal training without a gradient that goes back through the whole model: two points, targets, goodness, bundles."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from zoo.host import mlp
from zoo.programs.training import Batch, Training


def two_point(t: Training) -> None:
    """MeZO (Malladi et al., 2023): tuning by two forward passes; the direction is drawn anew from its seed."""
    first = Adam(t.model.parameters(), lr=1e-2)
    x, y = t.data.tensors
    for _ in range(8):  # what is to be tuned has learned a little
        first.zero_grad()
        F.cross_entropy(t.model(x[:256]), y[:256]).backward()
        first.step()
    t.model.zero_grad()
    t.epochs, t.batch_size = 200, 128
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=4e-3)]

    def directions(training: Training, seed: int) -> list[tuple[nn.Parameter, Tensor]]:
        draws = torch.Generator().manual_seed(seed)
        return [(p, torch.randn(p.shape, generator=draws)) for p in training.parameters()]

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        seed, losses = int(torch.randint(2**31, ())), []
        for step in (1e-3, -2e-3):
            for p, along in directions(training, seed):
                p.add_(step * along)
            losses.append(training.loss(training.model, batch))
        for p, along in directions(training, seed):
            p.add_(1e-3 * along)
            p.grad = (losses[0] - losses[1]) / 2e-3 * along
        training.optimizers[0].step()
        return (losses[0] + losses[1]) / 2

    t.update = update


class TargetNet(nn.Module):
    """Layers, and for all but the first a layer that goes back."""

    def __init__(self, sizes: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)])
        self.inverses = nn.ModuleList([nn.Sequential(nn.Linear(b, a), nn.Tanh()) for a, b in pairwise(sizes[1:])])
        self.head = nn.Linear(sizes[-1], classes)

    def states(self, x: Tensor) -> list[Tensor]:
        """Of each layer; no gradient passes from one to the next."""
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1].detach()))
        return found[1:]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(x)[-1])


def difference_target(t: Training) -> None:
    """Difference target propagation (Lee et al., 2015): every layer has an aim, made by what goes back."""
    t.model, t.epochs = TargetNet((20, 64, 64, 64), 10), 12
    t.optimizers_of = lambda training: [
        Adam([*training.model.layers.parameters(), *training.model.head.parameters()], lr=3e-3),
        Adam(training.model.inverses.parameters(), lr=3e-3),
    ]

    def update(training: Training, batch: Batch) -> Tensor:
        forward, back = training.optimizers
        model: TargetNet = training.model
        states = model.states(batch[0])
        fixed = [each.detach() for each in states]

        back.zero_grad()
        for layer, inverse, h in zip(model.layers[1:], model.inverses, fixed):
            noisy = h + 0.1 * torch.randn_like(h)
            F.mse_loss(inverse(layer(noisy).detach()), noisy).backward()
        back.step()

        last = fixed[-1].clone().requires_grad_()
        loss = F.cross_entropy(model.head(last), batch[1])
        forward.zero_grad()
        loss.backward()
        aim = fixed[-1] - 0.5 * len(last) * last.grad
        for number in reversed(range(len(states))):
            ((states[number] - aim).square().sum() / len(last)).backward()
            if number > 0:
                with torch.no_grad():
                    inverse = model.inverses[number - 1]
                    aim = fixed[number - 1] + inverse(aim) - inverse(fixed[number])
        forward.step()
        return loss.detach()

    t.update = update


class Goodness(nn.Module):
    """Layers that see a row together with a label; each is to be active where the label is right."""

    def __init__(self, features: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.ModuleList([nn.Linear(features + classes, width), nn.Linear(width, width)])

    def goods(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Of each layer: (n,) each; no gradient passes from one layer to the next."""
        h, found = torch.cat([x, 3.0 * F.one_hot(y, self.classes)], 1), []
        for layer in self.layers:
            h = F.relu(layer(F.normalize(h.detach(), dim=1) * h.shape[1] ** 0.5))
            found.append(h.square().mean(1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """How good each label would be, (n, classes)."""
        labels = range(self.classes)
        return torch.stack([sum(self.goods(x, torch.full((len(x),), label))) for label in labels], 1)


def forward_forward(t: Training) -> None:
    """The forward-forward algorithm (Hinton, 2022): rows with right labels against rows with wrong ones."""
    t.model, t.epochs = Goodness(20, 10), 12

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        wrong = (y + torch.randint(1, 10, y.shape)) % 10
        pairs = zip(model.goods(x, y), model.goods(x, wrong))
        return torch.stack([(F.softplus(1 - right) + F.softplus(false - 1)).mean() for right, false in pairs]).sum()

    t.loss = loss


def forward_gradient(t: Training) -> None:
    """Forward gradients (Baydin et al., 2022): derivatives along drawn directions, and nothing goes back."""
    t.model, t.epochs, t.batch_size, draws = mlp(width=32), 20, 64, 64
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        h, y = batch
        along = {p: torch.randn(draws, *p.shape) for p in training.parameters()}
        tangent = torch.zeros(draws, *h.shape)
        for layer in training.model:
            if isinstance(layer, nn.Linear):
                moved = torch.einsum("ni,koi->kno", h, along[layer.weight]) + along[layer.bias].unsqueeze(1)
                tangent = tangent @ layer.weight.T + moved
            else:
                tangent = tangent * (h > 0)
            h = layer(h)
        slopes = ((h.softmax(1) - F.one_hot(y, 10)) * tangent).sum(2).mean(1)
        for p in training.parameters():
            p.grad = torch.einsum("k,k...->...", slopes, along[p]) / draws
        training.optimizers[0].step()
        return F.cross_entropy(h, y)

    t.update = update


class Predicting(nn.Module):
    """Layers, each of which foretells the activity of the next one."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(into, out) for into, out in pairwise(sizes)])

    def foretell(self, states: list[Tensor]) -> list[Tensor]:
        """What each state makes of the next one."""
        bodies = [states[0], *(each.tanh() for each in states[1:])]
        return [layer(h) for layer, h in zip(self.layers, bodies)]

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(x))
            x = states[-1].tanh()
        return states

    def energy(self, states: list[Tensor]) -> Tensor:
        """Errors of foretelling; those of the output count less, so that states stay near where they began."""
        *errors, last = ((state - mu).square().sum() / 2 for state, mu in zip(states[1:], self.foretell(states)))
        return sum(errors) + last / 10


def predictive_coding(t: Training) -> None:
    """Predictive coding (Whittington and Bogacz, 2017): states settle between input and target, then weights learn."""
    t.model, t.epochs = Predicting((20, 64, 64, 10)), 8

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        x, target = batch[0], F.one_hot(batch[1], 10).float()
        with torch.no_grad():
            _, *hidden, out = training.model(x)
        for _ in range(16):
            hidden = [each.detach().requires_grad_() for each in hidden]
            slopes = torch.autograd.grad(training.model.energy([x, *hidden, target]), hidden)
            hidden = [each - 0.2 * slope for each, slope in zip(hidden, slopes)]
        optimizer.zero_grad()
        energy = training.model.energy([x, *(each.detach() for each in hidden), target]) / len(x)
        energy.backward()
        optimizer.step()
        return F.mse_loss(out, target)

    t.update = update
