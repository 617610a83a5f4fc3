"""Observes which weights of a model come from a pretrained one."""

from __future__ import annotations

from trainwright.doctor.facts.weights import PretrainedFacts
from trainwright.recorder.probes import Probe, WatchedObjects


class PretrainedProbe(Probe):
    """Reads once what the loader of a pretrained model has recorded, and counts the adapters."""

    name = PretrainedFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        modules = [module for root in watched.subject.roots for module in root.modules()]
        origin = next((found for each in modules if (found := vars(each).get("pretrained"))), None)
        facts = PretrainedFacts(
            missing=() if origin is None else tuple(origin.new_in_base),
            is_random=any(vars(each).get("newly_initialized", False) for each in modules),
            adapters=sum("lora_A" in each._modules for each in modules),
        )
        self._facts = facts if facts != PretrainedFacts() else None

    def facts(self) -> PretrainedFacts | None:
        return self._facts
