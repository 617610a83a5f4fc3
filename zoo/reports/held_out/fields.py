"""Faults of adversarial training and of reinforcement learning."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


def network(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


@fault(
    "generator_gradients_in_discriminator",
    "the discriminator is updated with what the generator's step left in its gradients, too",
    sources=["Lightning-AI/pytorch-lightning#557", "Adversarial-Deep-Learning/code-soup#69"],
    stage="gradient",
    diagnosis=[
        r"zero grad & (miss|without|not|never|before|late|add|accumul|left)",
        r"gradients? & (left|leftover|stale|accumulat\w*|add(ed)? up|mixed|other (loss|optimi[sz]er)|generator)",
        r"discriminator & gradient & (generator|not (zeroed|cleared|emptied)|accumulat)",
    ],
    where=[
        Place(line=r"d_loss\.backward|d_optimizer\.(step|zero_grad)|\(-g_logits|g_loss\.backward"),
        Place(module="discriminator"),
    ],
)
def generator_gradients_in_discriminator(watch: Watch, seed: int, faulty: bool) -> Outcome:
    angle = torch.rand(12800) * 2 * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(12800, 2)
    loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True)
    generator, discriminator = network(4, 2), network(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    losses, kept, radii = [], [], []
    with watch(nn.ModuleList([generator, discriminator]), [g_optimizer, d_optimizer], loader=loader):
        for _epoch in range(2):
            for (real,) in loader:
                fake = generator(torch.randn(len(real), 4))
                radii.append(fake.detach().norm(dim=1).mean().item())
                verdict = discriminator(fake)
                g_loss = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
                g_loss.backward()
                g_optimizer.step()
                g_optimizer.zero_grad()

                if not faulty:
                    d_optimizer.zero_grad()
                kept.append(any(p.grad is not None and bool(p.grad.any()) for p in discriminator.parameters()))
                on_real, on_fake = discriminator(real), discriminator(fake.detach())
                d_loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
                d_loss = d_loss + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
                d_loss.backward()
                d_optimizer.step()
                d_optimizer.zero_grad()
                losses.append(d_loss.item())
    radius = mean(radii[-50:])
    return Outcome(
        losses,
        all(kept),
        {"steps_with_foreign_gradients": sum(kept), "radius_of_samples": radius},
        learned=0.6 < radius < 1.4,
    )


class Balance:
    """Keep a cart near 0 for 60 steps: it drifts, and action 1 pushes it to the right, action 0 to the left."""

    def reset(self) -> Tensor:
        self.place, self.speed, self.steps = random.uniform(-0.5, 0.5), 0.0, 0
        return self.observation()

    def observation(self) -> Tensor:
        return torch.tensor([self.place, self.speed])

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.steps += 1
        self.speed += (0.1 if action == 1 else -0.1) + random.gauss(0, 0.02)
        self.place += self.speed
        lost = abs(self.place) > 1
        return self.observation(), -1.0 if lost else 0.1, lost or self.steps == 60


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 2))
        self.critic = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 1))

    def log_prob(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the actions, and the entropy of the policy."""
        logp = self.actor(states).log_softmax(-1)
        return logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)

    @torch.no_grad()
    def act(self, state: Tensor) -> int:
        gumbel = -torch.empty(2).exponential_().log()
        return int((self.actor(state) + gumbel).argmax())


