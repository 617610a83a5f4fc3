"""Policy gradients in environments of gymnasium: REINFORCE as a loss, PPO as a step.

The data are seeds of episodes. Each episode follows from its seed, the weights, and torch's random generator, which
draws the actions. A resumed run and a replayed step therefore play the same episodes.

Shapes: B episodes, T steps of the longest episode, F numbers of an observation, A actions, N all steps played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Batch, Loss
from trainwright.errors import UsageError, import_optional

MIN_ADVANTAGE_STD = 1e-6
"""Advantages with a smaller standard deviation are divided by this instead."""
VALUE_LOSS_WEIGHT = 0.5
"""Weight of the mean squared error of the value in PPO's loss."""


class Trajectories(NamedTuple):
    """Episodes, padded to the longest one with zeros."""

    observations: Tensor
    """(T, B, F), each from before the action."""
    actions: Tensor
    """(T, B)."""
    rewards: Tensor
    """(T, B)."""
    mask: Tensor
    """(T, B): 1 for steps that were played, 0 for padding."""
    last_observations: Tensor
    """(B, F), from after the last action."""
    truncated: Tensor
    """(B,): 1 for an episode that its time limit ended, after which more reward would have followed."""

    @property
    def returns(self) -> Tensor:
        """The sum of the rewards of each episode, (B,)."""
        return self.rewards.sum(0)


class EpisodePlayer:
    """Plays episodes of one environment with discrete actions, several side by side.

    Args:
        env: Id of an environment of gymnasium, such as ``CartPole-v1``.

    Raises:
        MissingExtra: gymnasium is not installed.
        UsageError: There is no such environment, or its actions are not discrete.
    """

    def __init__(self, env: str) -> None:
        gymnasium = import_optional("gymnasium", needed_for="episodes")
        self.env = env
        self._make: Callable[[], Any] = lambda: gymnasium.make(env, disable_env_checker=True)
        try:
            self._envs: list[Any] = [self._make()]
        except gymnasium.error.Error as error:
            remedy = "see gymnasium.pprint_registry() for those that are installed"
            raise UsageError(f"gymnasium cannot make {env!r}: {error}", remedy=remedy) from None
        actions, observations = self._envs[0].action_space, self._envs[0].observation_space
        if not isinstance(actions, gymnasium.spaces.Discrete) or not isinstance(observations, gymnasium.spaces.Box):
            raise UsageError(
                f"{env} has actions {actions} and observations {observations}",
                remedy="use an environment with Discrete actions and Box observations, such as CartPole-v1",
            )

    def play(self, model: nn.Module, seeds_B: Tensor) -> Trajectories:
        """Play one episode for each seed, with actions drawn from the logits of the model.

        Args:
            model: observations (n, F) -> logits (n, A), or a tuple that begins with the logits.
            seeds_B: Integers with which the environments are reset.

        Returns:
            The trajectories, on the device of the seeds. Costs one wait for the device for each time step.
        """
        device, seeds = seeds_B.device, seeds_B.tolist()
        self._envs += [self._make() for _ in range(len(seeds) - len(self._envs))]
        resets = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds)]
        current_BF = np.stack(resets).reshape(len(seeds), -1).astype(np.float32)
        truncated_B = np.zeros(len(seeds), dtype=np.float32)
        active = np.arange(len(seeds))  # the episodes that have not ended
        rows = []
        while len(active):
            with torch.no_grad():
                logits = logits_of(model(torch.from_numpy(current_BF[active]).to(device)))
                drawn = torch.multinomial(logits.float().softmax(-1), 1).squeeze(1)
            observations_BF = np.zeros_like(current_BF)
            observations_BF[active] = current_BF[active]
            actions_B, rewards_B, mask_B = (np.zeros(len(seeds), np.float32) for _ in range(3))
            actions_B[active], mask_B[active] = drawn.tolist(), 1
            still_active = []
            for episode, action in zip(active.tolist(), drawn.tolist()):
                observation, reward, terminated, truncated, _ = self._envs[episode].step(action)
                current_BF[episode], rewards_B[episode] = np.ravel(observation), reward
                truncated_B[episode] = truncated and not terminated
                if not (terminated or truncated):
                    still_active.append(episode)
            rows.append((observations_BF, actions_B, rewards_B, mask_B))
            active = np.array(still_active, dtype=np.int64)
        observations, actions, rewards, mask = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*rows))
        last, truncated_ = torch.from_numpy(current_BF).to(device), torch.from_numpy(truncated_B).to(device)
        return Trajectories(observations, actions.long(), rewards, mask, last, truncated_)


