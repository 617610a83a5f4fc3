"""The dry run: forward and backward on one batch before the run, without changing the state."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.isolation import isolated, not_compiled
from trainwright.checkpoint.reach import ReachableState, hooks_of_tensors, hooks_of_the_process
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.scaler import NoScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import evaluate
from trainwright.engine.head import head_of
from trainwright.engine.input_errors import explaining
from trainwright.engine.loss import Loss, LossFn, accumulate, as_loss_fn, call_loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.recover import (
    ONE_SAMPLE_DOES_NOT_FIT,
    is_out_of_memory,
    make_room,
    oom_snapshot,
    out_of_memory_error,
)
from trainwright.engine.step import clear_grads
from trainwright.errors import OomReport
from trainwright.optim.clip import global_norm

MAX_COPIED_BYTES = 64 * 2**20  # size of the weights; their gradients and each moment take as much again
LONG_DRY_RUN_S = 2.0  # for all modes together; beyond it, more rounds cost more time than they are worth
RUNS_PER_ROUND = 2  # with several modes: the first run after a change of the thread count is slower
MAX_ROUNDS = 8  # the median hardly changes after this many
CLOSE_RATIO = 1.15  # for a ResNet that is 1.1x as fast in bf16, 4 rounds measured 1.03 to 1.16, 8 rounds 1.07 to 1.2
_PARTS = {  # tensors inside a sparse tensor, by layout
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


class Mode(NamedTuple):
    """Precision and number of CPU threads of a step."""

    precision: Precision
    threads: int


@dataclass(frozen=True)
class DryRun:
    """Measurements of one dry run.

    Attributes:
        loss: Loss of the untrained model on the first micro-batch, in fp32.
        mean: True if the loss function returned a plain mean.
        seconds: Time of forward and backward of the batch by mode: the median over the later half of the rounds, which
            excludes the slower first calls.
        thread_s: Shortest CPU time of the calling thread by mode. Excludes waiting; for a mode of one thread it is all
            the work.
        activation_bytes: Bytes that autograd saves for the backward pass of one micro-batch, without weights and batch.
        outputs: Last dimension of the model's output.
        update_s: Time of the optimizer's update; 0 if it was not measured.
        optimizer_bytes: Bytes of the optimizer's state after the update; None if unknown.
    """

    loss: float
    mean: bool
    seconds: dict[tuple[PrecisionName, int], float]
    thread_s: dict[tuple[PrecisionName, int], float]
    activation_bytes: int
    outputs: int | None
    update_s: float = 0.0
    optimizer_bytes: int | None = None


@contextmanager
def state_restored(state: TrainState, *used: object, compiled: bool = False) -> Iterator[None]:
    """Restore everything that a forward and backward pass can change, and clear gradients.

    ``used`` are functions and objects that are called besides the model and its loss. With ``compiled``, torch.compile
    is active and files may be written, because the compiler writes some. An uncompiled dry run must have shown before
    that the model writes none. Weights larger than ``MAX_COPIED_BYTES`` in total are not copied: a model that writes to
    them in its forward pass is not supported.

    Raises:
        NotIsolated: State that cannot be restored is reachable or was changed.
    """
    parameters = [p for root in state.roots for p in root.parameters()]
    optimizers = parts_of(state.optimizer)
    known = [
        *(parameters if sum(p.nbytes for p in parameters) > MAX_COPIED_BYTES else ()),
        *(o.state for o in optimizers),
    ]
    roots = [(type(root).__name__, root) for root in (*state.roots, *optimizers, *used)]
    hooks = [*hooks_of_the_process(), *hooks_of_tensors(parameters)]
    reachable, runs_as = ReachableState([*roots, *hooks], known), nullcontext() if compiled else not_compiled()
    with preserved_rng(), isolated(reachable, may_write=compiled), runs_as:
        try:
            yield
        finally:
            clear_grads(state.optimizer)


def _storages(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages of a tensor. A sparse tensor has one for its indices and one for its values.

    For a wrapper tensor (a DTensor, or the pending result of a collective) they are the storages of the inner tensors.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        inside = [getattr(tensor, name) for name in flatten()[0]]
        return [storage for each in inside if isinstance(each, Tensor) for storage in _storages(each)]
    names = _PARTS.get(tensor.layout)
    parts = [tensor] if names is None else [getattr(tensor.detach(), name)() for name in names]
    return [part.untyped_storage() for part in parts]


def dry_run(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    *,
    modes: Sequence[Mode],
    budget_s: float = 0.05,
    world: World = SOLO,
) -> DryRun:
    """Run ``batch`` in all modes in turn and time it, until ``budget_s`` has passed and the times are known well.

    A single mode runs at least three times. Several modes run at least four times each, or eight times if their
    precisions differ, or sixteen times if these are about equally fast. Once the dry run has taken two seconds, two
    runs of each mode are enough.

    A batch that does not fit into memory is halved until it fits, and its times are scaled up. From then on only the
    first mode runs, because the kernels of each mode retain memory, and the update is not timed.

    If the ranks of ``world`` divide the weights, all ranks must call this together. A rank may have fewer samples than
    the others. The dry run ends if a rank runs out of memory.

    Raises:
        OutOfMemoryError: One sample does not fit.
        UsageError: The batch does not fit the model.
        NotIsolated: The dry run would change state that cannot be restored.
    """
    part = batch
    reports: list[OomReport] = []
    while True:
        try:
            with explaining(state.model):
                timed = _timed(state, part, loss, modes, budget_s, updates=not reports, world=world)
            scale = batch.size / part.size if part.size else 1.0  # a rank may have no sample left
            seconds, work = (
                {mode: least_s * scale for mode, least_s in each.items()} for each in (timed.seconds, timed.thread_s)
            )
            return replace(timed, seconds=seconds, thread_s=work)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            snapshot = oom_snapshot(error, state, part)
        modes = modes[:1]
        reports.append(make_room(snapshot, part, part.size // 2 or None, state))
        if part.size <= 1 or world.size > 1:
            raise out_of_memory_error(
                reports, ONE_SAMPLE_DOES_NOT_FIT if world.size == 1 else "the ranks cannot try again together"
            )
        part = replace(part, micro=tuple(cut_micro(part.micro[0], max(1, part.micro[0].size // 2))[:1]))


def _timed(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    modes: Sequence[Mode],
    budget_s: float,
    *,
    updates: bool,
    world: World,
) -> DryRun:
    in_a_row, rounds, least = (RUNS_PER_ROUND, 2, 1) if len(modes) > 1 else (1, 3, 2)
    if len({mode.precision.name for mode in modes}) > 1:
        rounds = 4  # with 2 rounds, 1 of 7 runs on a busy machine chose fp32 for a ResNet that bf16 makes 1.2x as fast
    loss_fn = as_loss_fn(loss)
    unscaled = replace(state, scaler=NoScaler())
    times: dict[tuple[PrecisionName, int], list[float]] = {(mode.precision.name, mode.threads): [] for mode in modes}
    of_thread: dict[tuple[PrecisionName, int], list[float]] = {mode: [] for mode in times}
    with state_restored(state, loss):
        first = _measure_first_forward(state, batch, loss_fn)
        begin_s = time.perf_counter()
        for done in count(1):
            for precision, threads in modes:
                torch.set_num_threads(threads)
                in_round = list[float]()
                for _ in range(in_a_row):
                    clear_grads(state.optimizer)
                    started_s, thread_s = time.perf_counter(), time.thread_time()
                    float(accumulate(unscaled, batch, loss_fn, precision).loss)  # waits for the device
                    in_round.append(time.perf_counter() - started_s)
                    of_thread[precision.name, threads].append(time.thread_time() - thread_s)
                times[precision.name, threads].append(min(in_round))
            elapsed_s = time.perf_counter() - begin_s
            more = MAX_ROUNDS if _is_close(of_thread) else rounds
            is_known = elapsed_s >= budget_s and done >= (more if elapsed_s < LONG_DRY_RUN_S else least)
            if world.least(int(is_known or done >= MAX_ROUNDS)):
                break
        update_s, kept = _update(state) if updates and world.size == 1 else (0.0, None)
    seconds = {mode: statistics.median(each[-max(1, len(each) // 2) :]) for mode, each in times.items()}
    work = {mode: min(each) for mode, each in of_thread.items()}
    return replace(first, seconds=seconds, thread_s=work, update_s=update_s, optimizer_bytes=kept)


def _is_close(thread_s: Mapping[tuple[PrecisionName, int], Sequence[float]]) -> bool:
    """Return True if the times of precisions in one thread are so close that noise could decide between them."""
    least = [min(times) for (_, threads), times in thread_s.items() if threads == 1]
    return len(least) > 1 and max(least) < CLOSE_RATIO * min(least)


def time_evaluation(
    state: TrainState,
    batches: Iterable[MicroBatch],
    loss: Callable[..., Loss | Tensor],
    mode: Mode,
    world: World = SOLO,
    metrics: MetricSet = NO_METRICS,
) -> float | None:
    """Return the seconds per batch of an evaluation, reading included; None if there is no batch.

    The first batch counts only if it is the only one or takes two seconds. ``world`` is as in ``dry_run``. Raises
    NotIsolated if the evaluation would change state that cannot be restored.
    """
    stream, times = iter(batches), list[float]()
    with state_restored(state, loss, metrics):
        torch.set_num_threads(mode.threads)
        while world.least(int(len(times) < 4 and sum(times) < LONG_DRY_RUN_S)):
            begin_s = time.perf_counter()
            micro = next(stream, None)
            if micro is None:
                break
            evaluate(state.model, loss, [micro], precision=mode.precision, metrics=metrics)
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:] or times) if times else None


def _update(state: TrainState) -> tuple[float, int | None]:
    """Time gradient norm and update on a copy of the weights, and measure the bytes of the optimizer's state.

    Returns 0 and None if the weights are large or cannot be copied.
    """
    if sum(p.nbytes for p in state.parameters) > MAX_COPIED_BYTES:  # then forward and backward take most of the time
        return 0.0, None
    try:
        optimizer = copy.deepcopy(state.optimizer)
        copies = [p for group in optimizer.param_groups for p in group["params"]]
        for each in copies:
            each.grad = torch.zeros_like(each)
        times = []
        for _ in range(4):  # the first one creates the optimizer's state
            started_s = time.perf_counter()
            global_norm([each.grad for each in copies if each.grad is not None])
            optimizer.step()
            float(copies[0].detach().flatten()[0])  # waits for the device
            times.append(time.perf_counter() - started_s)
    except Exception:  # a custom optimizer that cannot be copied, or that needs more than gradients
        return 0.0, None
    kept = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, Tensor)]
    return min(times), sum(each.nbytes for each in kept)


def _measure_first_forward(state: TrainState, batch: StepBatch, loss_fn: LossFn) -> DryRun:
    """Run one forward pass of the first micro-batch; return its loss, outputs and activation bytes, without times."""
    held = (*state.model.parameters(), *state.model.buffers(), *batch.tensors)
    own = {storage.data_ptr() for tensor in held for storage in _storages(tensor)}
    storages: dict[int, int] = {}
    outputs: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # also if FSDP gathers
        for storage in _storages(tensor):
            if storage.data_ptr() not in own and not is_weight:
                storages[storage.data_ptr()] = storage.nbytes()
        # Never the tensor itself: an operator that saves its own result (tanh, relu, exp, softmax) would then hold a
        # tensor that holds the operator, a cycle through C++ that is never collected.
        return tensor.detach()

    def watch(module: nn.Module, _inputs: object, kwargs: dict[str, object], output: object) -> None:
        logits = getattr(output, "logits", output)
        if kwargs.get("hidden"):  # the input of the head: the loss computes the logits in chunks
            head = head_of(module)
            outputs.extend([] if head is None else [len(head.weight)])
        elif isinstance(logits, Tensor) and logits.dim() >= 2:
            outputs.append(logits.shape[-1])

    handle = state.model.register_forward_hook(watch, with_kwargs=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call_loss(loss_fn, state.model, batch.micro[0], f"micro-batch 0 of step {state.step + 1}")
    finally:
        handle.remove()
    mean = isinstance(output, Tensor)
    return DryRun(_value(output), mean, {}, {}, sum(storages.values()), outputs[-1] if outputs else None)


def _value(output: Loss | Tensor) -> float:
    """Return the mean, or NaN if nothing was counted."""
    if isinstance(output, Tensor):
        return float(output.detach())
    weight = float(output.weight)
    return float(output.total.detach()) / weight if weight else math.nan
