"""After vwxyzjn/cleanrl, ``dqn.py``: epsilon greedy, replay buffer, target network, TensorBoard, the model saved."""

import random
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.tensorboard import SummaryWriter

from zoo.public import Result
from zoo.public.gym import CartPole, SyncVectorEnv


@dataclass
class Args:
    exp_name: str = "dqn"
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 9000
    learning_rate: float = 1e-3
    num_envs: int = 1
    buffer_size: int = 5000
    gamma: float = 0.99
    tau: float = 1.0
    target_network_frequency: int = 200
    batch_size: int = 64
    start_e: float = 1
    end_e: float = 0.05
    exploration_fraction: float = 0.4
    learning_starts: int = 500
    train_frequency: int = 5


def make_env():
    return CartPole()


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(int(np.array(env.single_observation_space.shape).prod()), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, env.single_action_space.n),
        )

    def forward(self, x):
        return self.network(x)


class ReplayBuffer:
    def __init__(self, buffer_size, obs_shape, device):
        self.observations = np.zeros((buffer_size, *obs_shape), dtype=np.float32)
        self.next_observations = np.zeros((buffer_size, *obs_shape), dtype=np.float32)
        self.actions = np.zeros((buffer_size, 1), dtype=np.int64)
        self.rewards = np.zeros((buffer_size, 1), dtype=np.float32)
        self.dones = np.zeros((buffer_size, 1), dtype=np.float32)
        self.buffer_size, self.device, self.pos, self.full = buffer_size, device, 0, False

    def add(self, obs, next_obs, action, reward, done):
        self.observations[self.pos], self.next_observations[self.pos] = obs[0], next_obs[0]
        self.actions[self.pos], self.rewards[self.pos], self.dones[self.pos] = action[0], reward[0], done[0]
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def sample(self, batch_size):
        inds = np.random.randint(0, self.buffer_size if self.full else self.pos, size=batch_size)
        parts = (self.observations, self.next_observations, self.actions, self.rewards, self.dones)
        return tuple(torch.as_tensor(part[inds], device=self.device) for part in parts)


def linear_schedule(start_e, end_e, duration, t):
    slope = (end_e - start_e) / duration
    return max(slope * t + start_e, end_e)


def evaluate(model_path, make_env, eval_episodes, device, epsilon=0.05):
    envs = SyncVectorEnv([make_env])
    model = QNetwork(envs).to(device)
    model.load_state_dict(torch.load(model_path, map_location=device))
    model.eval()
    obs, _ = envs.reset(seed=1000)
    episodic_returns = []
    while len(episodic_returns) < eval_episodes:
        if random.random() < epsilon:
            actions = np.array([envs.single_action_space.sample()])
        else:
            actions = torch.argmax(model(torch.Tensor(obs).to(device)), dim=1).cpu().numpy()
        obs, _, _, _, infos = envs.step(actions)
        for info in infos.get("final_info", []):
            if info and "episode" in info:
                print(f"eval_episode={len(episodic_returns)}, episodic_return={info['episode']['r']}")
                episodic_returns.append(info["episode"]["r"])
    return episodic_returns


def main(watch, seed, folder):
    args = Args(seed=1 + seed)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}"
    writer = SummaryWriter(str(folder / "runs" / run_name))
    table = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    envs = SyncVectorEnv([make_env for _ in range(args.num_envs)])
    q_network = QNetwork(envs).to(device)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(args.buffer_size, envs.single_observation_space.shape, device)
    start_time = time.time()
    history = []

    obs, _ = envs.reset(seed=args.seed)
    with watch(q_network, optimizer):
        for global_step in range(args.total_timesteps):
            epsilon = linear_schedule(
                args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
            )
            if random.random() < epsilon:
                actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
            else:
                q_values = q_network(torch.Tensor(obs).to(device))
                actions = torch.argmax(q_values, dim=1).cpu().numpy()

            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            if "final_info" in infos:
                for info in infos["final_info"]:
                    if info and "episode" in info:
                        print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                        writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
                        writer.add_scalar("charts/episodic_length", info["episode"]["l"], global_step)

            real_next_obs = next_obs.copy()
            for idx, trunc in enumerate(truncations):
                if trunc:
                    real_next_obs[idx] = infos["final_observation"][idx]
            rb.add(obs, real_next_obs, actions, rewards, terminations)
            obs = next_obs

            if global_step > args.learning_starts:
                if global_step % args.train_frequency == 0:
                    observations, next_observations, acts, rews, dones = rb.sample(args.batch_size)
                    with torch.no_grad():
                        target_max, _ = target_network(next_observations).max(dim=1)
                        td_target = rews.flatten() + args.gamma * target_max * (1 - dones.flatten())
                    old_val = q_network(observations).gather(1, acts).squeeze()
                    loss = F.mse_loss(td_target, old_val)
                    history.append(loss.item())
                    if global_step % 100 == 0:
                        writer.add_scalar("losses/td_loss", loss, global_step)
                        writer.add_scalar("losses/q_values", old_val.mean().item(), global_step)
                        print("SPS:", int(global_step / (time.time() - start_time)))
                        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)

                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

                if global_step % args.target_network_frequency == 0:
                    for target_param, q_param in zip(target_network.parameters(), q_network.parameters()):
                        target_param.data.copy_(args.tau * q_param.data + (1.0 - args.tau) * target_param.data)

    model_path = str(folder / "runs" / run_name / f"{args.exp_name}.cleanrl_model")
    torch.save(q_network.state_dict(), model_path)
    print(f"model saved to {model_path}")
    episodic_returns = evaluate(model_path, make_env, eval_episodes=5, device=device)
    for idx, episodic_return in enumerate(episodic_returns):
        writer.add_scalar("eval/episodic_return", episodic_return, idx)
    envs.close()
    writer.close()
    objects = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    return Result("mean return of five episodes", float(np.mean(episodic_returns)), 80, history, objects)
