"""Legal training in which something begins again: idle units, units of little use, the weakest of a population."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from zoo.host import mlp
from zoo.programs.training import Batch, Training


@torch.no_grad()
def _begin_again(units: Tensor, into: nn.Linear, out: nn.Linear, optimizer: Optimizer) -> None:
    """Units get new weights on the way in and none on the way out; the optimizer forgets them."""
    fresh = nn.Linear(into.in_features, into.out_features)
    into.weight[units], into.bias[units] = fresh.weight[units], 0.0
    out.weight[:, units] = 0.0
    for p, place in ((into.weight, units), (into.bias, units), (out.weight, (slice(None), units))):
        for kept in optimizer.state[p].values():
            if isinstance(kept, Tensor) and kept.shape == p.shape:
                kept[place] = 0.0


class ActiveReLU(nn.ReLU):
    """A ReLU that keeps the mean activity of its units."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.activity = out.detach().mean(0)
        return out


def recycled_units(t: Training) -> None:
    """ReDo (Sokar et al., 2023): dormant units begin again, while classes change their names every third epoch."""
    t.model[1], t.model[3] = ActiveReLU(), ActiveReLU()
    t.epochs, t.lr, names = 12, 1e-2, torch.arange(10)
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]), names[batch[1]])

    def rename(training: Training, epoch: int) -> None:
        if epoch % 3 == 0:
            names.copy_(torch.randperm(10))

    def recycle(training: Training) -> None:
        if training.steps % 20:
            return
        for number in (0, 2):
            into, heard, out = training.model[number], training.model[number + 1], training.model[number + 2]
            dormant = heard.activity <= 0.1 * heard.activity.mean()
            _begin_again(dormant.nonzero().flatten(), into, out, training.optimizers[0])

    t.each_epoch.append(rename)
    t.each_step.append(recycle)


def replaced_units(t: Training) -> None:
    """Continual backpropagation (Dohare et al., 2024): the least useful unit goes now and then."""
    t.model[1], t.model[3] = ActiveReLU(), ActiveReLU()
    t.epochs, t.batch_size, order = 12, 16, torch.arange(20)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]
    t.transform = lambda batch: (batch[0][:, order], batch[1])
    use, age, due = torch.zeros(2, 64), torch.zeros(2, 64), torch.zeros(2)

    def permute(training: Training, epoch: int) -> None:
        if epoch % 4 == 0:
            order.copy_(torch.randperm(20))

    def replace(training: Training) -> None:
        age.add_(1)
        for number in range(2):
            into, heard, out = training.model[2 * number : 2 * number + 3]
            use[number].lerp_(heard.activity * out.weight.detach().abs().sum(0), 0.01)
            mature = age[number] > 100
            due[number] += 2e-3 * mature.sum()
            if due[number] < 1:
                continue
            worst = use[number].masked_fill(~mature, torch.inf).argmin().unsqueeze(0)
            _begin_again(worst, into, out, training.optimizers[0])
            use[number, worst], age[number, worst] = 0.0, 0.0
            due[number] -= 1

    t.each_epoch.append(permute)
    t.each_step.append(replace)


def population(t: Training) -> None:
    """Population based training (Jaderberg et al., 2017): the last takes over from the first and varies its rate."""
    x, y = t.data.tensors
    t.data, held_out = TensorDataset(x[:-128], y[:-128]), (x[-128:], y[-128:])
    members = [t.model, *(mlp() for _ in range(4))]
    t.extra, t.epochs = members[1:], 8
    t.optimizers_of = lambda training: [
        Adam(member.parameters(), lr=10 ** (-3.5 + 1.5 * float(torch.rand(())))) for member in members
    ]

    @torch.no_grad()
    def exploit(training: Training, epoch: int) -> None:
        if epoch == 0:
            return
        right = [float((member(held_out[0]).argmax(1) == held_out[1]).float().mean()) for member in members]
        last, first = right.index(min(right)), right.index(max(right))
        members[last].load_state_dict(members[first].state_dict())
        taking, taken = training.optimizers[last], training.optimizers[first]
        taking.load_state_dict(copy.deepcopy(taken.state_dict()))
        taking.param_groups[0]["lr"] *= 1.2 if float(torch.rand(())) < 0.5 else 0.8

    def update(training: Training, batch: Batch) -> Tensor:
        losses = []
        for member, optimizer in zip(members, training.optimizers):
            optimizer.zero_grad()
            losses.append(training.loss(member, batch))
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach().mean()

    t.each_epoch.append(exploit)
    t.update = update
