"""After DLR-RM/stable-baselines3: PPO as classes, with buffer, policy, logger, Monitor and an evaluation callback."""

import io
import json
import time
import zipfile
from collections import deque

import numpy as np
import torch as th
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from zoo.public import Result
from zoo.public.gym import CartPole, SyncVectorEnv


def safe_mean(arr):
    return np.nan if len(arr) == 0 else float(np.mean(arr))


def explained_variance(y_pred, y_true):
    var_y = np.var(y_true)
    return np.nan if var_y == 0 else float(1 - np.var(y_true - y_pred) / var_y)


class Logger:
    """Collects values by name and prints them as one table."""

    def __init__(self, folder):
        self.name_to_value = {}
        self.file = open(folder / "progress.json", "w")  # noqa: SIM115

    def record(self, key, value):
        self.name_to_value[key] = value

    def dump(self, step):
        width = max(map(len, self.name_to_value)) + 4
        print("-" * (width + 16))
        for key, value in sorted(self.name_to_value.items()):
            shown = f"{value:<10.3g}" if isinstance(value, float) else str(value)
            unit = " s" if key in ("time/time_elapsed", "time/fps") else ""
            print(f"| {key:<{width}}| {shown}{unit}")
        print("-" * (width + 16))
        kept = {k: float(v) for k, v in self.name_to_value.items() if not k.startswith("time/")}
        self.file.write(json.dumps({"step": step, **kept}) + "\n")
        self.file.flush()
        self.name_to_value.clear()

    def close(self):
        self.file.close()


class RolloutBuffer:
    def __init__(self, buffer_size, obs_shape, n_envs, gamma, gae_lambda):
        self.buffer_size, self.obs_shape, self.n_envs = buffer_size, obs_shape, n_envs
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.reset()

    def reset(self):
        shape = (self.buffer_size, self.n_envs)
        self.observations = np.zeros((*shape, *self.obs_shape), dtype=np.float32)
        for name in ("actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages"):
            setattr(self, name, np.zeros(shape, dtype=np.float32))
        self.pos, self.generator_ready = 0, False

    def add(self, obs, action, reward, episode_start, value, log_prob):
        self.observations[self.pos] = obs
        self.actions[self.pos] = action
        self.rewards[self.pos] = reward
        self.episode_starts[self.pos] = episode_start
        self.values[self.pos] = value.clone().cpu().numpy().flatten()
        self.log_probs[self.pos] = log_prob.clone().cpu().numpy()
        self.pos += 1

    def compute_returns_and_advantage(self, last_values, dones):
        last_values = last_values.clone().cpu().numpy().flatten()
        last_gae_lam = 0
        for step in reversed(range(self.buffer_size)):
            last = step == self.buffer_size - 1
            next_non_terminal = 1.0 - (dones.astype(np.float32) if last else self.episode_starts[step + 1])
            next_values = last_values if last else self.values[step + 1]
            delta = self.rewards[step] + self.gamma * next_values * next_non_terminal - self.values[step]
            last_gae_lam = delta + self.gamma * self.gae_lambda * next_non_terminal * last_gae_lam
            self.advantages[step] = last_gae_lam
        self.returns = self.advantages + self.values

    def get(self, batch_size):
        n = self.buffer_size * self.n_envs
        indices = np.random.permutation(n)
        names = ("observations", "actions", "values", "log_probs", "advantages", "returns")
        flat = [getattr(self, name).swapaxes(0, 1).reshape(n, *getattr(self, name).shape[2:]) for name in names]
        for start in range(0, n, batch_size):
            yield [th.as_tensor(part[indices[start : start + batch_size]]) for part in flat]


class ActorCriticPolicy(nn.Module):
    def __init__(self, obs_dim, n_actions, lr, net_arch=(64, 64)):
        super().__init__()
        self.mlp_extractor = nn.ModuleDict({"policy_net": self._mlp(obs_dim, net_arch)})
        self.mlp_extractor["value_net"] = self._mlp(obs_dim, net_arch)
        self.action_net = nn.Linear(net_arch[-1], n_actions)
        self.value_net = nn.Linear(net_arch[-1], 1)
        gains = {self.mlp_extractor: np.sqrt(2), self.action_net: 0.01, self.value_net: 1}
        for module, gain in gains.items():
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain=gain)
                    layer.bias.data.fill_(0.0)
        self.optimizer = th.optim.Adam(self.parameters(), lr=lr, eps=1e-5)

    @staticmethod
    def _mlp(inputs, net_arch):
        layers = []
        for size in net_arch:
            layers += [nn.Linear(inputs, size), nn.Tanh()]
            inputs = size
        return nn.Sequential(*layers)

    def set_training_mode(self, mode):
        self.train(mode)

    def forward(self, obs, deterministic=False):
        latent_pi, latent_vf = self.mlp_extractor["policy_net"](obs), self.mlp_extractor["value_net"](obs)
        values = self.value_net(latent_vf)
        distribution = Categorical(logits=self.action_net(latent_pi))
        actions = distribution.probs.argmax(dim=1) if deterministic else distribution.sample()
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs, actions):
        latent_pi, latent_vf = self.mlp_extractor["policy_net"](obs), self.mlp_extractor["value_net"](obs)
        distribution = Categorical(logits=self.action_net(latent_pi))
        return self.value_net(latent_vf), distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs):
        return self.value_net(self.mlp_extractor["value_net"](obs))

    def predict(self, observation, deterministic=False):
        self.set_training_mode(False)
        with th.no_grad():
            distribution = Categorical(
                logits=self.action_net(self.mlp_extractor["policy_net"](th.as_tensor(observation)))
            )
            actions = distribution.probs.argmax(dim=1) if deterministic else distribution.sample()
        return actions.cpu().numpy()


