"""Measurements of loaded states, and of the steps after loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """A call of ``load_state_dict`` on a model."""

    step: int  # Number of updates before the call
    tensors: int  # Number of tensors of the model
    missing: tuple[str, ...] = ()  # Names that the model has and the state lacks
    unexpected: tuple[str, ...] = ()  # Names that the state has and the model lacks
    # The prefix that, added to or removed from the unexpected names, makes them the missing ones
    prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class OverwrittenFacts:
    """Weights that were loaded before the first forward call."""

    weights: int  # Number of loaded weights
    gone: int  # Number of weights that have other values at the first forward call
    fraction: float  # Fraction of the loaded elements in these weights


@dataclass(frozen=True, kw_only=True)
class ResumeFacts:
    """Loads of the models."""

    experiment: ClassVar[str] = "resume"
    loads: tuple[LoadFacts, ...] = ()
    overwritten: OverwrittenFacts | None = None
