"""Policy gradients in environments of gymnasium: REINFORCE as a loss, PPO as a step.

The data are seeds of episodes. Each episode follows from its seed, the weights, and torch's random generator, which
draws the actions: a resumed run plays the same episodes, and a replayed step too.

Shapes: B episodes, T steps of the longest one, F numbers of an observation, A actions, N all steps that were played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.loss import Batch, Loss
from trainwright.errors import MissingExtra, UsageError
from trainwright.state.cursor import StepBatch
from trainwright.state.train_state import TrainState

SMALLEST_SPREAD = 1e-6
"""Standard deviation of advantages below which they are not divided by it."""


class Played(NamedTuple):
    """Episodes, padded to the longest.

    ``seen`` is (T, B, F), ``actions`` and ``rewards`` are (T, B). ``counts`` (T, B) is 1 for the steps that were
    played, else 0. ``last`` (B, F) was seen after the last step. ``cut`` (B,) is 1 for an episode that was cut off by
    its time limit, so that more reward would have followed.
    """

    seen: Tensor
    actions: Tensor
    rewards: Tensor
    counts: Tensor
    last: Tensor
    cut: Tensor

    @property
    def returns(self) -> Tensor:
        """The sum of the rewards of each episode, (B,)."""
        return self.rewards.sum(0)


class Arena:
    """Plays episodes of one environment with discrete actions, several side by side.

    Args:
        env: Id of an environment of gymnasium, such as ``CartPole-v1``.
    """

    def __init__(self, env: str) -> None:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            if error.name != "gymnasium":
                raise
            raise MissingExtra("gymnasium", needed_for="episodes") from None
        self.env = env
        self._make: Callable[[], Any] = lambda: gymnasium.make(env, disable_env_checker=True)
        try:
            self._envs: list[Any] = [self._make()]
        except gymnasium.error.Error as error:
            remedy = "see gymnasium.pprint_registry() for those that are installed"
            raise UsageError(f"gymnasium cannot make {env!r}: {error}", remedy=remedy) from None
        actions, seen = self._envs[0].action_space, self._envs[0].observation_space
        if not isinstance(actions, gymnasium.spaces.Discrete) or not isinstance(seen, gymnasium.spaces.Box):
            raise UsageError(
                f"{env} has actions {actions} and observations {seen}",
                remedy="take one with Discrete actions and Box observations, such as CartPole-v1",
            )

    def play(self, model: nn.Module, seeds_B: Tensor) -> Played:
        """Plays an episode for each seed, with actions drawn from the logits of the model."""
        device, seeds = seeds_B.device, seeds_B.tolist()
        self._envs += [self._make() for _ in range(len(seeds) - len(self._envs))]
        last_BF = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds)]).astype(np.float32)
        cut_B = np.zeros(len(seeds), dtype=np.float32)
        alive, steps = np.arange(len(seeds)), []
        while len(alive):
            now_BF = torch.from_numpy(last_BF[alive].reshape(len(alive), -1)).to(device)
            with torch.no_grad():
                drawn_B = torch.multinomial(logits_of(model(now_BF)).float().softmax(-1), 1).squeeze(1)
            row = (np.zeros_like(last_BF), *(np.zeros(len(seeds), np.float32) for _ in range(3)))
            goes_on = np.zeros(len(alive), dtype=bool)
            for at, (each, action) in enumerate(zip(alive, drawn_B.tolist())):
                row[0][each] = last_BF[each]
                last_BF[each], reward, ended, cut_B[each], _ = self._envs[each].step(action)
                row[1][each], row[2][each], row[3][each] = action, reward, 1
                goes_on[at] = not (ended or cut_B[each])
                cut_B[each] *= not ended
            steps.append(row)
            alive = alive[goes_on]
        seen, actions, rewards, counts = (torch.from_numpy(np.stack(each)).to(device) for each in zip(*steps))
        last = torch.from_numpy(last_BF).to(device).flatten(1)
        return Played(seen.flatten(2), actions.long(), rewards, counts, last, torch.from_numpy(cut_B).to(device))


class Reinforce:
    """Policy gradient (REINFORCE, Williams 1992) on batches ``(seed_B,)``: plays an episode for each seed.

    The loss of a step is -log p(action) times its advantage: the discounted return from there on, minus the mean over
    all steps of the batch, divided by their standard deviation. ``episode_return``, the sum of the rewards, is logged.

    Args:
        env: Id of an environment of gymnasium with discrete actions, such as ``CartPole-v1``.
        discount: Weight of a reward one step later.

    Raises MissingExtra without gymnasium.
    """

    def __init__(self, env: str, discount: float = 0.99) -> None:
        self.arena, self.discount = Arena(env), discount

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        (seeds_B,) = batch
        played = self.arena.play(model, seeds_B)
        counts = played.counts > 0
        to_go_TB = discounted(played.rewards, self.discount)
        log_prob_N = -F.cross_entropy(
            logits_of(model(played.seen[counts])).float(), played.actions[counts], reduction="none"
        )
        total = -(log_prob_N * normalised(to_go_TB[counts])).sum() / len(counts)
        return Loss(total, float(len(seeds_B)), {"episode_return": played.returns.sum()})


class Rollout(NamedTuple):
    """All steps of several episodes, with what PPO learns from them; each tensor has N rows."""

    seen: Tensor
    actions: Tensor
    log_probs: Tensor
    """Of the actions, when they were drawn."""
    advantages: Tensor
    goals: Tensor
    """Of the value."""

    def part(self, rows: Tensor) -> Rollout:
        """Some of the steps."""
        return Rollout(*(each[rows] for each in self))


class PPO:
    """Proximal policy optimization (Schulman et al. 2017): a step for ``tw.fit(advance=...)`` on batches ``(seed_B,)``.

    A step plays an episode for each seed, then makes several passes over all of it, in parts. The model returns
    ``(logits, value)``. Advantages are those of generalised advantage estimation (Schulman et al. 2015).
    ``episode_return``, the sum of the rewards, is logged.

    Args:
        env: Id of an environment of gymnasium with discrete actions, such as ``CartPole-v1``.
        discount: Weight of a reward one step later.
        gae: Lambda of the advantages.
        passes: Passes over the episodes in a step.
        part: Steps of episodes in one update.
        clip: Bound of the change of a probability, as a ratio.
        entropy: Weight of the entropy of the policy.
        norm: Bound of the gradient norm.

    Raises MissingExtra without gymnasium.
    """

    def __init__(
        self,
        env: str,
        discount: float = 0.99,
        gae: float = 0.95,
        passes: int = 4,
        part: int = 256,
        clip: float = 0.2,
        entropy: float = 0.0,
        norm: float = 0.5,
    ) -> None:
        self.arena = Arena(env)
        self.discount, self.gae, self.passes, self.part = discount, gae, passes, part
        self.clip, self.entropy, self.norm = clip, entropy, norm

    def __call__(self, state: TrainState, batch: StepBatch) -> Loss:
        (seeds_B,) = batch.data
        model, optimizer = state.model, state.optimizer
        played = self.arena.play(model, seeds_B)
        rollout = self.rollout(model, played)
        total = torch.zeros((), device=seeds_B.device)
        for _ in range(self.passes):
            order = torch.randperm(len(rollout.seen), device=seeds_B.device)
            for rows in torch.split(order, self.part):
                loss = self.loss(model, rollout.part(rows))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), self.norm)
                optimizer.step()
                total += loss.detach() * len(rows)
        return Loss(total / (self.passes * len(rollout.seen)), 1.0, {"episode_return": played.returns.mean()})

    @torch.no_grad()
    def rollout(self, model: nn.Module, played: Played) -> Rollout:
        """Computes what the updates of a step learn from."""
        logits_TBA, value_TB = model(played.seen)
        advantage_TB = self._advantages(played, value_TB, model(played.last)[1])
        log_prob_TB, counts = _log_prob(logits_TBA, played.actions), played.counts > 0
        parts = (played.seen, played.actions, log_prob_TB, advantage_TB, advantage_TB + value_TB)
        return Rollout(*(each[counts] for each in parts))

    def loss(self, model: nn.Module, part: Rollout) -> Tensor:
        """The clipped objective, the error of the value, and the entropy."""
        logits_NA, value_N = model(part.seen)
        ratio_N = (_log_prob(logits_NA, part.actions) - part.log_probs).exp()
        gain_N = normalised(part.advantages)
        objective_N = torch.minimum(ratio_N * gain_N, ratio_N.clamp(1 - self.clip, 1 + self.clip) * gain_N)
        entropy_N = -(logits_NA.softmax(-1) * logits_NA.log_softmax(-1)).sum(-1)
        error = 0.5 * F.mse_loss(value_N, part.goals)
        loss: Tensor = error - objective_N.mean() - self.entropy * entropy_N.mean()
        return loss

    def _advantages(self, played: Played, value_TB: Tensor, after_B: Tensor) -> Tensor:
        """Of an episode that was cut off, the value of what was seen last stands for what would have followed."""
        next_TB = torch.cat([value_TB[1:] * played.counts[1:], torch.zeros_like(value_TB[:1])])
        last_B = played.counts.sum(0).long() - 1
        next_TB.scatter_(0, last_B[None], (after_B * played.cut)[None])
        error_TB = (played.rewards + self.discount * next_TB - value_TB) * played.counts
        return discounted(error_TB, self.discount * self.gae)


def logits_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The logits of a policy, which may return more."""
    return output if isinstance(output, Tensor) else output[0]


def discounted(rewards_TB: Tensor, discount: float) -> Tensor:
    """The sum over what follows of each step, itself included: r[t] + discount r[t + 1] + ..."""
    sums, later_B = [], torch.zeros_like(rewards_TB[0])
    for reward_B in reversed(rewards_TB.unbind()):
        later_B = reward_B + discount * later_B
        sums.append(later_B)
    return torch.stack(sums[::-1])


def normalised(values_N: Tensor) -> Tensor:
    """The values with mean 0 and, unless they are all alike, standard deviation 1."""
    centred_N = values_N - values_N.mean()
    spread = centred_N.square().mean().sqrt()
    return centred_N / spread.clamp(min=SMALLEST_SPREAD)


def _log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    log_probs = logits.float().log_softmax(-1)
    return log_probs.gather(-1, actions[..., None]).squeeze(-1)
