"""Legal loops in stages: models that are pruned, rewound, widened, merged or sent away, optimizers written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from zoo.programs.models import _layers
from zoo.programs.places import bodies
from zoo.programs.training import Batch, Training


class Adapted(nn.Module):
    """A layer that stands still, and a product of two thin matrices that learns."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)

    @torch.no_grad()
    def merge(self) -> None:
        """The product goes into the layer, and begins again at zero."""
        self.layer.weight += self.up @ self.down
        self.up.zero_()
        nn.init.kaiming_uniform_(self.down, a=5**0.5)


def merged_adapters(t: Training) -> None:
    """ReLoRA (Lialin et al., 2023): adapters are merged every two epochs; moments and rate begin again."""
    made: list[Adapted] = []
    for parent, name, layer in list(bodies(t.model)):
        made.append(Adapted(layer))
        setattr(parent, name, made[-1])
    t.epochs = 8
    cycle = 2 * (len(t.data) // t.batch_size)
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: min((step % cycle + 1) / 8, 1.0))

    def again(training: Training, epoch: int) -> None:
        if epoch == 0 or epoch % 2:
            return
        state = training.optimizers[0].state
        for each in made:
            each.merge()
            for p in (each.up, each.down):
                state[p]["exp_avg"].zero_()
                state[p]["exp_avg_sq"].zero_()

    t.each_epoch.append(again)


def lottery_ticket(t: Training) -> None:
    """Iterative magnitude pruning with a rewind to the first weights (Frankle and Carbin, 2019)."""
    layers, first = _layers(t.model), copy.deepcopy(t.model.state_dict())
    masks = [torch.ones_like(layer.weight) for layer in layers]
    t.epochs = 12

    @torch.no_grad()
    def mask(training: Training) -> None:
        for layer, there in zip(layers, masks):
            layer.weight.mul_(there)

    @torch.no_grad()
    def prune(training: Training, epoch: int) -> None:
        if epoch not in (3, 6, 9):
            return
        for layer, there in zip(layers, masks):
            sizes = layer.weight.abs()[there > 0]
            there.mul_(layer.weight.abs() > sizes.quantile(0.3))
        training.model.load_state_dict(first)
        training.optimizers[0].state.clear()
        mask(training)

    t.each_epoch.append(prune)
    t.each_step.append(mask)


def _wider(one: nn.Linear, two: nn.Linear, width: int) -> tuple[nn.Linear, nn.Linear]:
    """The same function with more units between two layers: some are there twice and count half."""
    source = torch.cat([torch.arange(one.out_features), torch.randint(one.out_features, (width - one.out_features,))])
    into, out = nn.Linear(one.in_features, width), nn.Linear(width, two.out_features)
    with torch.no_grad():
        into.weight.copy_(one.weight[source])
        into.bias.copy_(one.bias[source])
        out.weight.copy_(two.weight[:, source] / torch.bincount(source)[source])
        out.weight += 0.01 * out.weight.std() * torch.randn_like(out.weight)
        out.bias.copy_(two.bias)
    return into, out


def widened(t: Training) -> None:
    """Net2WiderNet (Chen et al., 2016): half-way there are twice as many units, and the model is the same function."""
    t.model[0], t.model[2] = nn.Linear(20, 16), nn.Linear(16, 64)
    t.epochs = 8

    def widen(training: Training, epoch: int) -> None:
        if epoch != 4:
            return
        (optimizer,) = training.optimizers
        before = [*training.model[0].parameters(), *training.model[2].parameters()]
        training.model[0], training.model[2] = _wider(training.model[0], training.model[2], 32)
        new = [*training.model[0].parameters(), *training.model[2].parameters()]
        gone = {id(p) for p in before}
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if id(p) not in gone]
        for p in before:
            del optimizer.state[p]
        optimizer.add_param_group({"params": new, "lr": training.lr / 2})

    t.each_epoch.append(widen)


def federated(t: Training) -> None:
    """Adaptive federated optimization (Reddi et al., 2021): the server steps along the mean change of its clients."""
    x, y = t.data.tensors
    order = (y + 3 * torch.rand(len(y))).argsort()  # each client sees some of the classes
    clients = [(x[rows], y[rows]) for rows in order.chunk(10)]
    t.epochs = 40
    t.optimizers_of = lambda training: [Adam(training.model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3)]

    def visit(model: nn.Module, data: Batch) -> tuple[nn.Module, Tensor]:
        local = copy.deepcopy(model)
        optimizer, losses = SGD(local.parameters(), lr=0.05), []
        for rows in torch.randperm(len(data[0])).split(20):
            optimizer.zero_grad()
            loss = t.loss(local, (data[0][rows], data[1][rows]))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return local, torch.stack(losses).mean()

    def rounds(training: Training) -> Iterator[Tensor]:
        (server,) = training.optimizers
        for _ in range(training.epochs):
            chosen = torch.randperm(len(clients))[:5].tolist()
            visits = [visit(training.model, clients[number]) for number in chosen]
            for name, p in training.model.named_parameters():
                mean = torch.stack([local.get_parameter(name).detach() for local, _ in visits]).mean(0)
                p.grad = p.detach() - mean
            server.step()
            yield torch.stack([loss for _, loss in visits]).mean()

    t.loop, t.loaded = rounds, False


