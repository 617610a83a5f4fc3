"""Legal rules of updates: traces of spikes, damped steps, solved programs, an agent that stays open, bits, signs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from zoo.programs.agents import Board
from zoo.programs.training import Batch, Training


class Firing(nn.Module):
    """Recurrent neurons that leak and fire; a leaky output reads their spikes. ``forward`` keeps what each step was."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.into, self.among = nn.Linear(inputs, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, classes, bias=False)
        self.leak, self.slow = 0.8, 0.9
        nn.init.normal_(self.into.weight, std=1.0)

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Potentials, spikes and logits at each time."""
        v = fired = x.new_zeros(len(x), self.among.in_features)
        read, steps = x.new_zeros(len(x), self.out.out_features), []
        for now in x.unbind(1):
            v = self.leak * v + self.into(now) + self.among(fired) - fired
            fired = (v > 1).float()
            read = self.slow * read + self.out(fired)
            steps.append((v, fired, read))
        return steps


def eligible_spikes(t: Training) -> None:
    """e-prop (Bellec et al., 2020): synapses of spiking neurons keep traces, and learn from errors as they come."""
    t.model, t.epochs, t.lr = Firing(1, 64, 4), 12, 5e-3

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), model = training.optimizers, training.model
        x, y = batch
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        steps, loss = model(x), torch.zeros(())
        came, heard = torch.zeros_like(x[:, 0]), torch.zeros(len(x), 64)
        for_input, for_others, for_output = torch.zeros(len(x), 64, 1), torch.zeros(len(x), 64, 64), 0.0
        for time, (v, fired, read) in enumerate(steps):
            came, near = model.leak * came + x[:, time], 0.3 * (1 - (v - 1).abs()).clamp(min=0)
            for_input = model.slow * for_input + near.unsqueeze(2) * came.unsqueeze(1)
            for_others = model.slow * for_others + near.unsqueeze(2) * heard.unsqueeze(1)
            for_output = model.slow * for_output + fired
            heard = model.leak * heard + fired
            error = (read.softmax(1) - F.one_hot(y, 4)) / (len(x) * len(steps))
            signal = error @ model.out.weight
            model.into.weight.grad += torch.einsum("nj,nji->ji", signal, for_input)
            model.among.weight.grad += torch.einsum("nj,nji->ji", signal, for_others)
            model.out.weight.grad += error.T @ for_output
            loss += F.cross_entropy(read, y) / len(steps)
        optimizer.step()
        return loss

    t.update = update


def damped_gauss_newton(t: Training) -> None:
    """Levenberg-Marquardt (Marquardt, 1963; Hagan and Menhaj, 1994): tried steps, and damping that follows them."""
    t.model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=1.0)]

    def steps(training: Training) -> Iterator[Tensor]:
        damping = 1.0
        model, (optimizer,), (x, y) = training.model, training.optimizers, training.data.tensors
        shapes = {name: p.shape for name, p in model.named_parameters()}

        def errors(flat: Tensor) -> Tensor:
            parts = flat.split([shape.numel() for shape in shapes.values()])
            weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
            return (functional_call(model, weights, x) - y).squeeze(1)

        for _ in range(10 * training.epochs):
            before = parameters_to_vector(model.parameters()).detach()
            slopes, wrong = jacrev(errors)(before), errors(before)
            curvature = slopes.T @ slopes
            step = torch.linalg.solve(curvature + damping * torch.eye(len(before)), slopes.T @ wrong)
            for p, part in zip(model.parameters(), step.split([p.numel() for p in model.parameters()])):
                p.grad = part.view_as(p)
            optimizer.step()
            with torch.no_grad():
                better = F.mse_loss(model(x), y) < wrong.square().mean()
            damping = max(damping / 5, 1e-6) if better else damping * 3
            if not better:
                vector_to_parameters(before, model.parameters())
            yield wrong.square().mean()

    t.loop, t.loaded = steps, False


def interior_point(p: Tensor, g: Tensor, h: Tensor, rounds: int = 25) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the z (n, d) with the least z'z / 2 + p'z where Gz <= h; multipliers and slacks (n, m)."""
    z, slack = torch.zeros_like(p), h.expand(len(p), -1).clone().clamp(min=1.0)
    dual = torch.ones_like(slack)
    for _ in range(rounds):
        off, short = z + p + dual @ g, z @ g.T + slack - h
        gap = dual * slack - (0.1 * (dual * slack).mean(1, keepdim=True)).clamp(min=1e-9)
        matrix = torch.eye(len(g.T), dtype=p.dtype) + torch.einsum("mi,nm,mj->nij", g, dual / slack, g)
        dz = torch.linalg.solve(matrix, -off - ((dual * short - gap) / slack) @ g)
        d_slack = -short - dz @ g.T
        d_dual = -(gap + dual * d_slack) / slack
        worst = torch.maximum((-d_slack / slack).amax(1), (-d_dual / dual).amax(1))
        size = (0.99 / worst.clamp(min=0.99)).unsqueeze(1)
        z, slack, dual = z + size * dz, slack + size * d_slack, dual + size * d_dual
    return z, dual, slack


