"""Legal techniques with several players: actors and critics, opponents, instruments, judges of missing values."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

from zoo.programs.training import Training


class PointMass:
    """Carts on a line that are to be brought to rest at 0; episodes end by time alone."""

    def __init__(self, num_envs, horizon=40):
        self.num_envs, self.horizon = num_envs, horizon

    def reset(self):
        self.clock = 0
        self.state = torch.stack([2 * torch.rand(self.num_envs) - 1, torch.randn(self.num_envs) * 0.3], 1)
        return self.state

    def step(self, action):
        push = action.squeeze(1)
        position, velocity = self.state.unbind(1)
        reward = -(position**2 + 0.1 * velocity**2 + 0.05 * push**2)
        velocity = 0.95 * velocity + 0.3 * push
        self.state = torch.stack([position + 0.2 * velocity, velocity], 1).clamp(-3, 3)
        self.clock += 1
        return self.state, reward, self.clock == self.horizon


class ReplayBuffer:
    def __init__(self, size):
        self.obs, self.next_obs = torch.zeros(size, 2), torch.zeros(size, 2)
        self.actions, self.rewards, self.size, self.filled = torch.zeros(size, 1), torch.zeros(size), size, 0

    def add(self, obs, next_obs, actions, rewards):
        rows = torch.arange(self.filled, self.filled + len(obs)) % self.size
        self.obs[rows], self.next_obs[rows], self.actions[rows], self.rewards[rows] = obs, next_obs, actions, rewards
        self.filled += len(obs)

    def sample(self, n):
        rows = torch.randint(min(self.filled, self.size), (n,))
        return self.obs[rows], self.next_obs[rows], self.actions[rows], self.rewards[rows]


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc_mu = nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 1)

    def forward(self, x):
        return torch.tanh(self.fc_mu(F.relu(self.fc2(F.relu(self.fc1(x))))))


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))).squeeze(-1)


def td3(t: Training) -> None:
    """Twin delayed deep deterministic policy gradient (Fujimoto et al., 2018)."""
    num_envs, total, learning_starts = 16, 270, 20
    gamma, tau, policy_noise, noise_clip, exploration_noise, policy_frequency = 0.95, 0.02, 0.2, 0.5, 0.2, 2
    t.model, qf1, qf2 = Actor(), QNetwork(), QNetwork()
    target_actor, qf1_target, qf2_target = copy.deepcopy(t.model), copy.deepcopy(qf1), copy.deepcopy(qf2)
    t.extra += [qf1, qf2]
    t.optimizers_of = lambda tr: [
        optim.Adam(tr.model.parameters(), lr=2e-3),
        optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=2e-3),
    ]

    def loop(tr):
        actor, (actor_optimizer, q_optimizer) = tr.model, tr.optimizers
        envs = PointMass(num_envs)
        obs, rb = envs.reset(), ReplayBuffer(num_envs * total)
        for global_step in range(total):
            if global_step < learning_starts:
                actions = 2 * torch.rand(num_envs, 1) - 1
            else:
                with torch.no_grad():
                    actions = actor(obs)
                    actions += exploration_noise * torch.randn_like(actions)
                    actions.clamp_(-1, 1)
            next_obs, rewards, truncated = envs.step(actions)
            rb.add(obs, next_obs, actions, rewards)  # cut off by time is no end: the value goes on
            obs = envs.reset() if truncated else next_obs
            if global_step < learning_starts:
                continue

            b_obs, b_next_obs, b_actions, b_rewards = rb.sample(128)
            with torch.no_grad():
                noise = (torch.randn_like(b_actions) * policy_noise).clamp(-noise_clip, noise_clip)
                next_actions = (target_actor(b_next_obs) + noise).clamp(-1, 1)
                min_q = torch.min(qf1_target(b_next_obs, next_actions), qf2_target(b_next_obs, next_actions))
                next_q_value = b_rewards + gamma * min_q
            qf_loss = F.mse_loss(qf1(b_obs, b_actions), next_q_value) + F.mse_loss(qf2(b_obs, b_actions), next_q_value)
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()

            if global_step % policy_frequency == 0:
                actor_loss = -qf1(b_obs, actor(b_obs)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                for net, target in ((actor, target_actor), (qf1, qf1_target), (qf2, qf2_target)):
                    for param, target_param in zip(net.parameters(), target.parameters()):
                        target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)
            yield qf_loss.detach()

    t.loop, t.loaded = loop, False


class Policies(nn.Module):
    """Log-odds of cooperation at the start and after CC, CD, DC, DD (own move first)."""

    def __init__(self, pairs):
        super().__init__()
        self.theta = nn.Parameter(torch.randn(pairs, 5))


REWARD_1 = torch.tensor([-1.0, -3.0, 0.0, -2.0])


REWARD_2 = torch.tensor([-1.0, 0.0, -3.0, -2.0])


def ipd_losses(theta_1, theta_2, gamma=0.96):
    """Minus the discounted return of each player, for each pair."""
    p1 = torch.sigmoid(theta_1)
    p2 = torch.sigmoid(theta_2)[:, [0, 1, 3, 2, 4]]
    joint = torch.stack([p1 * p2, p1 * (1 - p2), (1 - p1) * p2, (1 - p1) * (1 - p2)], dim=-1)
    start, transition = joint[:, 0], joint[:, 1:]
    visits = torch.linalg.solve((torch.eye(4) - gamma * transition).transpose(1, 2), start)
    return -visits @ REWARD_1, -visits @ REWARD_2


def opponent_shaping(t: Training) -> None:
    """LOLA (Foerster et al., 2018) with exact values: the iterated prisoner's dilemma, many pairs at once."""
    gamma, lr_in, lr_out, rounds, pairs = 0.96, 0.5, 0.1, 100, 32
    t.model = Policies(pairs)
    t.extra.append(Policies(pairs))
    t.optimizers_of = lambda training: [Adam(player.parameters(), lr=lr_out) for player in training.modules]

    def lola(training):
        one, two = (player.theta for player in training.modules)
        for _ in range(rounds):
            loss_1, loss_2 = ipd_losses(one, two, gamma)
            # where the other goes next depends on what I do now
            (step_2,) = torch.autograd.grad(loss_2.sum(), two, create_graph=True)
            (step_1,) = torch.autograd.grad(loss_1.sum(), one, create_graph=True)
            ahead_1, _ = ipd_losses(one, two - lr_in * step_2, gamma)
            _, ahead_2 = ipd_losses(one - lr_in * step_1, two, gamma)
            (one.grad,) = torch.autograd.grad(ahead_1.sum(), one, retain_graph=True)
            (two.grad,) = torch.autograd.grad(ahead_2.sum(), two)
            for optimizer in training.optimizers:
                optimizer.step()
            yield (1 - gamma) * (loss_1 + loss_2).mean().detach() / 2

    t.loop, t.loaded = lola, False