class Reinforce:
    """Policy gradient (REINFORCE, Williams 1992) on batches ``(seed_B,)``: plays an episode for each seed.

    The loss is the mean of -log p(action) times its advantage over all steps of the episodes. The advantage is the
    discounted return from the step on, normalized over the batch to mean 0 and standard deviation 1.
    ``episode_return``, the sum of the rewards, is logged. The model returns logits (N, A), or a tuple that begins with
    them.

    Args:
        env: Id of an environment of gymnasium with discrete actions, such as ``CartPole-v1``.
        discount: Weight of a reward one step later.

    Raises MissingExtra without gymnasium.
    """

    measures_progress = False
    """The value of the loss may rise while the policy improves; watch ``episode_return``."""

    def __init__(self, env: str, discount: float = 0.99) -> None:
        self.player, self.discount = EpisodePlayer(env), discount

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        (seeds_B,) = batch
        played = self.player.play(model, seeds_B)
        mask = played.mask > 0
        log_prob_N = _log_prob(logits_of(model(played.observations[mask])), played.actions[mask])
        advantage_N = normalize(discounted_sums(played.rewards, self.discount)[mask])
        total = -(log_prob_N * advantage_N).mean() * len(seeds_B)
        return Loss(total, float(len(seeds_B)), {"episode_return": played.returns.sum()})


