"""Messages that ranks exchange through a store. No rank waits for another, and no collective is used."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

REPLY_TIMEOUT_S = 10.0
"""Seconds without a reply after which the store counts as lost."""


class Board:
    """Keys and texts that every rank may read and write. Raises RuntimeError if the store is lost."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size

    def post(self, key: str, text: str) -> None:
        """Store ``text`` under ``key``, replacing an earlier text."""
        self._store.set(key, text)

    def read(self, *keys: str) -> list[str] | None:
        """Return the texts under all ``keys``; None if one is missing. Does not wait for them."""
        if not self._store.check(list(keys)):
            return None
        texts: Sequence[bytes] = self._store.multi_get(list(keys))
        return [text.decode() for text in texts]

    def drop(self, key: str) -> None:
        """Delete the text under ``key``."""
        self._store.delete_key(key)


def open_board(name: str) -> Board:
    """Return a board of this name in the store of the default group, over a separate connection.

    Therefore a call that waits for the store never delays a call of the training loop. Raises RuntimeError if no
    connection can be made.
    """
    store: Store = distributed.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=REPLY_TIMEOUT_S))
    return Board(PrefixStore(f"trainwright/{name}", store), distributed.get_rank(), distributed.get_world_size())
