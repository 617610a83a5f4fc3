"""Small healthy programs in the idioms of well-known public training repositories, each as its authors would write it.

Module ``zoo.public.NAME`` has ``main(watch, seed, folder) -> Result``. ``watch(model, optimizer, loader=...)`` is a
context manager around the training loop, ``watch.lightning()`` and ``watch.transformers()`` are lists of callbacks for
these trainers. A program writes its files to ``folder`` and prints the same lines as the repository that it follows.

The programs are in two halves. Work on checks may use the open half. The held-out half is run once, at the end of a
piece of work, and no check or program may be changed because of its results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

KINDS = {
    "language": "nanogpt awd_lstm",
    "vision": "mnist unet",
    "generative": "vae ddpm",
    "reinforcement": "dqn ppo_cleanrl",
    "graph": "gcn gin",
    "sequence": "annotated_transformer speech_ctc",
    "tabular": "dlrm multitask",
    "framework": "lora_trainer lightning_gan",
}
"""Names of the programs by kind."""


def _split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Orders the names of each kind by SHA-256: the first half is open, the rest is held out."""
    open_half: list[str] = []
    held_out: list[str] = []
    for names in KINDS.values():
        ordered = sorted(names.split(), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        open_half += ordered[: len(ordered) // 2]
        held_out += ordered[len(ordered) // 2 :]
    return tuple(open_half), tuple(held_out)


OPEN, HELD_OUT = _split()


class Watch(Protocol):
    """The context that a program puts around its training."""

    def __call__(self, model: Any, optimizer: Any, **options: Any) -> AbstractContextManager[Any]:
        """As ``tw.watch``."""

    def lightning(self) -> list[Any]:
        """Callbacks for a Trainer of Lightning."""

    def transformers(self) -> list[Any]:
        """Callbacks for a Trainer of transformers."""


class NullWatch:
    def __call__(self, model: Any, optimizer: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def lightning(self) -> list[Any]:
        return []

    def transformers(self) -> list[Any]:
        return []


@dataclass(frozen=True)
class Result:
    """The result of a program.

    Attributes:
        metric: Name of the final metric.
        value: Its value.
        bar: The program has learned if ``value`` is at least this, or at most if not ``higher_is_better``.
        losses: The training losses that the program keeps, not always one per optimizer step.
        objects: Everything with a ``state_dict`` that the training changed: models, optimizers, schedulers, scalers.
        higher_is_better: False for a loss or an error.
    """

    metric: str
    value: float
    bar: float
    losses: Sequence[float]
    objects: Mapping[str, Any] = field(repr=False)
    higher_is_better: bool = True

    @property
    def learned(self) -> bool:
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar
