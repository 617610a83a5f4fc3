"""A two-tower recommender: https://research.google/pubs/deep-neural-networks-for-youtube-recommendations.

Shapes: B batch, D d_model, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trainwright.models.options import require_counts


@dataclass(frozen=True)
class TwoTowerConfig:
    """The options of ``two_tower``."""

    users: int
    classes: int
    d_model: int = 32
    hidden: int = 64

    def __post_init__(self) -> None:
        require_counts(self, dict.fromkeys(("users", "classes", "d_model", "hidden"), 1))


class Tower(nn.Module):
    """ids_N -> vectors_ND (all ids if None): an embedding plus the output of a network with one hidden layer."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.ids = nn.Embedding(count, width)
        self.up = nn.Linear(width, hidden)
        self.activation = nn.ReLU()
        self.down = nn.Linear(hidden, width)
        nn.init.normal_(self.ids.weight, std=width**-0.5)

    def forward(self, ids_N: Tensor | None = None) -> Tensor:
        x_ND = self.ids.weight if ids_N is None else self.ids(ids_N)
        out_ND: Tensor = x_ND + self.down(self.activation(self.up(x_ND)))
        return out_ND


class TwoTower(nn.Module):
    """user_B -> scores_BI: the scalar products of the vector of a user with those of all items."""

    def __init__(self, options: TwoTowerConfig) -> None:
        super().__init__()
        self.user = Tower(options.users, options.d_model, options.hidden)
        self.item = Tower(options.classes, options.d_model, options.hidden)

    def forward(self, user_B: Tensor) -> Tensor:
        scores_BI: Tensor = self.user(user_B) @ self.item().T
        return scores_BI


def two_tower(*, users: int, classes: int, d_model: int = 32, hidden: int = 64) -> TwoTower:
    """A two-tower recommender: user_B -> scores_BI of all items (Covington et al. 2016; Yi et al. 2019).

    With ``loss: cross_entropy`` it is trained on the softmax over all items, without sampled negatives, so the loss is
    exact for any split of a batch. ``metrics: [{use: top_k, args: {k: 10}}]`` is the recall at 10.

    Args:
        users: Number of users.
        classes: Number of items. Taken from the training set where a recipe leaves it out.
        d_model: Length of the vectors.
        hidden: Width of the hidden layer of each tower.

    Raises UsageError for a value that cannot be used.
    """
    return TwoTower(TwoTowerConfig(users, classes, d_model, hidden))
