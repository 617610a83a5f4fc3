"""Notes that ranks leave for one another in a store. No rank waits for another, and nothing of it is a collective."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

REPLY_S = 10.0
"""How long the store itself may take to reply before it counts as gone."""


class Board:
    """Keys and texts that every rank may read and write. Raises RuntimeError where the store is gone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size

    def post(self, key: str, text: str) -> None:
        """Leaves ``text`` under ``key``, in the place of what was there."""
        self._store.set(key, text)

    def read(self, *keys: str) -> list[str] | None:
        """The texts under all ``keys``; None unless each is there. It does not wait for them."""
        if not self._store.check(list(keys)):
            return None
        texts: Sequence[bytes] = self._store.multi_get(list(keys))
        return [text.decode() for text in texts]

    def drop(self, key: str) -> None:
        """Takes away what is under ``key``."""
        self._store.delete_key(key)


def open_board(name: str) -> Board:
    """A board of this name in the store of the default group, over a connection of its own.

    A call that waits for the store so never holds up one of the loop's. Raises RuntimeError where there is no
    connection to be had.
    """
    store: Store = distributed.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=REPLY_S))
    return Board(PrefixStore(f"trainwright/{name}", store), distributed.get_rank(), distributed.get_world_size())
