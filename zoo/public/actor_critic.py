"""After pytorch/examples, ``reinforcement_learning/actor_critic.py``: two heads, smooth L1 loss of the value."""

import argparse
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

from zoo.public import Result
from zoo.public.gym import CartPole


class Taken(NamedTuple):
    log_prob: torch.Tensor
    value: torch.Tensor


class ActorCritic(nn.Module):
    def __init__(self, hidden=128):
        super().__init__()
        self.shared = nn.Linear(4, hidden)
        self.actor, self.critic = nn.Linear(hidden, 2), nn.Linear(hidden, 1)
        self.taken, self.rewards = [], []

    def forward(self, state):
        features = self.shared(state).relu()
        return self.actor(features).softmax(-1), self.critic(features)


class Agent:
    def __init__(self, model, gamma, lr):
        self.model, self.gamma = model, gamma
        self.optimizer = optim.Adam(model.parameters(), lr=lr)

    def act(self, state):
        probabilities, value = self.model(torch.as_tensor(state))
        choice = Categorical(probabilities)
        action = choice.sample()
        self.model.taken.append(Taken(choice.log_prob(action), value))
        return action.item()

    def returns(self):
        total, found = 0.0, []
        for reward in reversed(self.model.rewards):
            total = reward + self.gamma * total
            found.append(total)
        found = torch.tensor(found[::-1])
        return (found - found.mean()) / (found.std() + torch.finfo(torch.float32).eps)

    def learn(self):
        actor_terms, critic_terms = [], []
        for target, step in zip(self.returns(), self.model.taken):
            surprise = target - step.value.item()
            actor_terms.append(-step.log_prob * surprise)
            critic_terms.append(F.smooth_l1_loss(step.value, target.reshape(1)))
        loss = torch.stack(actor_terms).sum() + torch.stack(critic_terms).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.taken.clear()
        self.model.rewards.clear()
        return loss.item()


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="Actor-critic on CartPole")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=543)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args(["--seed", str(543 + seed)])
    env = CartPole()
    env.reset(seed=args.seed)
    torch.manual_seed(args.seed)
    agent = Agent(ActorCritic(), args.gamma, lr=1e-2)

    average, history = 10.0, []
    with watch(agent.model, agent.optimizer):
        for episode in itertools.count(1):
            state, _ = env.reset()
            over = False
            while not over:
                state, reward, fell, too_long, _ = env.step(agent.act(state))
                agent.model.rewards.append(reward)
                over = fell or too_long
            reached = sum(agent.model.rewards)
            average = 0.95 * average + 0.05 * reached
            history.append(agent.learn())
            if episode % args.log_interval == 0:
                print(f"Episode {episode}\tLast reward: {reached:.2f}\tAverage reward: {average:.2f}")
            if average > 90 or episode == 300:
                print(f"Stopped at an average of {average:.1f} after {episode} episodes")
                break
    torch.save(agent.model.state_dict(), folder / "actor_critic.pt")
    objects = {"model": agent.model, "optimizer": agent.optimizer}
    return Result("running reward", average, 50, history, objects)
