"""Models that are machines of their own: automata, circuits, energies, indices, dictionaries, flows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from torch.utils.data import TensorDataset

from zoo.programs.machine_parts import (
    Automaton,
    Beliefs,
    Contraction,
    DecisionLoss,
    Dictionary,
    Energy,
    Gates,
    Towers,
    Writer,
    cheapest,
    value_of,
)
from zoo.programs.training import Batch, Training, fit_values


def thompson_head(t: Training) -> None:
    """Neural-linear bandit (Riquelme et al., 2018): Bayesian heads on learned features choose which reward is seen."""
    beliefs, seen, shown = Beliefs(10, 64), list[tuple[Tensor, Tensor, Tensor]](), list[float]()

    def learn(training: Training, past: list[Tensor]) -> None:
        (optimizer,), drawn = training.optimizers, torch.randint(len(past[0]), (64,))
        x, arm, reward = (column[drawn] for column in past)
        optimizer.zero_grad()
        F.mse_loss(training.model(x).gather(1, arm.unsqueeze(1)).squeeze(1), reward).backward()
        optimizer.step()

    def loop(training: Training) -> Iterator[Tensor]:
        body = training.model[:4]
        for _ in range(5):
            for x, best in training.batches:
                with torch.no_grad():
                    arm = beliefs.pull(body(x))
                    reward = (arm == best).float()
                    beliefs.add(body(x), arm, reward)
                seen.append((x, arm, reward))
                past = [torch.cat(column) for column in zip(*seen)]
                for _ in range(4):
                    learn(training, past)
                yield 1 - reward.mean()  # regret of the round
            shown.append(past[2][-1024:].mean().item())
            beliefs.forget()  # the features have moved
            with torch.no_grad():
                beliefs.add(body(past[0]), *past[1:])

    t.loop, t.lr = loop, 1e-3


def refreshed_index(t: Training) -> None:
    """ANCE (Xiong et al., 2021): negatives are the nearest documents of an index that is rebuilt now and then."""
    documents = t.data.tensors[0]
    queries = torch.tanh(documents @ torch.randn(20, 20) / 3) + 0.1 * torch.randn(1024, 20)
    t.data = TensorDataset(queries[:896], torch.arange(896))
    t.model, t.batch_size, t.epochs, recall = Towers(20), 64, 20, list[float]()
    nearest = torch.randint(1024, (896, 30))  # before the first index anything is a negative

    @torch.no_grad()
    def refresh(training: Training) -> None:
        if training.steps % 40:
            return
        training.model.eval()
        query, document = training.model(queries, documents)
        scores = query @ document.T
        recall.append((scores[896:].argmax(1) == torch.arange(896, 1024)).float().mean().item())
        if training.steps >= 80:
            scores.fill_diagonal_(-2.0)
            nearest.copy_(scores[:896].topk(30).indices)
        training.model.train()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        query, right = batch
        wrong = nearest[right].gather(1, torch.randint(30, (len(right), 8)))
        query, document = model(query, documents[torch.cat([right.unsqueeze(1), wrong], 1)])
        return F.cross_entropy(torch.einsum("bd,bkd->bk", query, document) / 0.1, torch.zeros_like(right))

    t.loss = loss
    t.each_step.append(refresh)


def risk_seeking(t: Training) -> None:
    """Deep symbolic regression (Petersen et al., 2021): the gradient of the best tenth of the sampled expressions."""
    leaves = t.data.tensors[0][:128, :3].T.contiguous()
    y = leaves[0] * leaves[1] + leaves[2].sin() + 0.05 * torch.randn(128)
    t.model, t.loaded, t.lr = Writer(), False, 5e-3
    known, best = dict[tuple[int, ...], Tensor](), (0.0, tuple[int, ...]())

    def loop(training: Training) -> Iterator[Tensor]:
        nonlocal best
        (optimizer,) = training.optimizers
        for _ in range(100):
            tokens, logs, entropies = training.model(250)
            rows = [tuple(row) for row in tokens.tolist()]
            known.update({row: value_of(row, leaves) for row in set(rows) - known.keys()})
            worth = torch.stack([known[row] for row in rows])
            reward = 1 / (1 + (worth - y).square().mean(1).sqrt() / y.std())
            edge = reward.quantile(0.9)
            elite = reward >= edge
            best = max(best, (reward.max().item(), rows[int(reward.argmax())]))
            optimizer.zero_grad()
            (-((reward - edge) * logs)[elite].mean() - 0.01 * entropies[elite].mean()).backward()
            optimizer.step()
            yield 1 - reward[elite].mean()

    t.loop = loop


def decided(t: Training) -> None:
    """Predict, then optimise (Elmachtoub and Grigas, 2022): costs are learned by what is decided with them."""
    x = t.data.tensors[0]
    mixing = (torch.rand(10, 12) < 0.5).float()
    cost = ((x @ mixing.T / 12**0.5 + 3) ** 4 / 60 + 0.5) * (0.75 + 0.5 * torch.rand(len(x), 10))
    t.data, t.epochs, t.batch_size = TensorDataset(x[:896], cost[:896]), 8, 32
    t.model[-1] = nn.Linear(64, 10)
    t.scheduler_of = lambda optimizer: MultiStepLR(optimizer, [120, 180], gamma=0.3)
    best = (float("inf"), copy.deepcopy(t.model.state_dict()))

    @torch.no_grad()
    def keep_best(training: Training, epoch: int) -> None:
        nonlocal best
        taken, least = (cheapest(each) for each in (training.model(x[896:]), cost[896:]))
        regret = (((taken - least) * cost[896:]).sum() / (least * cost[896:]).sum()).item()
        if regret < best[0]:
            best = regret, copy.deepcopy(training.model.state_dict())

    t.each_epoch.append(keep_best)
    t.loss = lambda model, batch: DecisionLoss.apply(model(batch[0]), batch[1]).mean()


def growing_pattern(t: Training) -> None:
    """Growing neural cellular automata (Mordvintsev et al., 2020): a pool of grown cells, some damaged, is grown on."""
    x, y = t.data.tensors
    target = torch.cat([x[y == 0].mean(0), torch.ones(1, 8, 8)])
    seed = torch.zeros(8, 8, 8)
    seed[1:, 4, 4] = 1.0
    pool = seed.repeat(64, 1, 1, 1)
    t.model, t.loaded = Automaton(), False

    def loop(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(250):
            picked = torch.randperm(64)[:8]
            cells = pool[picked]
            worst_first = (cells[:, :2] - target).square().mean((1, 2, 3)).argsort(descending=True)
            cells[worst_first[0]] = seed
            cells[worst_first[-1], :, :, : int(torch.randint(1, 4, ()))] = 0.0
            for _ in range(int(torch.randint(6, 11, ()))):
                cells = training.model(cells)
            loss = (cells[:, :2] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in training.parameters():
                parameter.grad /= parameter.grad.norm() + 1e-8
            optimizer.step()
            pool[picked] = cells.detach()
            yield loss.detach()

    t.loop = loop


def logic_gates(t: Training) -> None:
    """Differentiable logic gate networks (Petersen et al., 2022): counted votes of gates between fixed wires."""
    x, y = t.data.tensors
    x = (x.flatten(1) > 0).float()
    t.model = nn.Sequential(*(Gates(*pair) for pair in pairwise([64, 256, 256, 128])))
    t.data, t.epochs, t.lr, accuracy = TensorDataset(x[:512], y[:512]), 20, 1e-2, list[float]()

    def votes(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).unflatten(1, (4, 32)).sum(2) / 4

    @torch.no_grad()
    def as_circuit(training: Training, epoch: int) -> None:
        training.model.eval()
        accuracy.append((votes(training.model, x[512:]).argmax(1) == y[512:]).float().mean().item())
        training.model.train()

    t.each_epoch.append(as_circuit)
    t.loss = lambda model, batch: F.cross_entropy(votes(model, batch[0]), batch[1])


def jump_dictionary(t: Training) -> None:
    """JumpReLU sparse autoencoders (Rajamanoharan et al., 2024) of a language model's stream: counts are punished."""
    ids, inner = t.data.tensors[0], list[Tensor]()
    studied = Adam(t.model.parameters(), lr=3e-3)
    for rows in ids.split(32) * 2:
        studied.zero_grad()
        t.loss(t.model, (rows, rows)).backward()
        studied.step()
    with torch.no_grad(), t.model.blocks[0].register_forward_hook(lambda _, __, out: inner.append(out.flatten(0, 1))):
        t.model(ids)
    x, shown = inner[0] / inner[0].square().mean().sqrt(), list[tuple[float, float]]()
    t.data, t.model, t.batch_size, t.epochs = TensorDataset(x, x), Dictionary(32, 128), 256, 8
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=5e-3, betas=(0.0, 0.999))]

    @torch.no_grad()
    def show(training: Training, epoch: int) -> None:
        rebuilt, count = training.model(x[:2000])
        shown.append((count.mean().item(), ((rebuilt - x[:2000]).square().mean() / x.var()).item()))

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), atoms = training.optimizers, training.model.atoms
        rebuilt, count = training.model(batch[0])
        optimizer.zero_grad()
        loss = (rebuilt - batch[0]).square().sum(1).mean()
        (loss + min(1.0, training.steps / 100) * 0.5 * count.mean()).backward()
        atoms.grad -= (atoms.grad * atoms.detach()).sum(1, keepdim=True) * atoms.detach()  # lengths are not learned
        optimizer.step()
        with torch.no_grad():
            atoms.copy_(F.normalize(atoms, dim=1))
        return loss.detach()

    t.update = update
    t.each_epoch.append(show)


