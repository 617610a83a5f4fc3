"""Observes weights that modules share, and whether they stay shared."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainwright.checkpoint.names import named_roots
from trainwright.doctor.facts.weights import TiesFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runs.json_values import Facts, strict


class TiesProbe(Probe):
    """Compares the groups of names of one parameter with those at the start."""

    name = TiesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._tied = _groups(_everywhere(self._roots))
        self._told: TiesFacts | None = None

    def values(self) -> Facts | None:
        now = _everywhere(self._roots)
        broken = [names for names in self._tied if len({id(now.get(name)) for name in names}) > 1]
        facts = TiesFacts(tied=len(self._tied), broken=tuple(broken), split=tuple(_over_one_memory(now)))
        if facts == self._told:
            return None
        self._told = facts
        return dict(strict(vars(facts)))


def _everywhere(roots: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns every parameter under each of its names."""
    found: dict[str, Tensor] = {}
    for start, root in named_roots(roots):
        for name, parameter in root.named_parameters(remove_duplicate=False):
            found[f"{start}.{name}".lstrip(".")] = parameter
    return found


def _groups(named: dict[str, Tensor]) -> list[tuple[str, ...]]:
    """Returns groups of names of one parameter."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_id.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in by_id.values() if len(names) > 1]


def _over_one_memory(named: dict[str, Tensor]) -> list[tuple[str, ...]]:
    """Returns groups of names of different parameters with equal address and number of elements."""
    at: dict[tuple[int, int], dict[int, str]] = {}
    for name, p in named.items():
        if p.requires_grad and p.numel() > 1 and p.layout is not None and p.device.type != "meta":
            at.setdefault((p.data_ptr(), p.numel()), {}).setdefault(id(p), name)
    return [tuple(names.values()) for (address, _), names in at.items() if address and len(names) > 1]