class Program(torch.autograd.Function):
    """A quadratic program; the backward pass solves the system of its optimality conditions."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, p: Tensor, g: Tensor, h: Tensor) -> Tensor:
        z, dual, slack = interior_point(p.double(), g.double(), h.double())
        ctx.save_for_backward(z, dual, slack, g)
        return z.float()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, dual, slack, g = ctx.saved_tensors
        g, size = g.double(), z.shape[1]
        system = z.new_zeros(len(z), size + len(g), size + len(g))
        system[:, :size, :size] = torch.eye(size)
        system[:, :size, size:] = g.T * dual.unsqueeze(1)
        system[:, size:, :size] = g
        system[:, size:, size:] = torch.diag_embed(-slack)
        right = torch.cat([-gradient.double(), torch.zeros_like(dual)], 1)
        dz, d_dual = torch.linalg.solve(system, right).split([size, len(g)], 1)
        of_g = torch.einsum("nm,ni->mi", dual * d_dual, z) + torch.einsum("nm,ni->mi", dual, dz)
        return dz.float(), of_g.float(), -(dual * d_dual).sum(0).float()


class Projected(nn.Module):
    """The nearest point within walls that are learned."""

    def __init__(self, size: int, walls: int) -> None:
        super().__init__()
        self.normals = nn.Parameter(torch.randn(walls, size) / size**0.5)
        self.distances = nn.Parameter(torch.ones(walls))

    def forward(self, x: Tensor) -> Tensor:
        return Program.apply(-x, self.normals, F.softplus(self.distances))


def quadratic_program(t: Training) -> None:
    """OptNet (Amos and Kolter, 2017): a layer that solves a quadratic program, whose constraints are learned."""
    x, normals = 1.5 * torch.randn(1024, 3), F.normalize(torch.randn(5, 3), dim=1)
    t.data = TensorDataset(x, interior_point(-x.double(), normals.double(), torch.full((5,), 0.5).double())[0].float())
    t.model, t.epochs, t.lr = Projected(3, 8), 8, 1e-2


def entropy_regularised_agent(t: Training) -> None:
    """Discrete soft actor-critic (Christodoulou, 2019): two critics, an actor, and a temperature that learns."""
    t.model, critics = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4)), nn.ModuleList()
    for _ in range(2):
        critics.append(nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4)))
    slow, log_alpha, board = copy.deepcopy(critics).requires_grad_(False), nn.Parameter(torch.tensor(-3.0)), Board(16)
    t.extra += [critics, nn.ParameterList([log_alpha])]
    t.epochs, aim = 6, 0.3
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=3e-3), Adam(critics.parameters(), lr=3e-3), Adam([log_alpha], lr=1e-2)
    ]  # fmt: skip

    def learn(training: Training, batch: list[Tensor]) -> None:
        actor, critic, heat = training.optimizers
        seen, taken, paid, done, after = batch
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            shares = training.model(after).softmax(1)
            worth = torch.minimum(slow[0](after), slow[1](after)) - alpha * (shares + 1e-8).log()
            target = paid + 0.95 * (1 - done) * (shares * worth).sum(1)
        critic.zero_grad()
        sum(F.mse_loss(each(seen).gather(1, taken.unsqueeze(1)).squeeze(1), target) for each in critics).backward()
        critic.step()
        shares = training.model(seen).softmax(1)
        entropy = -(shares * (shares + 1e-8).log()).sum(1)
        with torch.no_grad():
            worth = torch.minimum(critics[0](seen), critics[1](seen))
        actor.zero_grad()
        (-(shares * worth).sum(1) - alpha * entropy).mean().backward()
        actor.step()
        heat.zero_grad()
        (log_alpha.exp() * (entropy.detach().mean() - aim)).backward()
        heat.step()
        with torch.no_grad():
            for far, near in zip(slow.parameters(), critics.parameters()):
                far.lerp_(near, 0.05)

    def play(training: Training) -> Iterator[Tensor]:
        memory: list[tuple[Tensor, ...]] = []
        for _ in range(150 * training.epochs):
            seen = board.seen()
            with torch.no_grad():
                taken = Categorical(logits=training.model(seen)).sample()
            paid, done = board.step(taken)
            memory = [*memory, (seen, taken, paid, done, board.seen())][-400:]
            chosen = [memory[number] for number in torch.randint(len(memory), (8,)).tolist()]
            learn(training, [torch.cat(each) for each in zip(*chosen)])
            yield -paid.mean()

    t.loop, t.loaded = play, False


def polyak_step(t: Training) -> None:
    """Stochastic Polyak step size (Loizou et al., 2021): the rate is the loss over the squared norm of its gradient."""
    t.epochs, ceiling = 8, 0.1
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=1.0)]

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal ceiling
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        squared = sum(p.grad.square().sum() for p in training.parameters())
        (group,) = optimizer.param_groups
        group["lr"] = min(float(loss.detach() / (0.5 * squared + 1e-8)), ceiling)
        ceiling = 2 ** (1 / 20) * group["lr"]  # it may double in an epoch
        optimizer.step()
        return loss.detach()

    t.update = update


class BitAutoencoder(nn.Module):
    """Pictures of 64 black or white points as 16 drawn bits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))

    def unlikely(self, bits: Tensor, x: Tensor) -> Tensor:
        """What the picture costs (n,) when these are the bits."""
        return F.binary_cross_entropy_with_logits(self.decoder(bits), x, reduction="none").sum(1)