class Rollout(NamedTuple):
    """All steps of several episodes with the targets of PPO; each tensor has N rows."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    """Log-probabilities of the actions under the policy that drew them."""
    advantages: Tensor
    value_targets: Tensor

    def minibatch(self, rows: Tensor) -> Rollout:
        return Rollout(*(column[rows] for column in self))


class PPO:
    """Proximal policy optimization (Schulman et al. 2017): a step for ``tw.fit(advance=...)`` on batches ``(seed_B,)``.

    A step plays an episode for each seed, then makes several passes over all steps of the episodes in minibatches, with
    an update for each. The model returns ``(logits, value)``. Advantages are computed by generalised advantage
    estimation (Schulman et al. 2015). ``episode_return``, the sum of the rewards, is logged.

    Args:
        env: Id of an environment of gymnasium with discrete actions, such as ``CartPole-v1``.
        discount: Weight of a reward one step later.
        gae_lambda: Lambda of generalised advantage estimation.
        epochs: Passes over the episodes in a step.
        minibatch: Steps of episodes in one update.
        clip_ratio: Bound of the change of the probability of an action, as a ratio minus 1.
        entropy_weight: Weight of the entropy of the policy in the loss.
        max_grad_norm: Bound of the gradient norm.

    Raises MissingExtra without gymnasium.
    """

    def __init__(
        self,
        env: str,
        *,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        epochs: int = 4,
        minibatch: int = 256,
        clip_ratio: float = 0.2,
        entropy_weight: float = 0.0,
        max_grad_norm: float = 0.5,
    ) -> None:
        self.player = EpisodePlayer(env)
        self.discount, self.gae_lambda = discount, gae_lambda
        self.epochs, self.minibatch = epochs, minibatch
        self.clip_ratio = clip_ratio
        self.entropy_weight = entropy_weight
        self.max_grad_norm = max_grad_norm

    def __call__(self, state: TrainState, batch: StepBatch) -> Loss:
        (seeds_B,) = batch.data
        model, optimizer = state.model, state.optimizer
        played = self.player.play(model, seeds_B)
        rollout = self.rollout(model, played)
        count = len(rollout.actions)
        total = torch.zeros((), device=seeds_B.device)
        for _ in range(self.epochs):
            for rows in torch.split(torch.randperm(count, device=seeds_B.device), self.minibatch):
                loss = self.loss(model, rollout.minibatch(rows))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
                optimizer.step()
                total += loss.detach() * len(rows)
        return Loss(total / (self.epochs * count), 1.0, {"episode_return": played.returns.mean()})

    @torch.no_grad()
    def rollout(self, model: nn.Module, played: Trajectories) -> Rollout:
        """Compute the log-probabilities, advantages and value targets of trajectories."""
        logits_TBA, value_TB = model(played.observations)
        _, last_value_B = model(played.last_observations)
        advantage_TB = self.advantages(played, value_TB, last_value_B)
        log_prob_TB = _log_prob(logits_TBA, played.actions)
        columns = (played.observations, played.actions, log_prob_TB, advantage_TB, advantage_TB + value_TB)
        return Rollout(*(column[played.mask > 0] for column in columns))

    def loss(self, model: nn.Module, batch: Rollout) -> Tensor:
        """Compute the clipped objective (equation 9 of the paper) of N steps, a 0-d tensor."""
        logits_NA, value_N = model(batch.observations)
        ratio_N = (_log_prob(logits_NA, batch.actions) - batch.log_probs).exp()
        advantage_N = normalize(batch.advantages)
        clipped_N = ratio_N.clamp(1 - self.clip_ratio, 1 + self.clip_ratio)
        objective = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).mean()
        entropy = -(logits_NA.softmax(-1) * logits_NA.log_softmax(-1)).sum(-1).mean()
        value_loss = F.mse_loss(value_N, batch.value_targets)
        loss: Tensor = VALUE_LOSS_WEIGHT * value_loss - objective - self.entropy_weight * entropy
        return loss

    def advantages(self, played: Trajectories, value_TB: Tensor, last_value_B: Tensor) -> Tensor:
        """Compute generalised advantage estimates (T, B), which are 0 where there is padding.

        Args:
            played: The trajectories.
            value_TB: Values of their observations.
            last_value_B: Values of their last observations. They count for truncated episodes only.
        """
        next_value_TB = torch.cat([value_TB[1:] * played.mask[1:], torch.zeros_like(value_TB[:1])])
        last_B = played.mask.sum(0).long() - 1
        next_value_TB.scatter_(0, last_B[None], (last_value_B * played.truncated)[None])
        error_TB = (played.rewards + self.discount * next_value_TB - value_TB) * played.mask
        return discounted_sums(error_TB, self.discount * self.gae_lambda)


def logits_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the output of a policy, or its first element if it is a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def discounted_sums(rewards_TB: Tensor, discount: float) -> Tensor:
    """Return ``r[t] + discount * r[t + 1] + discount**2 * r[t + 2] + ...`` of each step, (T, B)."""
    sums, later_B = [], torch.zeros_like(rewards_TB[0])
    for reward_B in reversed(rewards_TB.unbind()):
        later_B = reward_B + discount * later_B
        sums.append(later_B)
    return torch.stack(sums[::-1])


def normalize(values_N: Tensor) -> Tensor:
    """Return the values with mean 0 and standard deviation 1, or zeros where they are all equal."""
    centred_N = values_N - values_N.mean()
    std = centred_N.square().mean().sqrt()
    return centred_N / std.clamp(min=MIN_ADVANTAGE_STD)


def _log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    log_probs = logits.float().log_softmax(-1)
    return log_probs.gather(-1, actions[..., None]).squeeze(-1)