def factorised(t: Training) -> None:
    """Restructuring by singular values (Xue et al., 2013): wide layers become two thin ones, and training goes on."""
    t.epochs, shown = 8, list[float]()

    @torch.no_grad()
    def thin(layer: nn.Linear, rank: int = 10) -> nn.Sequential:
        left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
        down, up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features)
        down.weight.copy_(values[:rank].sqrt().unsqueeze(1) * right[:rank])
        up.weight.copy_(left[:, :rank] * values[:rank].sqrt())
        up.bias.copy_(layer.bias)
        return nn.Sequential(down, up)

    def restructure(training: Training, epoch: int) -> None:
        shown.append(sum(training.losses[-20:]) / 20)
        if epoch != 4:
            return
        (optimizer,) = training.optimizers
        for block in training.model.blocks:
            block.up, block.down = thin(block.up), thin(block.down)
        kept = set(training.parameters())
        for parameter in set(optimizer.state) - kept:
            del optimizer.state[parameter]
        optimizer.param_groups[0].update(params=training.parameters(), lr=1e-3)

    t.each_epoch.append(restructure)


def energy_conserved(t: Training) -> None:
    """Hamiltonian networks (Greydanus et al., 2019): velocities are slopes of a learned energy, here a pendulum's."""
    angle, time, trials = torch.rand(40, 1) * 2 + 0.3, 0.1, list[Tensor]()
    state = torch.cat([angle, torch.zeros(40, 1)], 1)

    def velocity(state: Tensor) -> Tensor:
        return torch.stack([state[:, 1], -3 * state[:, 0].sin()], 1)

    def advance(move: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
        middle = state + time / 2 * move(state)
        return state + time * move(middle)

    for _ in range(30):
        trials.append(state)
        state = advance(velocity, state)
    x = torch.cat(trials)
    t.data, t.model, t.epochs = TensorDataset(x, velocity(x) + 0.05 * torch.randn_like(x)), Energy(), 10
    t.lr, t.loss = 3e-3, fit_values
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, 370)
    drifts = list[float]()

    @torch.no_grad()
    def roll_out(training: Training, epoch: int) -> None:
        training.model.eval()
        state = trials[0]
        for _ in range(30):
            state = advance(training.model, state)
        energy = [each[:, 1].square() / 2 - 3 * each[:, 0].cos() for each in (trials[0], state)]
        drifts.append((energy[1] - energy[0]).abs().mean().item())
        training.model.train()

    t.each_epoch.append(roll_out)


