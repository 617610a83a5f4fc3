"""Updates, layers and agents for the end: nobody may look at them while laws are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zoo.programs.agents import Board
from zoo.programs.training import Batch, Training


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


class ClippedToBits(torch.autograd.Function):
    """Activations between 0 and alpha in 4 bits; where they are cut off, alpha gets the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        step = alpha / 15
        return torch.minimum(x.clamp(min=0), alpha).div(step).round() * step

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        above = x >= alpha
        return gradient * ((x > 0) & ~above), (gradient * above).sum()


class Pact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return ClippedToBits.apply(x, self.alpha)


def learned_clipping(t: Training) -> None:
    """PACT (Choi et al., 2018): activations of few bits, whose upper end is learned and pulled down."""
    t.model[2], t.model[5] = Pact(), Pact()
    t.epochs = 8

    def groups(training: Training) -> list[Optimizer]:
        ends = [each for name, each in training.model.named_parameters() if name.endswith("alpha")]
        rest = [each for name, each in training.model.named_parameters() if not name.endswith("alpha")]
        return [SGD([{"params": rest}, {"params": ends, "weight_decay": 2e-2}], lr=0.05, momentum=0.9)]

    t.optimizers_of = groups


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


def eligibility_traces(t: Training) -> None:
    """TD(lambda) with a network (Sutton, 1988; Tesauro, 1992): gradients of the past fade, each surprise is for all."""
    states, decay = 7, 0.7
    truth = torch.linspace(-1, 1, states + 2)[1:-1]
    t.model, t.epochs = nn.Sequential(nn.Linear(states, 32), nn.Tanh(), nn.Linear(32, 1)), 8
    nn.init.zeros_(t.model[2].weight)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.03)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda episode: 1 / (1 + episode / 15))
    seen = torch.eye(states)

    def walk(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        weights = list(model.parameters())
        for _ in range(30 * training.epochs):
            place, traces = states // 2, [torch.zeros_like(p) for p in weights]
            while 0 <= place < states:
                value = model(seen[place])
                slopes = torch.autograd.grad(value.sum(), weights)
                traces = [decay * trace + slope for trace, slope in zip(traces, slopes)]
                place += 1 if float(torch.rand(())) < 0.5 else -1
                with torch.no_grad():
                    ahead = model(seen[place]) if 0 <= place < states else torch.tensor(1.0 if place > 0 else -1.0)
                surprise = float(ahead) - value.item()
                for p, trace in zip(weights, traces):
                    p.grad = -surprise * trace
                optimizer.step()
            training.scheduler.step()
            with torch.no_grad():
                yield (model(seen).squeeze(1) - truth).square().mean().sqrt()

    t.loop, t.loaded = walk, False


@torch.no_grad()
def searched(board: Board, model: nn.Module, depth: int = 3) -> Tensor:
    """What each of four actions brings (walkers, 4), by all plans of ``depth`` moves and the value at their ends."""
    plans, walkers = torch.tensor(list(product(range(4), repeat=depth))), len(board.place)
    ahead = Board(0)
    ahead.place = board.place.repeat_interleave(len(plans), 0)
    worth, going = torch.zeros(len(ahead.place)), torch.ones(len(ahead.place))
    for number in range(depth):
        reward, arrived = ahead.step(plans[:, number].repeat(walkers))
        worth += 0.95**number * going * reward
        going = going * (1 - arrived)
    worth += 0.95**depth * going * model(ahead.seen())[:, 4]
    return worth.view(walkers, 4, -1).amax(2)


def expert_iteration(t: Training) -> None:
    """Expert iteration (Anthony et al., 2017): a search that uses the network is the expert that it imitates."""
    t.model = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 5))  # four actions and a value
    t.epochs, t.lr, board = 5, 1e-2, Board(16)

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        memory: list[tuple[Tensor, Tensor]] = []
        for _ in range(16 * training.epochs):
            rewards = []
            for _ in range(4):
                worth = searched(board, training.model)
                memory = [*memory, (board.seen(), worth)][-64:]
                with torch.no_grad():
                    policy = Categorical(logits=training.model(board.seen())[:, :4])
                rewards.append(board.step(policy.sample())[0])
            for rows in torch.randperm(len(memory)).split(8)[:4]:
                seen, worth = (torch.cat(each) for each in zip(*(memory[number] for number in rows.tolist())))
                out = training.model(seen)
                expert = (worth / 0.05).softmax(1)
                loss = F.cross_entropy(out[:, :4], expert) + 0.5 * F.mse_loss(out[:, 4], worth.amax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            yield -torch.stack(rewards).mean()

    t.loop, t.loaded = play, False
