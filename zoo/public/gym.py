"""CartPole with the interface of gymnasium, alone and as a vector of environments, for the public programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, TAU_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_ANGLE, MAX_POSITION = 12 * math.pi / 180, 2.4


class CartPole:
    """A pole on a cart, pushed to the left (0) or right (1); reward 1 for each step until it falls.

    Barto, Sutton and Anderson 1983, with the constants of CartPole-v1. ``info["episode"]`` of the last step has return
    and length, as the wrapper RecordEpisodeStatistics reports them.
    """

    def __init__(self, max_steps: int = 500) -> None:
        self.max_steps = max_steps
        self.observation_space = SimpleNamespace(shape=(4,))
        self.action_space = SimpleNamespace(n=2, shape=(), sample=lambda: int(self._rng.integers(2)))
        self._rng = np.random.default_rng()
        self._state = [0.0] * 4
        self._steps = 0

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._state = self._rng.uniform(-0.05, 0.05, 4).tolist()
        self._steps = 0
        return np.array(self._state, dtype=np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        x, speed, angle, spin = self._state
        force = FORCE if action == 1 else -FORCE
        mass = CART_MASS + POLE_MASS
        push = (force + POLE_MASS * HALF_LENGTH * spin**2 * math.sin(angle)) / mass
        turn = GRAVITY * math.sin(angle) - math.cos(angle) * push
        turn /= HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * math.cos(angle) ** 2 / mass)
        pull = push - POLE_MASS * HALF_LENGTH * turn * math.cos(angle) / mass
        self._state = [x + TAU_S * speed, speed + TAU_S * pull, angle + TAU_S * spin, spin + TAU_S * turn]
        self._steps += 1
        terminated = abs(self._state[0]) > MAX_POSITION or abs(self._state[2]) > MAX_ANGLE
        truncated = not terminated and self._steps >= self.max_steps
        info = {"episode": {"r": float(self._steps), "l": self._steps}} if terminated or truncated else {}
        return np.array(self._state, dtype=np.float32), 1.0, terminated, truncated, info

    def close(self) -> None:
        pass


class SyncVectorEnv:
    """Environments that step together; one that ends is reset, its last observation is in ``final_observation``."""

    def __init__(self, makers: Sequence[Callable[[], CartPole]]) -> None:
        self.envs = [make() for make in makers]
        self.num_envs = len(self.envs)
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        return np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        steps = [env.step(int(action)) for env, action in zip(self.envs, actions)]
        obs = [each[0] for each in steps]
        infos: dict[str, Any] = {}
        for i, (last, _, terminated, truncated, info) in enumerate(steps):
            if terminated or truncated:
                infos.setdefault("final_observation", [None] * self.num_envs)[i] = last
                infos.setdefault("final_info", [None] * self.num_envs)[i] = info
                obs[i] = self.envs[i].reset()[0]
        rewards, terminations, truncations = (np.array([each[k] for each in steps]) for k in (1, 2, 3))
        return np.stack(obs), rewards.astype(np.float32), terminations, truncations, infos

    def close(self) -> None:
        pass
