"""After pytorch/examples, ``reinforcement_learning/reinforce.py``: one update for each episode."""

import argparse
import itertools

import torch
from torch import nn, optim
from torch.distributions import Categorical

from zoo.public import Result
from zoo.public.gym import CartPole


class Policy(nn.Module):
    """Keeps what an episode leaves behind in lists of its own."""

    def __init__(self, hidden=128, drop=0.6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Dropout(drop), nn.ReLU())
        self.scores = nn.Linear(hidden, 2)
        self.log_probs, self.rewards = [], []

    def forward(self, state):
        return self.scores(self.body(state)).softmax(dim=1)

    def act(self, state):
        choice = Categorical(self(torch.as_tensor(state)[None]))
        action = choice.sample()
        self.log_probs.append(choice.log_prob(action))
        return action.item()

    def forget(self):
        self.log_probs.clear()
        self.rewards.clear()


def discounted(rewards, gamma):
    """The return of each step, in units of their standard deviation."""
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        found.insert(0, total)
    found = torch.tensor(found)
    return (found - found.mean()) / (found.std() + torch.finfo(torch.float32).eps)


def play(policy, env, longest=10_000):
    state, _ = env.reset()
    for _ in range(longest):
        state, reward, fell, too_long, _ = env.step(policy.act(state))
        policy.rewards.append(reward)
        if fell or too_long:
            break
    return sum(policy.rewards)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="REINFORCE on CartPole")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=543)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--threshold", type=float, default=130)
    args = parser.parse_args(["--seed", str(543 + seed)])
    env = CartPole()
    env.reset(seed=args.seed)
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)

    average, history = 10.0, []
    with watch(policy, optimizer):
        for episode in itertools.count(1):
            reached = play(policy, env)
            average += 0.05 * (reached - average)
            returns = discounted(policy.rewards, args.gamma)
            loss = torch.cat([-log_prob * value for log_prob, value in zip(policy.log_probs, returns)]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            policy.forget()
            history.append(loss.item())
            if episode % args.log_interval == 0:
                print(f"Episode {episode}\tLast reward: {reached:.2f}\tAverage reward: {average:.2f}")
            if average > args.threshold:
                print(f"Solved, with an average of {average:.1f} and {reached:.0f} steps in the last episode")
                break
            if episode == 400:
                break
    torch.save(policy.state_dict(), folder / "policy.pt")
    return Result("running reward", average, 60, history, {"policy": policy, "optimizer": optimizer})
