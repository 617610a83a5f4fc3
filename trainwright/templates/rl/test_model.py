import torch

from data import play
from model import make_policy


def test_the_policy_gives_one_logit_for_each_action() -> None:
    assert make_policy()(torch.zeros(5, 4)).shape == (5, 2)


def test_an_episode_ends_when_the_pole_falls() -> None:
    played = play(make_policy(), torch.arange(3))
    rewards = played.rewards
    assert played.observations.shape == (len(rewards), 3, 4)
    assert rewards[0].eq(1).all() and rewards.diff(dim=0).le(0).all()