def evaluate_policy(model, env, n_eval_episodes, deterministic=True):
    episode_rewards = []
    obs, _ = env.reset(seed=777)
    while len(episode_rewards) < n_eval_episodes:
        obs, _, _, _, infos = env.step(model.policy.predict(obs, deterministic))
        episode_rewards += [info["episode"]["r"] for info in infos.get("final_info", []) if info]
    return float(np.mean(episode_rewards)), float(np.std(episode_rewards))


class EvalCallback:
    def __init__(self, eval_env, eval_freq, n_eval_episodes, best_model_save_path):
        self.eval_env, self.eval_freq, self.n_eval_episodes = eval_env, eval_freq, n_eval_episodes
        self.best_model_save_path, self.best_mean_reward, self.n_calls = best_model_save_path, -np.inf, 0

    def on_step(self, model):
        self.n_calls += 1
        if self.n_calls % self.eval_freq == 0:
            mean_reward, std_reward = evaluate_policy(model, self.eval_env, self.n_eval_episodes)
            print(f"Eval num_timesteps={model.num_timesteps}, episode_reward={mean_reward:.2f} +/- {std_reward:.2f}")
            model.logger.record("eval/mean_reward", mean_reward)
            if mean_reward > self.best_mean_reward:
                print("New best mean reward!")
                model.save(self.best_model_save_path / "best_model")
                self.best_mean_reward = mean_reward
        return True


