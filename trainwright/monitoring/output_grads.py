"""Records gradients with respect to outputs of modules: norms and histograms (``log.retain_grad``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.shards import local
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.transforms import is_transformed
from trainwright.engine.step import StepResult
from trainwright.monitoring.layer_stats import (
    MAX_SAMPLED_ELEMENTS,
    HookedStats,
    LayerLog,
    LayerObserver,
    histogram,
    short,
    tensor_in,
    without_ends,
)
from trainwright.runs.records import OUTPUT_GRAD_LOG2, OutputGrads


class OutputGradStats(HookedStats):
    """Gradients with respect to the outputs of ``modules`` in one step, measured as ``LayerStats`` measures parameters.

    Norms are over all elements of all calls of a module in the step, including all micro-batches. Histograms are of
    MAX_SAMPLED_ELEMENTS of the call whose backward pass was first. Both are multiplied by ``factor``. A forward pass
    that activation checkpointing repeats is not counted again, because no gradient flows to its output.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.paths = tuple(modules)
        self.factor: Tensor | float = 1.0
        self._modules = tuple(modules.values())
        self._norms: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Hook the modules for one step."""
        self.discard()
        self._handles = [module.register_forward_hook(self._hook(at)) for at, module in enumerate(self._modules)]

    def _hook(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def add(grad: Tensor) -> None:
            begin_s = time.perf_counter()
            with torch.no_grad():
                own = local(grad.detach())
                norm = torch.linalg.vector_norm(own, dtype=torch.promote_types(own.dtype, torch.float32)).float()
                self._norms[index] = torch.hypot(self._norms[index], norm) if index in self._norms else norm
                if index not in self._sampled:
                    self._sampled[index] = self._sample(own).float()
            self.hooks_s += time.perf_counter() - begin_s

        def keep(module: nn.Module, given: object, output: object) -> None:
            if torch.is_grad_enabled() and not is_transformed():
                found = tensor_in(output)
                if found is not None and found.requires_grad:
                    found.register_hook(add)  # type: ignore[no-untyped-call]

        keep.is_recorders = True  # type: ignore[attr-defined]  # not a hook of the user, which a replay would need
        return keep

    def before_update(self, optimizer: Optimizer | None = None) -> None:
        """Remove the hooks after the backward passes of the step."""
        self._unhook()

    @torch.no_grad()
    def after_update(self) -> None:
        """Start the copy of norms and histograms to the host."""
        self._unhook()
        if not self._norms:
            return
        device = next(iter(self._norms.values())).device
        missing = torch.full((), torch.nan, device=device)
        no_sample = torch.full((MAX_SAMPLED_ELEMENTS,), torch.nan, device=device)
        places = range(len(self._modules))
        norms = torch.stack([self._norms[at].to(device) if at in self._norms else missing for at in places])
        seen = torch.tensor([at in self._norms for at in places], device="cpu").to(device, non_blocking=True)
        rows = torch.stack([self._sampled.get(at, no_sample).to(device) for at in places])
        norms = torch.where(seen, (norms * self.factor).nan_to_num(torch.inf, torch.inf), torch.nan)
        counts = histogram(rows * self.factor, OUTPUT_GRAD_LOG2.start, len(OUTPUT_GRAD_LOG2))
        self._copy.start(torch.cat([norms.float(), counts.flatten()]))
        self.discard()

    def discard(self) -> None:
        """Discard the values of the step so far."""
        self._norms, self._sampled = {}, {}

    def read(self, *, wait: bool = False) -> Mapping[str, object] | None:
        """Return the fields of an OutputGrads record once they are on the host; None before, and if there is nothing
        new.
        """
        values = self._copy.take(wait=wait)
        if values is None:
            return None
        count = len(self._modules)
        bins = values[count:].view(count, -1).mul(100 / MAX_SAMPLED_ELEMENTS).round().int().tolist()
        return {"norm": tuple(map(short, values[:count].tolist())), "log2": tuple(map(without_ends, bins))}


class OutputGradObserver(LayerObserver):
    """Records the gradients of ``stats`` in the steps that ``log`` chooses, without the loss scale."""

    def __init__(self, log: LayerLog[OutputGrads], stats: OutputGradStats) -> None:
        super().__init__(log)
        self._stats = stats

    def probe(self, state: TrainState) -> Mapping[str, Tensor]:
        """Store the loss scale of this step, which the update may change."""
        scale = state.scaler.scale
        self._stats.factor = 1.0 if scale is None else scale.reciprocal()
        return super().probe(state)

    def observe(self, result: StepResult, state: TrainState) -> None:
        if result.correction is not None:
            self._stats.factor = self._stats.factor * result.correction
        if result.oom_reports:  # the failed attempts were counted too
            self._stats.discard()
        super().observe(result, state)
