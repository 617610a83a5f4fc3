"""After vwxyzjn/cleanrl, ``dqn.py``: epsilon greedy, replay buffer, target network, TensorBoard, the model saved."""

import random
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.tensorboard import SummaryWriter

from zoo.public import Result
from zoo.public.gym import CartPole, SyncVectorEnv


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    exp_name: str = "dqn"
    seed: int = 1
    total_timesteps: int = 9000
    learning_rate: float = 1e-3
    buffer_size: int = 5000
    gamma: float = 0.99
    tau: float = 1.0
    target_network_frequency: int = 200
    batch_size: int = 64
    start_e: float = 1.0
    end_e: float = 0.05
    exploration_fraction: float = 0.4
    learning_starts: int = 500
    train_frequency: int = 5


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        widths = [*env.single_observation_space.shape, 120, 84]
        layers = [each for a, b in zip(widths, widths[1:]) for each in (nn.Linear(a, b), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], env.single_action_space.n))

    def forward(self, x):
        return self.network(x)


class ReplayBuffer:
    def __init__(self, size, obs_shape):
        self.parts = {
            "obs": np.zeros((size, *obs_shape), np.float32),
            "next_obs": np.zeros((size, *obs_shape), np.float32),
            "action": np.zeros((size, 1), np.int64),
            "reward": np.zeros(size, np.float32),
            "done": np.zeros(size, np.float32),
        }
        self.size, self.added = size, 0

    def add(self, **transition):
        for name, value in transition.items():
            self.parts[name][self.added % self.size] = value
        self.added += 1

    def sample(self, n):
        rows = np.random.randint(0, min(self.added, self.size), size=n)
        return {name: torch.as_tensor(part[rows]) for name, part in self.parts.items()}


def epsilon_at(args, step):
    done = step / (args.exploration_fraction * args.total_timesteps)
    return max(args.start_e + done * (args.end_e - args.start_e), args.end_e)


def choose(q_network, envs, obs, epsilon):
    if random.random() < epsilon:
        return np.array([envs.single_action_space.sample()])
    return q_network(torch.as_tensor(obs)).argmax(dim=1).numpy()


def evaluate(model_path, episodes, epsilon=0.05):
    envs = SyncVectorEnv([CartPole])
    model = QNetwork(envs)
    model.load_state_dict(torch.load(model_path))
    model.eval()
    obs, _ = envs.reset(seed=1000)
    found = []
    while len(found) < episodes:
        obs, _, _, _, infos = envs.step(choose(model, envs, obs, epsilon))
        for info in filter(None, infos.get("final_info", [])):
            print(f"eval_episode={len(found)}, episodic_return={info['episode']['r']}")
            found.append(info["episode"]["r"])
    return found


def main(watch, seed, folder):
    args = Args(seed=1 + seed)
    place = folder / "runs" / f"{args.env_id}__{args.exp_name}__{args.seed}"
    writer = SummaryWriter(str(place))
    rows = [f"|{key}|{value}|" for key, value in asdict(args).items()]
    writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *rows]))

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = SyncVectorEnv([CartPole])
    q_network, target_network = QNetwork(envs), QNetwork(envs)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    rb = ReplayBuffer(args.buffer_size, envs.single_observation_space.shape)
    history, started = [], time.time()

    obs, _ = envs.reset(seed=args.seed)
    with watch(q_network, optimizer):
        for global_step in range(args.total_timesteps):
            actions = choose(q_network, envs, obs, epsilon_at(args, global_step))
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            for info in filter(None, infos.get("final_info", [])):
                print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
            last = infos["final_observation"][0] if truncations[0] else next_obs[0]
            rb.add(obs=obs[0], next_obs=last, action=actions, reward=rewards[0], done=terminations[0])
            obs = next_obs
            if global_step <= args.learning_starts:
                continue

            if global_step % args.train_frequency == 0:
                data = rb.sample(args.batch_size)
                with torch.no_grad():
                    best = target_network(data["next_obs"]).amax(dim=1)
                    td_target = data["reward"] + args.gamma * (1 - data["done"]) * best
                old_val = q_network(data["obs"]).gather(1, data["action"]).squeeze(1)
                loss = F.mse_loss(td_target, old_val)
                history.append(loss.item())
                if global_step % 100 == 0:
                    sps = int(global_step / (time.time() - started))
                    print("SPS:", sps)
                    writer.add_scalar("losses/td_loss", loss, global_step)
                    writer.add_scalar("losses/q_values", old_val.mean().item(), global_step)
                    writer.add_scalar("charts/SPS", sps, global_step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            if global_step % args.target_network_frequency == 0:
                for old, new in zip(target_network.parameters(), q_network.parameters()):
                    old.data.copy_(args.tau * new.data + (1.0 - args.tau) * old.data)

    model_path = place / f"{args.exp_name}.cleanrl_model"
    torch.save(q_network.state_dict(), model_path)
    print(f"model saved to {model_path}")
    found = evaluate(model_path, episodes=5)
    for i, episodic_return in enumerate(found):
        writer.add_scalar("eval/episodic_return", episodic_return, i)
    envs.close()
    writer.close()
    objects = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    return Result("mean return of five episodes", float(np.mean(found)), 80, history, objects)