class PPO:
    def __init__(
        self, env, folder, learning_rate=2e-3, n_steps=128, batch_size=64, n_epochs=5, gamma=0.99, gae_lambda=0.95,
        clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, seed=None,
    ):  # fmt: skip
        self.env, self.n_envs, self.seed = env, env.num_envs, seed
        self.learning_rate, self.n_steps, self.batch_size, self.n_epochs = learning_rate, n_steps, batch_size, n_epochs
        self.clip_range = lambda progress_remaining: clip_range * progress_remaining
        self.ent_coef, self.vf_coef, self.max_grad_norm = ent_coef, vf_coef, max_grad_norm
        self.num_timesteps, self._n_updates, self._current_progress_remaining = 0, 0, 1.0
        np.random.seed(seed)
        th.manual_seed(seed)
        shape = env.single_observation_space.shape
        self.rollout_buffer = RolloutBuffer(n_steps, shape, self.n_envs, gamma, gae_lambda)
        self.policy = ActorCriticPolicy(shape[0], env.single_action_space.n, learning_rate)
        self.gamma = gamma
        self.ep_info_buffer = deque(maxlen=20)
        self.logger = Logger(folder)
        self.losses = []

    def collect_rollouts(self, env, callback, rollout_buffer, n_rollout_steps):
        self.policy.set_training_mode(False)
        n_steps = 0
        rollout_buffer.reset()
        while n_steps < n_rollout_steps:
            with th.no_grad():
                obs_tensor = th.as_tensor(self._last_obs)
                actions, values, log_probs = self.policy(obs_tensor)
            actions = actions.cpu().numpy()
            new_obs, rewards, terminations, truncations, infos = env.step(actions)
            dones = np.logical_or(terminations, truncations)
            self.num_timesteps += env.num_envs
            if callback.on_step(self) is False:
                return False
            self.ep_info_buffer.extend(info["episode"] for info in infos.get("final_info", []) if info)
            n_steps += 1
            # bootstrap with the value of the last observation where the time limit was reached
            for idx, truncated in enumerate(truncations):
                if truncated:
                    terminal_obs = th.as_tensor(infos["final_observation"][idx])[None]
                    with th.no_grad():
                        terminal_value = self.policy.predict_values(terminal_obs)[0]
                    rewards[idx] += self.gamma * terminal_value.item()
            rollout_buffer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)
            self._last_obs = new_obs
            self._last_episode_starts = dones
        with th.no_grad():
            values = self.policy.predict_values(th.as_tensor(new_obs))
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        return True

    def train(self):
        self.policy.set_training_mode(True)
        for param_group in self.policy.optimizer.param_groups:
            param_group["lr"] = self.learning_rate * self._current_progress_remaining
        clip_range = self.clip_range(self._current_progress_remaining)
        entropy_losses, pg_losses, value_losses, clip_fractions = [], [], [], []
        for _ in range(self.n_epochs):
            approx_kl_divs = []
            for observations, actions, _, old_log_prob, advantages, returns in self.rollout_buffer.get(self.batch_size):
                values, log_prob, entropy = self.policy.evaluate_actions(observations, actions.long().flatten())
                values = values.flatten()
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = th.exp(log_prob - old_log_prob)
                policy_loss_1 = advantages * ratio
                policy_loss_2 = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
                policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
                pg_losses.append(policy_loss.item())
                clip_fractions.append(th.mean((th.abs(ratio - 1) > clip_range).float()).item())
                value_loss = F.mse_loss(returns, values)
                value_losses.append(value_loss.item())
                entropy_loss = -th.mean(entropy)
                entropy_losses.append(entropy_loss.item())
                loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
                with th.no_grad():
                    log_ratio = log_prob - old_log_prob
                    approx_kl_divs.append(th.mean((th.exp(log_ratio) - 1) - log_ratio).cpu().numpy())
                self.losses.append(loss.item())

                self.policy.optimizer.zero_grad()
                loss.backward()
                th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
            self._n_updates += 1
        explained_var = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        self.logger.record("train/entropy_loss", float(np.mean(entropy_losses)))
        self.logger.record("train/policy_gradient_loss", float(np.mean(pg_losses)))
        self.logger.record("train/value_loss", float(np.mean(value_losses)))
        self.logger.record("train/approx_kl", float(np.mean(approx_kl_divs)))
        self.logger.record("train/clip_fraction", float(np.mean(clip_fractions)))
        self.logger.record("train/loss", loss.item())
        self.logger.record("train/explained_variance", explained_var)
        self.logger.record("train/n_updates", self._n_updates)
        self.logger.record("train/clip_range", clip_range)

    def learn(self, total_timesteps, callback, log_interval=1):
        iteration = 0
        self.start_time = time.time_ns()
        self._last_obs, _ = self.env.reset(seed=self.seed)
        self._last_episode_starts = np.ones(self.n_envs, dtype=bool)
        while self.num_timesteps < total_timesteps:
            if not self.collect_rollouts(self.env, callback, self.rollout_buffer, self.n_steps):
                break
            iteration += 1
            self._current_progress_remaining = 1.0 - float(self.num_timesteps) / float(total_timesteps)
            if iteration % log_interval == 0:
                elapsed = max((time.time_ns() - self.start_time) / 1e9, 1e-9)
                self.logger.record("time/iterations", iteration)
                self.logger.record("time/fps", int(self.num_timesteps / elapsed))
                self.logger.record("time/time_elapsed", int(elapsed))
                self.logger.record("time/total_timesteps", self.num_timesteps)
                self.logger.record("rollout/ep_rew_mean", safe_mean([ep["r"] for ep in self.ep_info_buffer]))
                self.logger.record("rollout/ep_len_mean", safe_mean([ep["l"] for ep in self.ep_info_buffer]))
                self.logger.dump(step=self.num_timesteps)
            self.train()
        return self

    def save(self, path):
        with zipfile.ZipFile(f"{path}.zip", "w") as archive:
            data = {"n_steps": self.n_steps, "num_timesteps": self.num_timesteps, "n_updates": self._n_updates}
            stamp = (1980, 1, 1, 0, 0, 0)
            archive.writestr(zipfile.ZipInfo("data", stamp), json.dumps(data))
            for name, part in (("policy", self.policy), ("policy.optimizer", self.policy.optimizer)):
                buffer = io.BytesIO()
                th.save(part.state_dict(), buffer)
                archive.writestr(zipfile.ZipInfo(f"{name}.pth", stamp), buffer.getvalue())

    def set_parameters(self, path):
        with zipfile.ZipFile(f"{path}.zip") as archive:
            self.policy.load_state_dict(th.load(io.BytesIO(archive.read("policy.pth"))))
            self.policy.optimizer.load_state_dict(th.load(io.BytesIO(archive.read("policy.optimizer.pth"))))


def main(watch, seed, folder):
    env = SyncVectorEnv([CartPole for _ in range(4)])
    eval_env = SyncVectorEnv([CartPole])
    model = PPO(env, folder, seed=seed)
    callback = EvalCallback(eval_env, eval_freq=1000, n_eval_episodes=2, best_model_save_path=folder)
    with watch(model.policy, model.policy.optimizer):
        model.learn(total_timesteps=16_384, callback=callback, log_interval=4)
    model.save(folder / "ppo_cartpole")
    objects = {"policy": model.policy, "optimizer": model.policy.optimizer}
    model.set_parameters(folder / "best_model")
    mean_reward, std_reward = evaluate_policy(model, eval_env, n_eval_episodes=4)
    print(f"mean_reward={mean_reward:.2f} +/- {std_reward:.2f}")
    model.logger.close()
    return Result("mean reward of the best model", mean_reward, 120, model.losses, objects)
