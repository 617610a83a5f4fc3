"""A rehearsal: one batch forward and backward before the run, which leaves no trace in the state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from trainwright.engine.accumulate import accumulate
from trainwright.engine.cut import cut_micro
from trainwright.engine.head import head_of
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.engine.oom_report import is_out_of_memory, oom_snapshot
from trainwright.engine.precision import FP32, Precision, PrecisionName
from trainwright.engine.recover import ONE_IS_TOO_MUCH, given_up, make_room
from trainwright.engine.step import clear_grads
from trainwright.state.cursor import StepBatch
from trainwright.state.rng import preserved_rng
from trainwright.state.scaler import NoScaler
from trainwright.state.train_state import TrainState

_PARTS = {  # of a sparse tensor, by layout
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


class Mode(NamedTuple):
    """A way to compute a step: in which precision, and by how many threads of the CPU."""

    precision: Precision
    threads: int


@dataclass(frozen=True)
class DryRun:
    """``loss`` of the untrained model on the first batch, in fp32; ``mean`` when the loss gave a plain mean.

    ``seconds`` holds the least time of forward and backward of the batch, by mode (the least: what else the
    machine does only adds). ``activation_bytes`` is what autograd saves for the backward of one micro-batch,
    weights not counted; ``outputs`` the last dimension of what the model gives.
    """

    loss: float
    mean: bool
    seconds: dict[tuple[PrecisionName, int], float]
    activation_bytes: int
    outputs: int | None


@contextmanager
def _traceless(state: TrainState) -> Iterator[None]:
    """Generators, buffers (BatchNorm statistics) and threads come out as they went in; gradients are cleared."""
    threads = torch.get_num_threads()
    places = [
        (m, name, b, _memory(b).detach().clone())
        for root in (state.model, state.loss)
        if root is not None
        for m in root.modules()
        for name, b in m.named_buffers(recurse=False)
    ]
    with preserved_rng():
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            clear_grads(state.optimizer)
            with torch.no_grad():
                for module, name, buffer, before in places:  # a forward may write into it, or put another there
                    _memory(buffer).copy_(before)
                    setattr(module, name, buffer)


def _memory(buffer: Tensor) -> Tensor:
    """What of a buffer can be written: where elements lie on each other (``expand``), each of them once."""
    if buffer.layout != torch.strided or buffer.numel() == 0:
        return buffer  # not detached: of a sparse tensor that is another one, with values of its own
    span = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return buffer if buffer.numel() <= span else buffer.as_strided((span,), (1,))


def _storages(tensor: Tensor) -> list[UntypedStorage]:
    """The memory of a tensor; a sparse one has that of its indices and of its values."""
    names = _PARTS.get(tensor.layout)
    parts = [tensor] if names is None else [getattr(tensor.detach(), name)() for name in names]
    return [part.untyped_storage() for part in parts]


def dry_run(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    *,
    modes: Sequence[Mode],
    budget_s: float = 0.4,
) -> DryRun:
    """Runs the first batch in each mode in turn and times it: three times at least, up to ``budget_s`` in all.

    Of one that does not fit into memory, the half, the quarter, ... that does; its times are then scaled up. Raises
    OutOfMemory when one sample does not.
    """
    device = state.optimizer.param_groups[0]["params"][0].device
    part, told = batch, []
    while True:
        try:
            seen = _timed(state, part, loss, modes, budget_s)
            scale = batch.size / part.size
            return replace(seen, seconds={mode: least_s * scale for mode, least_s in seen.seconds.items()})
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = oom_snapshot(error, state, part, device)
        told.append(make_room(found, part, part.size // 2 or None, state, device))
        if part.size == 1:
            raise given_up(told, ONE_IS_TOO_MUCH)
        part = replace(part, micro=tuple(cut_micro(part.micro[0], max(1, part.micro[0].size // 2))[:1]))


def _timed(
    state: TrainState, batch: StepBatch, loss: Callable[..., Loss | Tensor], modes: Sequence[Mode], budget_s: float
) -> DryRun:
    loss_fn = as_loss_fn(loss)
    unscaled = replace(state, scaler=NoScaler())
    seen: dict[tuple[PrecisionName, int], list[float]] = {(mode.precision.name, mode.threads): [] for mode in modes}
    with _traceless(state):
        value = float(accumulate(unscaled, batch, loss_fn, FP32).loss)
        mean, saved, outputs = _look_inside(state, batch, loss)
        end_s = time.perf_counter() + budget_s
        while time.perf_counter() < end_s or any(len(times) < 3 for times in seen.values()):
            for precision, threads in modes:
                torch.set_num_threads(threads)
                clear_grads(state.optimizer)
                begin_s = time.perf_counter()
                float(accumulate(unscaled, batch, loss_fn, precision).loss)  # waits for the device
                seen[precision.name, threads].append(time.perf_counter() - begin_s)
    return DryRun(value, mean, {mode: min(times) for mode, times in seen.items()}, saved, outputs)


def _look_inside(
    state: TrainState, batch: StepBatch, loss: Callable[..., Loss | Tensor]
) -> tuple[bool, int, int | None]:
    """(loss is a mean, bytes saved for backward, last dimension of the model's output)."""
    own = {s.data_ptr() for p in (*state.model.parameters(), *state.model.buffers()) for s in _storages(p)}
    storages: dict[int, int] = {}
    outputs: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
        # Never the tensor itself: an operator that saves its own result (tanh, relu, exp, softmax) would then hold a
        # tensor that holds the operator, a cycle through C++ that nothing collects.
        return tensor.detach()

    def watch(module: nn.Module, inputs: object, named: dict[str, Any], output: object) -> None:
        logits = getattr(output, "logits", output)
        if named.get("hidden"):  # what the head reads: the loss makes the logits a part at a time
            head = head_of(module)
            outputs.extend([] if head is None else [len(head.weight)])
        elif isinstance(logits, Tensor) and logits.dim() >= 2:
            outputs.append(logits.shape[-1])

    handle = state.model.register_forward_hook(watch, with_kwargs=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = as_loss_fn(loss)(state.model, batch.micro[0].data)
    finally:
        handle.remove()
    return isinstance(output, Tensor), sum(storages.values()), outputs[-1] if outputs else None