class OptimisticAdam(Optimizer):
    """Adam that takes two of this step's updates and takes one of the last step's back (Daskalakis et al., 2018)."""

    def __init__(self, params, lr, betas=(0.5, 0.9), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p), last=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - beta1)
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["step"])
                square = state["square"] / (1 - beta2 ** state["step"])
                move = mean / (square.sqrt() + group["eps"])
                p.sub_(group["lr"] * (2 * move - state["last"]))
                state["last"] = move


def optimistic_instruments(t: Training) -> None:
    """Adversarial GMM (Dikkala et al., 2020): the effect of x on y, confounded, from the instrument z."""
    n = 4096
    z, e = torch.rand(n, 1) * 6 - 3, torch.randn(n, 1)
    x = 0.8 * z + 0.8 * e + 0.1 * torch.randn(n, 1)
    y = x.abs() + 0.8 * e + 0.1 * torch.randn(n, 1)
    t.data = TensorDataset(z, x, y)
    t.model = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    critic = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    t.extra.append(critic)
    t.batch_size, t.epochs = 256, 15
    t.optimizers_of = lambda training: [
        OptimisticAdam(training.model.parameters(), lr=1e-3),
        OptimisticAdam(critic.parameters(), lr=3e-3),
    ]

    def update(training, batch):
        z, x, y = batch
        learner_opt, critic_opt = training.optimizers
        h, f = training.model(x), critic(z)
        value = 2 * ((y - h) * f).mean() - f.pow(2).mean()  # = E[E[y - h | z]^2] at the best f
        learner_opt.zero_grad()
        critic_opt.zero_grad()
        value.backward()
        for p in critic.parameters():  # one pass serves both; the critic goes up
            p.grad.neg_()
        learner_opt.step()
        critic_opt.step()
        return F.mse_loss(h.detach(), x.abs())  # known in this simulation

    t.update = update


def _net(dim, hidden):
    return nn.Sequential(
        nn.Linear(2 * dim, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, dim),
        nn.Sigmoid(),
    )


def imputation_game(t: Training) -> None:
    """Missing data: GAIN (Yoon, Jordon & van der Schaar, 2018)."""
    n, dim, missing, hint_rate, alpha = 1024, 12, 0.2, 0.9, 100.0
    truth = torch.randn(n, 3) @ torch.randn(3, dim) + 0.2 * torch.randn(n, dim)
    mask = (torch.rand(n, dim) > missing).float()
    # scaled to [0, 1] by what is observed
    low = truth.masked_fill(mask == 0, math.inf).amin(0)
    high = truth.masked_fill(mask == 0, -math.inf).amax(0)
    truth = (truth - low) / (high - low)
    t.data, t.batch_size, t.epochs = TensorDataset(truth * mask, mask), 128, 25
    generator, discriminator = _net(dim, 32), _net(dim, 32)
    t.model = generator
    t.extra.append(discriminator)
    t.optimizers_of = lambda training: [
        Adam(generator.parameters(), lr=3e-3),
        Adam(discriminator.parameters(), lr=1e-3),
    ]

    def fill(x, m):
        z = 0.01 * torch.rand_like(x)
        return generator(torch.cat([m * x + (1 - m) * z, m], dim=1))

    def update(training, batch):
        opt_g, opt_d = training.optimizers
        x, m = batch
        b = (torch.rand_like(m) < hint_rate).float()
        hint = b * m + 0.5 * (1 - b)

        g_sample = fill(x, m)
        x_hat = m * x + (1 - m) * g_sample
        d_prob = discriminator(torch.cat([x_hat.detach(), hint], dim=1))
        d_loss = F.binary_cross_entropy(d_prob, m)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        d_prob = discriminator(torch.cat([x_hat, hint], dim=1))
        adversarial = -((1 - m) * torch.log(d_prob + 1e-8)).mean()
        reconstruction = (m * (x - g_sample)).square().mean() / m.mean()
        opt_g.zero_grad()
        (adversarial + alpha * reconstruction).backward()
        opt_g.step()
        return reconstruction.detach()

    @torch.no_grad()
    def rmse(training, epoch):
        x, m = training.data.tensors
        error = ((1 - m) * (fill(x, m) - truth)).square().sum() / (1 - m).sum()
        t.history.append(error.sqrt().item())

    t.history = []
    t.update = update
    t.each_epoch.append(rmse)
