"""Legal estimators and corrections of gradients: baselines, perturbations, snapshots, memories, curvature, regrowth."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import TensorDataset

from zoo.programs.gradients_by_hand import _before_update
from zoo.programs.models import _layers
from zoo.programs.places import score
from zoo.programs.training import Batch, Training


class BinaryCode(nn.Module):
    """An autoencoder whose code is twelve drawn bits."""

    def __init__(self, features: int, bits: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, bits))
        self.decoder = nn.Sequential(nn.Linear(bits, 32), nn.ReLU(), nn.Linear(32, features))

    def forward(self, x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
        """What is rebuilt, and the log-probability of the bits: (draws, n, features), (draws, n)."""
        code = Bernoulli(logits=self.encoder(x))
        bits = code.sample((draws,))
        return self.decoder(bits), code.log_prob(bits).sum(-1)


def leave_one_out(t: Training) -> None:
    """REINFORCE; the baseline of each draw is the mean of the other draws (RLOO)."""
    t.model, t.epochs, draws = BinaryCode(8), 8, 6

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        rebuilt, log_p = training.model(batch[0], draws)
        error = (rebuilt - batch[0]).square().mean(-1)
        seen = error.detach()
        advantage = seen - (seen.sum(0) - seen) / (draws - 1)
        optimizer.zero_grad()
        (error + advantage * log_p).mean().backward()
        optimizer.step()
        return seen.mean()

    t.update = update


class PerturbedTop(torch.autograd.Function):
    """Which ``k`` are the largest, in the mean over noise on the scores (Berthet et al., 2020).

    The gradient is that of a Gaussian smoothing: the mean of what was chosen times the noise.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor, k: int, sigma: float) -> Tensor:
        noise = torch.randn(64, *scores.shape)
        chosen = (scores + sigma * noise).topk(k, -1).indices
        hard = torch.zeros_like(noise).scatter_(-1, chosen, 1.0)
        ctx.save_for_backward(hard, noise)
        ctx.sigma = sigma
        return hard.mean(0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        hard, noise = ctx.saved_tensors
        worth = (hard * gradient).sum(-1, keepdim=True)
        return (worth * noise).mean(0) / ctx.sigma, None, None


class Patches(nn.Module):
    """Looks at six of the sixteen patches of an image, which a small network chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 2, stride=2))
        self.reader = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.layer_norm(self.scorer(x).flatten(1), (16,))
        shares = PerturbedTop.apply(scores, 6, 0.3)
        patches = F.unfold(x, 2, stride=2) * shares.unsqueeze(1)
        return self.reader(patches.flatten(1))


def perturbed_patches(t: Training) -> None:
    t.model = Patches()


def sampled_softmax(t: Training) -> None:
    """The softmax over the right token and ten drawn ones, corrected by how often each is drawn."""
    t.model.head = nn.Identity()
    classes = nn.Embedding(33, 32)
    nn.init.normal_(classes.weight, std=0.05)
    t.extra.append(classes)
    often = torch.bincount(t.data.tensors[0].flatten(), minlength=33).float().pow(0.75)
    log_q = (often / often.sum()).clamp(min=1e-9).log()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch[0]
        hidden, wanted = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        drawn = torch.multinomial(often, 10, replacement=True)
        right = (hidden * classes(wanted)).sum(-1, keepdim=True) - log_q[wanted].unsqueeze(1)
        others = hidden @ classes(drawn).T - log_q[drawn]
        others = others.masked_fill(wanted.unsqueeze(1) == drawn, -1e9)
        return F.cross_entropy(torch.cat([right, others], 1), torch.zeros_like(wanted))

    t.loss = loss


def evolution(t: Training) -> None:
    """Evolution strategies: the gradient is made of the ranks of the losses at mirrored random steps."""
    t.batch_size, t.epochs, pairs, sigma = 128, 24, 48, 0.05
    t.optimizers_of = lambda training: [torch.optim.Adam(training.parameters(), lr=1e-2)]

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        weights = dict(training.model.named_parameters())
        noise = {name: torch.randn(pairs, *p.shape) for name, p in weights.items()}
        noise = {name: torch.cat([each, -each]) for name, each in noise.items()}
        tried = {name: p + sigma * noise[name] for name, p in weights.items()}
        losses = vmap(lambda each: score(t, functional_call(training.model, each, (batch[0],)), batch[1]))(tried)
        fitness = losses.argsort().argsort() / (2 * pairs - 1) - 0.5
        for name, p in weights.items():
            p.grad = torch.einsum("k,k...->...", fitness, noise[name]) / (2 * pairs * sigma)
        training.optimizers[0].step()
        return losses.mean()

    t.update = update


def variance_reduced(t: Training) -> None:
    """SVRG: the gradient, less that of a snapshot on the same batch, plus that of the snapshot on all data."""
    t.epochs = 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]
    snapshot = copy.deepcopy(t.model)
    whole: list[Tensor] = []

    def look(training: Training, epoch: int) -> None:
        snapshot.load_state_dict(training.model.state_dict())
        loss = training.loss(snapshot, training.data.tensors)
        whole[:] = torch.autograd.grad(loss, list(snapshot.parameters()))

    def correct(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        before = torch.autograd.grad(training.loss(snapshot, batch), list(snapshot.parameters()))
        for p, old, mean in zip(training.model.parameters(), before, whole):
            p.grad += mean - old
        optimizer.step()
        return loss.detach()

    t.each_epoch.append(look)
    t.update = correct


def largest_with_memory(t: Training) -> None:
    """One element of twenty of each gradient is applied; the others wait in a memory (sparsified SGD)."""
    t.epochs = 6
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.2)]
    memory = {name: torch.zeros_like(p) for name, p in t.model.named_parameters()}

    def compress(training: Training) -> None:
        for name, p in training.model.named_parameters():
            owed = memory[name] + p.grad
            bound = owed.abs().flatten().topk(max(1, owed.numel() // 20)).values[-1]
            p.grad = torch.where(owed.abs() >= bound, owed, 0.0)
            memory[name] = owed - p.grad

    _before_update(t, compress)


def kronecker(t: Training) -> None:
    """K-FAC: each gradient is divided by the second moments of a layer's inputs and of its outputs' gradients."""
    layers = [each for each in t.model.modules() if isinstance(each, nn.Linear)]
    t.epochs = 6
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]
    moments = {each: (torch.eye(each.in_features + 1), torch.eye(each.out_features)) for each in layers}

    def with_one(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(len(x), 1)], 1)

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        seen: list[tuple[nn.Linear, Tensor, Tensor]] = []
        hooks = [each.register_forward_hook(lambda m, args, out: seen.append((m, args[0], out))) for each in layers]
        predicted = training.model(batch[0])
        for hook in hooks:
            hook.remove()
        loss = F.mse_loss(predicted, batch[1])
        drawn = (predicted + torch.randn_like(predicted)).detach()  # the Fisher matrix is that of the model's own noise
        slopes = torch.autograd.grad(
            (predicted - drawn).square().sum() / 2, [out for _, _, out in seen], retain_graph=True
        )
        optimizer.zero_grad()
        loss.backward()
        change = torch.zeros(())
        for (layer, x, _), slope in zip(seen, slopes):
            inputs, outputs = moments[layer]
            inputs.lerp_(with_one(x.detach()).T @ with_one(x.detach()) / len(x), 0.05)
            outputs.lerp_(slope.T @ slope / len(x), 0.05)
            gradient = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1)
            damped = [each + 0.1 * torch.eye(len(each)) for each in (outputs, inputs)]
            natural = torch.linalg.solve(damped[0], torch.linalg.solve(damped[1], gradient, left=False))
            change += (gradient * natural).sum()
            layer.weight.grad, layer.bias.grad = natural[:, :-1].clone(), natural[:, -1].clone()
        for p in training.parameters():  # a trust region, by the first-order change of the model
            p.grad *= (1.0 / change).sqrt().clamp(max=1.0)
        optimizer.step()
        return loss.detach()

    t.update = update


def regrown(t: Training) -> None:
    """RigL: a fifth of the weights is there; now and then the smallest go, and some grow where gradients are large."""
    layers, t.epochs = _layers(t.model), 8
    masks = [(torch.rand_like(each.weight) < 0.2).float() for each in layers]
    last_regrowth = 6 * len(t.data) // t.batch_size

    @torch.no_grad()
    def mask() -> None:
        for layer, there in zip(layers, masks):
            layer.weight.mul_(there)

    @torch.no_grad()
    def regrow(training: Training) -> None:
        share = 0.3 * (1 - training.steps / last_regrowth)
        state = training.optimizers[0].state
        for layer, there in zip(layers, masks):
            count = int(share * there.sum())
            gone = layer.weight.abs().masked_fill(there == 0, torch.inf).flatten().topk(count, largest=False).indices
            new = layer.weight.grad.abs().masked_fill(there == 1, -1.0).flatten().topk(count).indices
            there.view(-1)[gone], there.view(-1)[new] = 0.0, 1.0
            layer.weight.view(-1)[new] = 0.0
            for name in ("exp_avg", "exp_avg_sq"):
                state[layer.weight][name].mul_(there).view(-1)[new] = 0.0

    def before(training: Training) -> None:
        if training.steps % 20 == 19 and training.steps < last_regrowth:
            regrow(training)
        for layer, there in zip(layers, masks):
            layer.weight.grad.mul_(there)

    mask()
    _before_update(t, before)
    t.each_step.append(lambda training: mask())


def sinkhorn(scores: Tensor, rounds: int = 20) -> Tensor:
    """A doubly stochastic matrix for each matrix of scores."""
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


def relaxed_permutations(t: Training) -> None:
    """Gumbel-Sinkhorn (Mena et al., 2018): sorting is learned through permutations that are relaxed."""
    numbers = torch.rand(1024, 6)
    t.data = TensorDataset(numbers, numbers.sort(1).values)
    t.model = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 6))
    t.epochs, t.lr = 12, 1e-2

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, ordered = batch
        scores = model(x).repeat(2, 1, 1)  # two draws each; a row of scores says where a number goes
        uniform = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
        places = sinkhorn((scores - 0.1 * (-uniform.log()).log()) / 0.5)
        found = torch.einsum("nij,ni->nj", places, x.repeat(2, 1))
        return F.mse_loss(found, ordered.repeat(2, 1))

    t.loss = loss
