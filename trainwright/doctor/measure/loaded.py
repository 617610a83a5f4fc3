"""Whether weights that were loaded are unchanged when the training begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright.doctor.facts.weights import LoadedFacts
from trainwright.recorder.calls import Hook
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Facts, strict

SAMPLED = 512
"""Values of each weight that are remembered."""


class LoadedWeights(Probe):
    """Compares weights right after ``load_state_dict`` with those of the first forward call; then it is done."""

    name = LoadedFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._loaded: dict[str, Tensor] = {}
        self._facts: Facts | None = None
        self._waits = True
        self._handles: list[RemovableHandle] = [
            root.register_load_state_dict_post_hook(Hook(root, self._on_loaded))  # type: ignore[no-untyped-call]
            for root in self._roots
        ]

    def _on_loaded(self, module: nn.Module, keys: object) -> None:
        self._loaded |= {name: sampled(p) for name, p in module.named_parameters() if p.dim() > 1}

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not self._waits:
            return
        self._stop()
        if not self._loaded:
            return
        now = {name: p for each in self._roots for name, p in each.named_parameters()}
        known = [(name, was, now[name]) for name, was in self._loaded.items() if name in now]
        gone = [name for name, was, p in known if not _alike(was, sampled(p))]
        sizes = {name: p.numel() for name, _, p in known}
        fraction = sum(sizes[name] for name in gone) / max(1, sum(sizes.values()))
        facts = LoadedFacts(weights=len(known), gone=tuple(gone), fraction=fraction)
        self._facts = dict(strict(vars(facts)))

    def on_closed(self, step: RecordedStep) -> None:
        if self._waits:
            self._stop()

    def _stop(self) -> None:
        self._waits = False
        for handle in self._handles:
            handle.remove()

    def values(self) -> Facts | None:
        facts, self._facts = self._facts, None
        return facts


@torch.no_grad()
def sampled(parameter: Tensor) -> Tensor:
    """Some values of a tensor, always at the same positions."""
    flat = own_part(parameter.detach()).flatten()
    return flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].float().clone()


def _alike(was: Tensor, now: Tensor) -> bool:
    """Whether values are equal up to a factor or rounding: casting and scaling keep what was learned."""
    if was.shape != now.shape or bool((was == now).all()):
        return was.shape == now.shape
    return bool(torch.nn.functional.cosine_similarity(was, now, dim=0) > 0.5)
