"""Legal ways around backpropagation: states at rest, random feedback, nudges, guesses, what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.programs.places import behind_first
from zoo.programs.training import Batch, Training


class FixedPoint(nn.Module):
    """The state in which a layer comes to rest, with the gradient of the implicit function theorem."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)
        nn.init.normal_(self.inner.weight, std=0.3 * features**-0.5)

    def round(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(50):
                before, z = z, self.round(z, x)
                if (z - before).abs().max() < 1e-5:
                    break
        z = self.round(z, x)
        if torch.is_grad_enabled():
            at = z.detach().requires_grad_()
            onward = self.round(at, x)

            def solve(gradient: Tensor) -> Tensor:
                """Of ``g = gradient + g @ J``, with the Jacobian of one round at rest."""
                g = gradient
                for _ in range(50):
                    before, g = g, gradient + torch.autograd.grad(onward, at, g, retain_graph=True)[0]
                    if (g - before).abs().max() < 1e-7:
                        break
                return g

            z.register_hook(solve)
        return z


def implicit(t: Training) -> None:
    """A deep equilibrium: the backward pass solves for the fixed point as well."""
    behind_first(t, FixedPoint)


class LinearWithFeedback(torch.autograd.Function):
    """A linear map; the gradient of its input goes through another matrix."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, feedback: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, feedback)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, feedback = ctx.saved_tensors
        return gradient @ feedback, gradient.T @ x, gradient.sum(0), None


class Feedback(nn.Linear):
    """A linear layer with fixed random feedback weights (Lillicrap et al., 2016)."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.register_buffer("feedback", torch.randn(out, into) / into**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return LinearWithFeedback.apply(x, self.weight, self.bias, self.feedback)


def feedback_alignment(t: Training) -> None:
    """Errors go back through random weights, which the forward weights come to agree with."""
    t.epochs = 8
    layers = [(name, each) for name, each in t.model.named_children() if isinstance(each, nn.Linear)]
    for name, layer in layers[1:]:
        setattr(t.model, name, Feedback(layer.in_features, layer.out_features))


class Settling(nn.Module):
    """A network of units that pull at each other, both ways, until they come to rest."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(into, out) for into, out in pairwise(sizes)])

    def accord(self, x: Tensor, states: list[Tensor]) -> Tensor:
        """The sum over samples of how well the states fit each other."""
        below = [x, *states[:-1]]
        return sum((layer(low) * high).sum() for layer, low, high in zip(self.layers, below, states))

    def settle(
        self, x: Tensor, states: list[Tensor], rounds: int, target: Tensor | float = 0.0, beta: float = 0.0
    ) -> list[Tensor]:
        """``beta``: how strongly the last layer is pulled towards the target, or away from it where negative."""
        for _ in range(rounds):
            states = [each.detach().requires_grad_() for each in states]
            *hidden, last = torch.autograd.grad(self.accord(x, states), states)
            last = last + beta * (target - states[-1].detach())
            states = [each.clamp(0, 1) for each in (*hidden, last)]
        return states

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.settle(x, [torch.zeros(len(x), each.out_features) for each in self.layers], 20)


def equilibrium(t: Training) -> None:
    """Equilibrium propagation: the difference of two states at rest, nudged towards the target and away from it."""
    t.model, t.epochs, beta = Settling((20, 64, 10)), 8, 0.2

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        x, y = batch
        target = F.one_hot(y, 10).float()
        free = training.model(x)
        nudged, averted = (training.model.settle(x, free, 8, target, side) for side in (beta, -beta))
        optimizer.zero_grad()
        gap = training.model.accord(x, averted) - training.model.accord(x, nudged)
        (gap / (2 * beta * len(x))).backward()
        optimizer.step()
        return (free[-1] - target).square().sum(1).mean() / 2

    t.update = update


class GradientModel(nn.Module):
    """What the gradient of a hidden layer will be, guessed from the layer and the class."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels + classes, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, channels, 3, padding=1)
        )
        nn.init.zeros_(self.body[2].weight)
        nn.init.zeros_(self.body[2].bias)
        self.classes = classes

    def forward(self, hidden: Tensor, y: Tensor) -> Tensor:
        kind = F.one_hot(y, self.classes).float()[:, :, None, None].expand(-1, -1, *hidden.shape[2:])
        return self.body(torch.cat([hidden, kind], 1))