def mirrored_bits(t: Training) -> None:
    """ARM (Yin and Zhou, 2019): the gradient of drawn bits is the difference of two losses, at u and at 1 - u."""
    t.model, t.epochs = BitAutoencoder(), 20

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), model = training.optimizers, training.model
        x = (batch[0].flatten(1) > 0).float()
        logits = model.encoder(x)
        odds, u = logits.sigmoid(), torch.rand_like(logits)
        bits, mirrored = (u < odds).float(), (1 - u < odds).float()
        with torch.no_grad():
            slope = (model.unlikely(mirrored, x) - model.unlikely(bits, x)).unsqueeze(1) * (u - 0.5)
        cost = model.unlikely(bits, x).mean()
        surprise = (F.logsigmoid(logits) * odds + F.logsigmoid(-logits) * (1 - odds)).sum(1)
        optimizer.zero_grad()
        (cost + surprise.mean() + (slope * logits).sum(1).mean()).backward()
        optimizer.step()
        return (cost + surprise.mean() + 16 * 0.6931).detach()

    t.update = update


class ResilientSteps(Optimizer):
    """Each weight has a step of its own: by signs it grows or shrinks, and a step too far is taken back."""

    def __init__(self, params: list[nn.Parameter], first: float = 0.01) -> None:
        super().__init__(params, {"first": first})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["slope"], state["move"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["size"] = torch.full_like(p, group["first"])
                turn = (state["slope"] * p.grad).sign()
                factor = torch.where(turn > 0, 1.2, torch.where(turn < 0, 0.5, 1.0))
                state["size"].mul_(factor).clamp_(1e-6, 1.0)
                state["move"] = torch.where(turn < 0, -state["move"], -p.grad.sign() * state["size"])
                state["slope"] = torch.where(turn < 0, 0.0, p.grad)
                p.add_(state["move"])
        return loss


def resilient(t: Training) -> None:
    """Rprop (Riedmiller and Braun, 1993): the sizes of gradients do not count; all rows are in each batch."""
    t.batches_of = lambda training: [training.data.tensors] * 24
    t.optimizers_of = lambda training: [ResilientSteps(training.parameters(), 1e-3)]
    t.loaded, t.epochs = False, 6
