"""Generated interactions of users with items, whose structure is known. Shapes: U users, I items, S samples."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError

Split: TypeAlias = Literal["train", "val"]
LOGIT_STD = 2.0
"""Standard deviation of the logits of items for a user: the diversity of tastes."""


class Interactions(Dataset[tuple[Tensor, Tensor]]):
    """(user, item): ids. ``chance_UI`` is the probability of each item for each user that they were drawn with."""

    deterministic = True

    def __init__(self, users_S: Tensor, items_S: Tensor, chance_UI: Tensor) -> None:
        self.users = users_S
        self.items = items_S
        self.chance_UI = chance_UI
        self.classes = chance_UI.shape[1]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.users[index], self.items[index]

    def references(self) -> dict[str, float]:
        """Return the nats per choice that simple models reach, to compare a loss with.

        ``chance`` is a uniform guess, ``popular`` uses the probability of each item, and ``best`` the probability for
        each user.
        """
        popular_I, chance_UI = self.chance_UI.mean(0), self.chance_UI
        return {
            "chance": math.log(self.classes),
            "popular": float(-(popular_I * popular_I.log()).sum()),
            "best": float(-(chance_UI * chance_UI.log()).sum(1).mean()),
        }

    def recalls(self, k: int = 10) -> dict[str, float]:
        """Return the recall at ``k`` of the same three. No ranking can be expected to exceed ``best``."""
        popular = self.chance_UI.mean(0).topk(k).indices
        return {
            "chance": k / self.classes,
            "popular": float(self.chance_UI[:, popular].sum(1).mean()),
            "best": float(self.chance_UI.topk(k, dim=1).values.sum(1).mean()),
        }

    def content_sha256(self) -> str:
        """Return a hash of users and items."""
        return hashlib.sha256(self.users.numpy().tobytes() + self.items.numpy().tobytes()).hexdigest()


def interactions(
    split: Split = "train", *, users: int = 1000, items: int = 500, per_user: int = 40, tastes: int = 8, seed: int = 0
) -> Interactions:
    """Generated pairs (user, item): a user chooses items near to their own taste more often.

    Users and items are random vectors; the logit of an item for a user is their scalar product. The validation set has
    other choices of the same users, a quarter as many.

    Args:
        split: ``train`` or ``val``.
        users: Number of users.
        items: Number of items.
        per_user: Interactions of each user in the training set.
        tastes: Dimensions of the vectors.
        seed: Another seed gives other users and items.

    Raises UsageError for a value that cannot be used.
    """
    if split not in ("train", "val"):
        raise UsageError(f'split must be "train" or "val"; got {split!r}', remedy='try split="train"')
    if min(users, tastes) < 1 or items < 2 or per_user < 4:
        got = f"users={users}, items={items}, per_user={per_user} and tastes={tastes}"
        raise UsageError(f"{got} are too few", remedy="try users=1000, items=500, per_user=40, tastes=8")
    draw = torch.Generator("cpu").manual_seed(seed)
    of_users_UD, of_items_ID = (torch.randn(each, tastes, generator=draw, device="cpu") for each in (users, items))
    chance_UI = (of_users_UD @ of_items_ID.T * (LOGIT_STD / tastes**0.5)).softmax(1)
    chosen_US = chance_UI.multinomial(per_user + per_user // 4, replacement=True, generator=draw)
    mine_US = chosen_US[:, :per_user] if split == "train" else chosen_US[:, per_user:]
    users_US = torch.arange(users, device="cpu")[:, None].expand_as(mine_US)
    return Interactions(users_US.flatten(), mine_US.flatten(), chance_UI)