def master_weights(t: Training) -> None:
    """Mixed precision by hand (Micikevicius et al., 2018): half the bits in the model, whole masters, a loss scale."""
    masters = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in t.model.parameters()])
    t.model.half()
    t.extra.append(masters)
    t.optimizers_of = lambda training: [Adam(masters.parameters(), lr=training.lr)]
    scale, good = 2.0**20, 0

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal scale, good
        training.model.zero_grad()
        loss = F.cross_entropy(training.model(batch[0].half()).float(), batch[1])
        (scale * loss).backward()
        for master, p in zip(masters, training.model.parameters()):
            master.grad = p.grad.float() / scale
        if not all(bool(master.grad.isfinite().all()) for master in masters):
            scale, good = scale / 2, 0
            return loss.detach()
        training.optimizers[0].step()
        with torch.no_grad():
            for master, p in zip(masters, training.model.parameters()):
                p.copy_(master)
        good += 1
        if good % 50 == 0:
            scale *= 2
        return loss.detach()

    t.update = update


class ScheduleFree(Optimizer):
    """SGD whose weights are between those that step and their mean. ``eval`` puts the mean in place."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = closure() if closure else None
        for group in self.param_groups:
            group["steps"] += 1
            share, beta, lr = 1 / group["steps"], group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(lr * p.grad)
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - group["beta"])


def schedule_free(t: Training) -> None:
    """Schedule-free learning (Defazio et al., 2024): an optimizer of one's own; the mean is looked at in between."""
    x, y = t.data.tensors
    t.data.tensors, held_out = (x[:-64], y[:-64]), (x[-64:], y[-64:])
    t.epochs = 8
    t.optimizers_of = lambda training: [ScheduleFree(training.parameters(), lr=0.5)]
    seen: list[float] = []

    def look(training: Training, epoch: int) -> None:
        if epoch == 0:
            return
        optimizer = training.optimizers[0]
        training.model.eval()
        optimizer.eval()
        with torch.no_grad():
            seen.append(float(training.loss(training.model, held_out)))
        optimizer.train()
        training.model.train()

    t.each_epoch.append(look)


def soup(t: Training) -> None:
    """A greedy model soup (Wortsman et al., 2022): the mean of those of several tunings that help it."""
    x, y = t.data.tensors
    t.data, held_out = TensorDataset(x[:-128], y[:-128]), (x[-128:], y[-128:])
    t.optimizers_of = lambda training: [AdamW(training.parameters(), lr=t.lr)]

    def train(training: Training) -> Iterator[Tensor]:
        for _ in range(training.epochs):
            for batch in training.batches:
                yield training.plain_update(batch)

    @torch.no_grad()
    def accuracy(model: nn.Module, weights: dict[str, Tensor]) -> float:
        return float((functional_call(model, weights, (held_out[0],)).argmax(1) == held_out[1]).float().mean())

    def cook(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        yield from train(training)
        first, tuned = copy.deepcopy(model.state_dict()), []
        for lr, decay in ((1e-3, 0.0), (3e-3, 0.0), (1e-3, 0.1), (3e-3, 0.1)):
            model.load_state_dict(first)
            optimizer.state.clear()
            optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
            yield from train(training)
            tuned.append(copy.deepcopy(model.state_dict()))
        tuned.sort(key=lambda weights: accuracy(model, weights), reverse=True)
        kept = tuned[:1]
        mean = kept[0]
        for weights in tuned[1:]:
            tried = {name: torch.stack([each[name] for each in (*kept, weights)]).mean(0) for name in weights}
            if accuracy(model, tried) >= accuracy(model, mean):
                kept, mean = [*kept, weights], tried
        model.load_state_dict(mean)

    t.loop = cook


class Lion(Optimizer):
    """The sign of a mean of gradient and momentum; weights decay apart from it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (short, long) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(state["momentum"].lerp(p.grad, 1 - short).sign(), alpha=-lr)
                state["momentum"].lerp_(p.grad, 1 - long)
        return loss


def sign_momentum(t: Training) -> None:
    """Lion (Chen et al., 2023): an optimizer of one's own, whose steps have one size for all weights."""
    t.optimizers_of = lambda training: [Lion(training.parameters(), lr=2e-3, weight_decay=0.1)]
    t.epochs = 12