def rollout(env: Balance, policy: ActorCritic, horizon: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """States, actions, discounted returns, and the mean reward of a step."""
    states, actions, rewards, dones = [], [], [], []
    state = env.reset()
    for _step in range(horizon):
        action = policy.act(state)
        states.append(state)
        actions.append(action)
        state, reward, done = env.step(action)
        rewards.append(reward)
        dones.append(done)
        if done:
            state = env.reset()
    returns, following = [0.0] * horizon, 0.0
    for step in reversed(range(horizon)):
        following = rewards[step] + 0.95 * following * (1 - dones[step])
        returns[step] = following
    return torch.stack(states), torch.tensor(actions), torch.tensor(returns), mean(rewards)


@fault(
    "advantage_of_one_sample",
    "the last minibatch of a rollout has one sample, and the standard deviation of its advantage is NaN",
    sources=["DLR-RM/stable-baselines3#325", "jolibrain/wheatley#93"],
    stage="gradient",
    diagnosis=[
        r"\b(std|standard deviation|deviation|variance)\b & (one|single|\b1\b|nan|undefined|size|freedom|unbiased)",
        r"advantage & (nan|not finite|non finite|one sample|single)",
        r"(batch|minibatch) & (of|size|with|has) (one|1|a single)",
    ],
    where=[Place(op="std"), Place(line=r"\.std\(\)")],
    onset=2,
)
def advantage_of_one_sample(watch: Watch, seed: int, faulty: bool) -> Outcome:
    random.seed(seed)
    env, policy = Balance(), ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    n_steps, batch_size, n_epochs = 129, 64, 4
    losses, rewards = [], []
    with watch(policy, optimizer):
        for _update in range(40):
            states, actions, returns, reward = rollout(env, policy, n_steps)
            rewards.append(reward)
            with torch.no_grad():
                old_log_prob = policy.log_prob(states, actions)[0]
                values = policy.critic(states).squeeze(-1)
            for _epoch in range(n_epochs):
                for index in torch.randperm(n_steps).split(batch_size):
                    advantages = (returns - values)[index]
                    if faulty or len(advantages) > 1:
                        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                    log_prob, entropy = policy.log_prob(states[index], actions[index])
                    ratio = torch.exp(log_prob - old_log_prob[index])
                    clipped = advantages * torch.clamp(ratio, 0.8, 1.2)
                    policy_loss = -torch.min(advantages * ratio, clipped).mean()
                    value_loss = F.mse_loss(policy.critic(states[index]).squeeze(-1), returns[index])
                    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                    optimizer.step()
                    losses.append(loss.item())
    lost = any(not parameter.isfinite().all() for parameter in policy.parameters())
    return Outcome(
        losses,
        lost,
        {"weights_not_finite": lost, "rewards": [mean(rewards[:4]), mean(rewards[-4:])]},
        learned=mean(rewards[-4:]) > mean(rewards[:4]) + 0.02,
    )


@fault(
    "ppo_ratio_always_one",
    "PPO recomputes the old log-probabilities with the current policy, so the ratio is always 1 and never clipped",
    sources=["tensorforce/tensorforce#312", "AI4Finance-Foundation/ElegantRL#243"],
    stage="loop",
    diagnosis=[
        r"ratio & (\b1\b|one|constant|always|same|never)",
        r"(old|behaviou?r|reference)\b & (policy|log ?prob)\w* & (recomput|current|same|updated|itself|equal)",
        r"clip & (never|no effect|inactive|not active)",
        r"(difference|term|log ratio|input)\w* & (always|exactly|identically) (0|zero)",
    ],
    where=[Place(line=r"ratio = |old_logprob = "), Place(op="exp|clamp|sub|min")],
    shows=4,
)
def ppo_ratio_always_one(watch: Watch, seed: int, faulty: bool) -> Outcome:
    random.seed(seed)
    env, act = Balance(), ActorCritic()
    optimizer = torch.optim.Adam(act.parameters(), lr=2e-3)
    losses, rewards, away = [], [], []
    with watch(act, optimizer):
        for _update in range(36):
            states, actions, returns, reward = rollout(env, act, 192)
            rewards.append(reward)
            with torch.no_grad():
                stored_logprob = act.log_prob(states, actions)[0]
                advantages = returns - act.critic(states).squeeze(-1)
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
            for _epoch in range(6):
                for index in torch.randperm(192).split(64):
                    state, action = states[index], actions[index]
                    with torch.no_grad():
                        old_logprob = act.log_prob(state, action)[0] if faulty else stored_logprob[index]
                    new_logprob, obj_entropy = act.log_prob(state, action)
                    ratio = (new_logprob - old_logprob).exp()
                    surrogate1 = advantages[index] * ratio
                    surrogate2 = advantages[index] * ratio.clamp(0.75, 1.25)
                    obj_critic = F.smooth_l1_loss(act.critic(state).squeeze(-1), returns[index])
                    loss = obj_critic - torch.min(surrogate1, surrogate2).mean() - 0.02 * obj_entropy.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    away.append((ratio.detach() - 1).abs().max().item())
    return Outcome(
        losses,
        max(away) < 1e-5,
        {"largest_distance_of_the_ratio_from_1": max(away), "rewards": [mean(rewards[:4]), mean(rewards[-4:])]},
        learned=mean(rewards[-4:]) > mean(rewards[:4]) + 0.02,
    )


@fault(
    "target_network_copies_itself",
    "the target network is loaded from its own state, so it keeps its first weights",
    sources=["thesouther/MARL#8"],
    stage="loop",
    diagnosis=[
        r"target & (never|not (updated|mov)|stale|frozen|initial|constant|unchanged|still|stays|own state|itself)",
        r"load state dict & (own|itself|same|no effect)",
    ],
    where=[Place(line=r"load_state_dict|target_net"), Place(module="target")],
    onset=50,
)
def target_network_copies_itself(watch: Watch, seed: int, faulty: bool) -> Outcome:
    random.seed(seed)
    env = Balance()
    eval_net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net.load_state_dict(eval_net.state_dict())
    start = target_net[0].weight.detach().clone()
    optimizer = torch.optim.RMSprop(eval_net.parameters(), lr=1e-3)
    memory: deque[tuple[Tensor, int, float, Tensor, bool]] = deque(maxlen=1000)
    losses, rewards = [], []
    state = env.reset()
    with watch(eval_net, optimizer):
        for step in range(1400):
            with torch.no_grad():
                explores = random.random() < max(0.1, 1 - step / 600)
                action = random.randrange(2) if explores else int(eval_net(state).argmax())
            next_state, reward, done = env.step(action)
            rewards.append(reward)
            memory.append((state, action, reward, next_state, done))
            state = env.reset() if done else next_state
            if len(memory) < 100:
                continue
            states, actions, reward_batch, next_states, dones = zip(*random.sample(memory, 32), strict=True)
            q_evals = eval_net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            with torch.no_grad():
                q_targets = target_net(torch.stack(next_states)).max(1).values
            targets = torch.tensor(reward_batch) + 0.9 * q_targets * (1 - torch.tensor(dones).float())
            loss = F.mse_loss(q_evals, targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(eval_net.parameters(), 10)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 50 == 0:
                target_net.load_state_dict((target_net if faulty else eval_net).state_dict())
    moved = (target_net[0].weight - start).abs().max().item()
    late = mean(rewards[-200:])
    return Outcome(
        losses, moved == 0, {"target_moved": moved, "late_reward": late}, learned=fell(losses) or late > 0.05
    )
