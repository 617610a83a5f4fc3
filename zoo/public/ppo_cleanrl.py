"""After vwxyzjn/cleanrl, ``ppo.py``: one file, rollouts of four environments, minibatches, TensorBoard."""

import random
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn, optim
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter

from zoo.public import Result
from zoo.public.gym import CartPole, SyncVectorEnv


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    exp_name: str = "ppo"
    seed: int = 1
    total_timesteps: int = 20480
    learning_rate: float = 2.5e-3
    num_envs: int = 4
    num_steps: int = 128
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


def layer_init(layer, std=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


def tanh_mlp(inputs, outputs, last_std):
    hidden = [layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std=last_std))


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        (inputs,) = envs.single_observation_space.shape
        self.critic = tanh_mlp(inputs, 1, last_std=1.0)
        self.actor = tanh_mlp(inputs, envs.single_action_space.n, last_std=0.01)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        policy = Categorical(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.get_value(x)


def gae(rewards, values, dones, last_value, last_done, gamma, lam):
    """Generalized advantage estimates, from the last step to the first."""
    advantages = torch.zeros_like(rewards)
    carried, following, alive = 0.0, last_value, 1.0 - last_done
    for t in range(len(rewards) - 1, -1, -1):
        surprise = rewards[t] + gamma * alive * following - values[t]
        carried = surprise + gamma * lam * alive * carried
        advantages[t] = carried
        following, alive = values[t], 1.0 - dones[t]
    return advantages


def main(watch, seed, folder):
    args = Args(seed=1 + seed)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    iterations = args.total_timesteps // batch_size
    writer = SummaryWriter(str(folder / "runs" / f"{args.env_id}__{args.exp_name}__{args.seed}"))
    rows = [f"|{key}|{value}|" for key, value in asdict(args).items()]
    writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *rows]))

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = SyncVectorEnv([CartPole] * args.num_envs)
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    grid = (args.num_steps, args.num_envs)
    obs = torch.zeros(*grid, *envs.single_observation_space.shape)
    actions, logprobs, rewards, dones, values = (torch.zeros(grid) for _ in range(5))
    episodic_returns, history = [], []
    global_step, started = 0, time.time()
    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)

    with watch(agent, optimizer):
        for iteration in range(iterations):
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = (1.0 - iteration / iterations) * args.learning_rate

            # the rollout
            for step in range(args.num_steps):
                global_step += args.num_envs
                obs[step], dones[step] = next_obs, next_done
                with torch.no_grad():
                    action, logprob, _, value = agent.get_action_and_value(next_obs)
                actions[step], logprobs[step], values[step] = action, logprob, value.flatten()
                seen, reward, fell, too_long, infos = envs.step(action.numpy())
                rewards[step] = torch.as_tensor(reward)
                next_obs = torch.as_tensor(seen)
                next_done = torch.as_tensor(fell | too_long).float()
                for info in filter(None, infos.get("final_info", [])):
                    episodic_returns.append(info["episode"]["r"])
                    print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                    writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
                    writer.add_scalar("charts/episodic_length", info["episode"]["l"], global_step)

            with torch.no_grad():
                bootstrap = agent.get_value(next_obs).flatten()
                advantages = gae(rewards, values, dones, bootstrap, next_done, args.gamma, args.gae_lambda)
                returns = advantages + values
            flat = {
                "obs": obs.flatten(0, 1),
                "action": actions.flatten().long(),
                "logprob": logprobs.flatten(),
                "advantage": advantages.flatten(),
                "return": returns.flatten(),
                "value": values.flatten(),
            }

            # the updates
            order, clipfracs = np.arange(batch_size), []
            for _ in range(args.update_epochs):
                np.random.shuffle(order)
                for chosen in np.split(order, range(minibatch_size, batch_size, minibatch_size)):
                    mb = {key: part[chosen] for key, part in flat.items()}
                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb["obs"], mb["action"])
                    logratio = newlogprob - mb["logprob"]
                    ratio = logratio.exp()
                    with torch.no_grad():
                        approx_kl = (ratio - 1 - logratio).mean()
                        clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean().item())

                    adv = (mb["advantage"] - mb["advantage"].mean()) / (mb["advantage"].std() + 1e-8)
                    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    pg_loss = torch.max(-adv * ratio, -adv * clipped_ratio).mean()

                    newvalue = newvalue.flatten()
                    v_error = (newvalue - mb["return"]) ** 2
                    if args.clip_vloss:
                        near = mb["value"] + (newvalue - mb["value"]).clamp(-args.clip_coef, args.clip_coef)
                        v_error = torch.max(v_error, (near - mb["return"]) ** 2)
                    v_loss = 0.5 * v_error.mean()

                    entropy_loss = entropy.mean()
                    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
                    history.append(loss.item())
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

            target = flat["return"].numpy()
            unexplained = np.var(target - flat["value"].numpy()) / np.var(target)
            sps = int(global_step / (time.time() - started))
            print("SPS:", sps)
            for tag, scalar in {
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "losses/value_loss": v_loss.item(),
                "losses/policy_loss": pg_loss.item(),
                "losses/entropy": entropy_loss.item(),
                "losses/approx_kl": approx_kl.item(),
                "losses/clipfrac": np.mean(clipfracs),
                "losses/explained_variance": 1 - unexplained,
                "charts/SPS": sps,
            }.items():
                writer.add_scalar(tag, scalar, global_step)

    envs.close()
    writer.close()
    objects = {"agent": agent, "optimizer": optimizer}
    value = float(np.mean(episodic_returns[-10:]))
    return Result("mean return of the last ten episodes", value, 90, history, objects)
