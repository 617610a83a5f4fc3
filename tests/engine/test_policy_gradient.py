"""Policy gradients: episodes as a plain loop plays them, returns, advantages, losses, refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from tests.report_pages.reading import Page, curves_of
from trainwright.data.episodes import episodes
from trainwright.engine.policy_gradient import PPO, EpisodePlayer, Reinforce, Trajectories, discounted_sums, normalize
from trainwright.errors import MissingExtra, UsageError
from trainwright.models.mlp import actor_critic, mlp
from trainwright.report.pages.report import write_report

gymnasium = pytest.importorskip("gymnasium")
ENV = "CartPole-v1"


def policy() -> nn.Module:
    torch.manual_seed(0)
    return mlp(sizes=[4, 8, 2], activation="tanh")


def test_an_episode_is_that_of_a_plain_loop() -> None:
    model, env = policy(), gymnasium.make(ENV)
    played = EpisodePlayer(ENV).play(model, torch.tensor([7]))
    torch.manual_seed(0)
    policy()  # draws the weights again, so that the generator is where it was
    now, _ = env.reset(seed=7)
    for seen, action in zip(played.observations[:, 0], played.actions[:, 0], strict=True):
        assert torch.equal(seen, torch.tensor(now))
        drawn = torch.multinomial(model(torch.tensor(now)[None]).softmax(-1), 1)
        assert int(drawn) == int(action)
        now, reward, ended, cut, _ = env.step(int(action))
        assert reward == 1
    assert ended and not cut and not played.truncated[0] and torch.equal(played.last_observations[0], torch.tensor(now))


def test_episodes_of_several_lengths_are_padded() -> None:
    played = EpisodePlayer(ENV).play(policy(), torch.arange(6))
    lengths = played.mask.sum(0)
    assert len(set(lengths.tolist())) > 1 and len(played.mask) == lengths.max()
    assert torch.equal(played.returns, lengths)  # CartPole rewards each step with 1
    assert not played.observations[played.mask == 0].any() and not played.rewards[played.mask == 0].any()
    assert (played.mask[:-1] >= played.mask[1:]).all()


def test_the_same_generator_plays_the_same_episodes_again() -> None:
    model, player, seeds = policy(), EpisodePlayer(ENV), torch.arange(3)
    first = player.play(model, seeds)
    torch.manual_seed(0)
    policy()
    assert all(torch.equal(a, b) for a, b in zip(first, player.play(model, seeds), strict=True))


def test_discounted_sums_what_follows() -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, 1.0], [4.0, 0.0]])
    assert discounted_sums(rewards, 0.5).tolist() == [[2.0, 2.5], [2.0, 1.0], [4.0, 0.0]]


def test_normalised_values_that_are_all_alike_are_zero() -> None:
    values = normalize(torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(values.mean(), torch.tensor(0.0))
    torch.testing.assert_close(values.square().mean(), torch.tensor(1.0))
    assert not normalize(torch.full((3,), 4.0)).any()


def test_reinforce_is_the_formula() -> None:
    model, loss, seeds = policy(), Reinforce(ENV, discount=0.9), torch.arange(4)
    found = loss(model, (seeds,))
    torch.manual_seed(0)
    policy()
    played = loss.player.play(model, seeds)
    log_probs, to_go = [], []
    for episode in range(4):
        steps = int(played.mask[:, episode].sum())
        logits = model(played.observations[:steps, episode])
        log_probs.append(logits.log_softmax(-1)[torch.arange(steps), played.actions[:steps, episode]])
        to_go += [sum(0.9**later for later in range(steps - step)) for step in range(steps)]
    gains = torch.tensor(to_go)
    gains = (gains - gains.mean()) / gains.std(correction=0)
    total = -4 * (torch.cat(log_probs) * gains).mean()
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    assert float(found.metrics["episode_return"]) == float(played.returns.sum()) and found.weight == 4.0


@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_the_advantages_are_those_of_a_loop(cut: float) -> None:
    torch.manual_seed(0)
    ppo, lengths = PPO(ENV, discount=0.9, gae_lambda=0.8), [5, 3]
    counts = (torch.arange(5)[:, None] < torch.tensor(lengths)).float()
    rewards, values, after = torch.randn(5, 2) * counts, torch.randn(5, 2), torch.randn(2)
    played = Trajectories(
        torch.zeros(5, 2, 4), torch.zeros(5, 2), rewards, counts, torch.zeros(2, 4), torch.tensor([0, cut])
    )
    found = ppo.advantages(played, values, after)
    for episode, steps in enumerate(lengths):
        expected = 0.0
        for step in reversed(range(steps)):
            following = after[episode] * played.truncated[episode] if step == steps - 1 else values[step + 1, episode]
            error = rewards[step, episode] + 0.9 * following - values[step, episode]
            expected = error + 0.9 * 0.8 * expected  # type: ignore[assignment]
            torch.testing.assert_close(found[step, episode], torch.as_tensor(expected))
        assert not found[steps:, episode].any()


def test_the_loss_of_ppo_is_clipped() -> None:
    torch.manual_seed(0)
    model, ppo = actor_critic(observations=4, actions=2), PPO(ENV, clip_ratio=0.2, entropy_weight=0.1)
    rollout = ppo.rollout(model, ppo.player.play(model, torch.arange(3)))
    nn.init.normal_(model.actor.layers.head.weight, std=2.0)  # far from the policy that played
    logits, value = model(rollout.observations)
    chosen = torch.distributions.Categorical(logits=logits)
    ratio = (chosen.log_prob(rollout.actions) - rollout.log_probs).exp()
    gain = (rollout.advantages - rollout.advantages.mean()) / rollout.advantages.std(correction=0)
    bounded = torch.where(gain > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
    assert not torch.equal(bounded, ratio)
    expected = 0.5 * F.mse_loss(value, rollout.value_targets) - (bounded * gain).mean() - 0.1 * chosen.entropy().mean()
    torch.testing.assert_close(ppo.loss(model, rollout), expected)


@pytest.mark.slow
def test_the_page_has_a_learning_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the returns of training, by PPO, and those of the validation, which REINFORCE plays."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    result = tw.fit(
        actor_critic(observations=4, actions=2),
        episodes(count=8),
        Reinforce(ENV),
        advance=PPO(ENV, epochs=1),
        val=episodes("val", count=2),
        batch=2,
        steps=2,
        settings={"log.every": "1steps", "log.doctor": False},
        quiet=True,
    )
    (run,) = curves_of(Page(write_report([result.run]).path.read_text()))
    (curve,) = (each for each in run["figures"] if each["name"] == "episode_return")
    lengths = {each["label"]: [value >= 8 for value in each["value"]] for each in curve["series"]}  # falls in 8 or more
    assert lengths["train"] == [True, True] and lengths["validation"]


def test_a_policy_and_a_value_for_any_leading_dimensions() -> None:
    model, seen = actor_critic(observations=3, actions=5), torch.randn(2, 7, 3)
    logits, value = model(seen)
    assert logits.shape == (2, 7, 5) and value.shape == (2, 7)
    torch.testing.assert_close(model(seen[1])[1], value[1])
    assert logits.abs().max() < 0.2  # it begins with nearly equal probabilities


def test_the_splits_have_no_seed_in_common() -> None:
    train, val = episodes(count=5), episodes("val", count=5)
    assert [int(seed) for (seed,) in (train[i] for i in range(5))] == [0, 1, 2, 3, 4]
    assert not {int(seed) for seed in train.seeds} & {int(seed) for seed in val.seeds}


def test_what_cannot_be_played_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: EpisodePlayer("CartPool-v1"), "cannot make 'CartPool-v1'"),
        (lambda: EpisodePlayer("Pendulum-v1"), "has actions Box"),
        (lambda: episodes("test"), "split must be"),  # type: ignore[arg-type]
        (lambda: episodes(count=0), "no number of episodes"),
        (lambda: actor_critic(observations=0, actions=2), "observations must be"),
    ]
    for call, said in cases:
        with pytest.raises(UsageError, match=said) as caught:
            call()
        assert caught.value.remedy
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match="gymnasium") as missing:
        EpisodePlayer(ENV)
    assert "pip install" in missing.value.remedy