def slow_states(t: Training) -> None:
    """VAMPnets (Mardt et al., 2018): fuzzy states of a particle in two wells, by the score of what they foretell."""
    place, path = torch.full((64,), -1.0), list[Tensor]()
    place[32:] = 1.0
    for _ in range(60):
        path.append(place)
        for _ in range(5):
            place = place - 0.04 * 4 * place * (place.square() - 1) + 0.25 * torch.randn(64)
    along = torch.stack(path)
    wells = torch.tanh(torch.stack([along, along.square() - 1], 2))
    seen = torch.cat([wells, 1.5 * torch.randn(60, 64, 4)], 2) @ torch.linalg.qr(torch.randn(6, 6))[0]
    t.data = TensorDataset(seen[:-2].flatten(0, 1), seen[2:].flatten(0, 1))
    t.model = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 3), nn.Softmax(1))
    t.batch_size, t.epochs, t.lr = 512, 30, 5e-3

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        now, later = (each - each.mean(0) for each in (model(batch[0]), model(batch[1])))
        ridge, n = 1e-4 * torch.eye(3), len(now)
        across = now.T @ later / n
        of_now = torch.linalg.solve(now.T @ now / n + ridge, across)
        of_later = torch.linalg.solve(later.T @ later / n + ridge, across.T)
        return -1 - (of_now @ of_later).trace()

    t.loss = loss