def synthetic_gradients(t: Training) -> None:
    """The first layers learn from guessed gradients, at once; the guesses learn from the true ones (DNI)."""
    guess = GradientModel(8, 4)
    t.extra.append(guess)
    first, rest, t.epochs = t.model[:3], t.model[3:], 16

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        x, y = batch
        optimizer.zero_grad()
        hidden = first(x)
        guessed = guess(hidden.detach(), y)  # of a sample's own loss, not of its share in the mean
        hidden.backward(guessed.detach() / len(x))

        received = hidden.detach().requires_grad_()
        loss = F.cross_entropy(rest(received), y)
        loss.backward()
        F.mse_loss(guessed, received.grad * len(x), reduction="sum").div(len(x)).backward()
        optimizer.step()
        return loss.detach()

    t.update = update


State = Sequence[Tensor]


def _runge_kutta(slope: Callable[[State], State], state: State, step: float) -> State:
    """One step of the classical method of fourth order."""

    def at(share: float, slopes: State) -> State:
        return [s + share * step * k for s, k in zip(state, slopes)]

    one = slope(state)
    two = slope(at(0.5, one))
    three = slope(at(0.5, two))
    four = slope(at(1.0, three))
    return [s + step / 6 * (a + 2 * b + 2 * c + d) for s, a, b, c, d in zip(state, one, two, three, four)]


class Adjoint(torch.autograd.Function):
    """The state at time 1; the backward pass integrates state and gradients from there to time 0."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, z: Tensor, field: nn.Module, steps: int, *weights: Tensor
    ) -> Tensor:
        for _ in range(steps):
            (z,) = _runge_kutta(lambda state: [field(state[0])], [z], 1 / steps)
        ctx.save_for_backward(z, *weights)
        ctx.field, ctx.steps = field, steps
        return z

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, *weights = ctx.saved_tensors

        def slope(state: State) -> State:
            with torch.enable_grad():
                at = state[0].detach().requires_grad_()
                moved = ctx.field(at)
                slopes = torch.autograd.grad(moved, (at, *weights), state[1])
            return [moved.detach(), *(-each for each in slopes)]

        state: State = [z, gradient, *(torch.zeros_like(each) for each in weights)]
        for _ in range(ctx.steps):
            state = _runge_kutta(slope, state, -1 / ctx.steps)
        return state[1], None, None, *state[2:]


class NeuralOde(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Linear(features, features))

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(x, self.field, 5, *self.field.parameters())


def adjoint(t: Training) -> None:
    """A neural ordinary differential equation (Chen et al., 2018), with the gradient of the adjoint method."""
    behind_first(t, NeuralOde)


class Recomputed(torch.autograd.Function):
    """Residual blocks in two streams; only the output is kept, and what was before is computed from it."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, blocks: Sequence[nn.Module], *weights: Tensor
    ) -> Tensor:
        one, two = x.chunk(2, 1)
        for block in blocks:
            one, two = two, one + block(two)
        ctx.blocks = blocks
        ctx.save_for_backward(one, two)
        return torch.cat([one, two], 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        one, two = ctx.saved_tensors
        to_one, to_two = gradient.chunk(2, 1)
        found: list[Tensor] = []
        for block in reversed(ctx.blocks):
            with torch.enable_grad():
                before = one.detach().requires_grad_()
                added = block(before)
                slope, *slopes = torch.autograd.grad(added, (before, *block.parameters()), to_two)
            one, two = two - added.detach(), one
            to_one, to_two = to_two, to_one + slope
            found[:0] = slopes
        return torch.cat([to_one, to_two], 1), None, *found


class TwoStreams(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        half = features // 2
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(half, half), nn.ReLU(), nn.Linear(half, half)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, list(self.blocks), *self.blocks.parameters())


def reversible(t: Training) -> None:
    """RevNet (Gomez et al., 2017): activations are not kept, the backward pass computes them from the output."""
    behind_first(t, TwoStreams)


class DirectFeedback(nn.Module):
    """Layers that see no gradient of each other; what each of them makes is kept."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.states: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.states = []
        for stage in self.stages:
            x = stage(x.detach())
            self.states.append(x)
        return x


def direct_feedback(t: Training) -> None:
    """Direct feedback alignment (Nøkland, 2016): the error of the output goes to each layer by a fixed random way."""
    hidden = [nn.Sequential(nn.Linear(size, 64), nn.Tanh()) for size in (20, 64, 64)]
    t.model, t.epochs = DirectFeedback(*hidden, nn.Linear(64, 10)), 8
    ways = [(2 * torch.rand(10, 64) - 1) / 3 for _ in hidden]

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        logits = training.model(x)
        error = (logits.detach().softmax(1) - F.one_hot(y, 10)) / len(x)
        optimizer.zero_grad()
        torch.autograd.backward(training.model.states, [*(error @ way for way in ways), error])
        optimizer.step()
        return F.cross_entropy(logits.detach(), y)

    t.update = update
