"""A rehearsal: one batch forward and backward before the run, which leaves no trace in the state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from trainwright.engine.accumulate import accumulate
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.step import clear_grads
from trainwright.state.cursor import StepBatch
from trainwright.state.rng import preserved_rng
from trainwright.state.scaler import NoScaler
from trainwright.state.train_state import TrainState


@dataclass(frozen=True)
class Rehearsal:
    """``loss`` of the untrained model on the first batch, in fp32; ``mean`` when the loss gave a plain mean.

    ``seconds`` holds the median time of forward and backward of one whole step, by precision;
    ``activation_bytes`` what autograd saves for the backward of one micro-batch, weights not counted.
    """

    loss: float
    mean: bool
    seconds: dict[str, float]
    activation_bytes: int
    outputs: int | None


@contextmanager
def _traceless(state: TrainState) -> Iterator[None]:
    """Random generators, buffers (BatchNorm statistics) and gradients come out as they went in."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in state.model.buffers()]
    with preserved_rng():
        try:
            yield
        finally:
            clear_grads(state.optimizer)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def rehearse(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    *,
    precisions: Sequence[Precision] = (FP32,),
    repeats: int = 3,
) -> Rehearsal:
    """Runs the first batch ``repeats`` times in each precision, interleaved, and times it."""
    loss_fn = as_loss_fn(loss)
    unscaled = replace(state, scaler=NoScaler())
    seen: dict[str, list[float]] = {precision.name: [] for precision in precisions}
    with _traceless(state):
        value = float(accumulate(unscaled, batch, loss_fn, FP32).loss)
        mean, saved, outputs = _look_inside(state, batch, loss)
        for _ in range(repeats):
            for precision in precisions:
                clear_grads(state.optimizer)
                begin_s = time.perf_counter()
                float(accumulate(unscaled, batch, loss_fn, precision).loss)  # waits for the device
                seen[precision.name].append(time.perf_counter() - begin_s)
    return Rehearsal(value, mean, {name: median(times) for name, times in seen.items() if times}, saved, outputs)


def _look_inside(
    state: TrainState, batch: StepBatch, loss: Callable[..., Loss | Tensor]
) -> tuple[bool, int, int | None]:
    """(loss is a mean, bytes saved for backward, last dimension of the model's output)."""
    own = {p.untyped_storage().data_ptr() for p in (*state.model.parameters(), *state.model.buffers())}
    storages: dict[int, int] = {}
    outputs: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        logits = getattr(output, "logits", output)
        if isinstance(logits, Tensor) and logits.dim() >= 2:
            outputs.append(logits.shape[-1])

    handle = state.model.register_forward_hook(watch)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = as_loss_fn(loss)(state.model, batch.micro[0].data)
    finally:
        handle.remove()
    return isinstance(output, Tensor), sum(storages.values()), outputs[-1] if outputs else None