def invertible_residuals(t: Training) -> None:
    """Residual flows (Chen et al., 2019): contractions, whose volume is a series cut off at random."""
    x = t.data.tensors[0][:, :2].contiguous()
    t.data, t.model = TensorDataset(x, x), nn.ModuleList([Contraction() for _ in range(3)])
    t.batch_size, t.lr, t.epochs, undone = 128, 1e-2, 16, list[float]()

    def negative_likelihood(model: nn.Module, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        for block in model:
            x, of_block = block(x)
            volume = volume + of_block
        return (x.square().sum(1) / 2 + 1.8379 - volume).mean()

    def undo(training: Training, epoch: int) -> None:
        training.model.eval()
        there = x[:200].clone()
        for block in training.model:
            there = block(there)[0].detach()
        for block in reversed(training.model):
            there = block.inverse(there)
        undone.append((there - x[:200]).abs().max().item())
        training.model.train()

    t.each_epoch.append(undo)
    t.loss = lambda model, batch: negative_likelihood(model, batch[0])


def adversarial_latent(t: Training) -> None:
    """Adversarial codes (Makhzani et al., 2016): a critic makes codes normal; two optimizers move the encoder."""
    t.model[2], t.model[3] = nn.Linear(32, 2), nn.Linear(2, 32)
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    t.extra.append(critic)
    t.epochs, t.batch_size, shown = 30, 64, list[float]()

    def optimizers_of(training: Training) -> list[Optimizer]:
        rebuilding, half = Adam(training.model.parameters(), lr=2e-3), (0.5, 0.999)
        judging = Adam(critic.parameters(), lr=1e-3, betas=half)
        return [rebuilding, judging, Adam(training.model[:3].parameters(), lr=1e-3, betas=half)]

    def update(training: Training, batch: Batch) -> Tensor:
        rebuilding, judging, deceiving = training.optimizers
        encoder, decoder = training.model[:3], training.model[3:]
        rebuilding.zero_grad()
        rebuilt = F.mse_loss(decoder(encoder(batch[0])), batch[0])
        rebuilt.backward()
        rebuilding.step()

        code, normal = encoder(batch[0]).detach(), torch.randn(len(batch[0]), 2)
        judging.zero_grad()
        judged = F.softplus(-critic(normal)).mean() + F.softplus(critic(code)).mean()
        judged.backward()
        judging.step()
        shown.append(judged.item())

        deceiving.zero_grad()
        F.softplus(-critic(encoder(batch[0]))).mean().backward()
        deceiving.step()
        return rebuilt.detach()

    t.optimizers_of, t.update = optimizers_of, update


MACHINES: dict[Callable[[Training], None], str] = {
    thompson_head: "table",
    refreshed_index: "table",
    risk_seeking: "regress",
    decided: "regress",
    growing_pattern: "image",
    logic_gates: "image",
    jump_dictionary: "text",
    factorised: "text",
    energy_conserved: "series",
    slow_states: "series",
    invertible_residuals: "rebuild",
    adversarial_latent: "rebuild",
}
"""The techniques, and the task that each changes."""
