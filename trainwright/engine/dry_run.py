"""The dry run: one batch forward and backward before the run, which changes nothing of the state."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from trainwright.checkpoint.chained import parts_of
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.cut import cut_micro
from trainwright.checkpoint.isolation import isolated
from trainwright.checkpoint.reach import ReachableState, hooks_of_tensors, hooks_of_the_process
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.scaler import NoScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.accumulate import accumulate
from trainwright.engine.evaluate import evaluate
from trainwright.engine.head import head_of
from trainwright.engine.loss import Loss, LossFn, as_loss_fn, call_loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.engine.oom_report import is_out_of_memory, oom_snapshot
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.recover import ONE_IS_TOO_MUCH, given_up, make_room
from trainwright.engine.refusals import explaining
from trainwright.engine.step import clear_grads
from trainwright.errors import OomReport
from trainwright.optim.clip import global_norm

COPIED_BYTES = 64 * 2**20  # of weights; gradients and moments are as large again, each
SLOW_S = 2.0  # of all modes together; two further times of each would cost more than they tell
IN_A_ROW = 2  # of one of several modes: the first after another number of threads pays for the change
ENOUGH = 8  # rounds: their median hardly changes
_PARTS = {  # of a sparse tensor, by layout
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


class Mode(NamedTuple):
    """In which precision a step is computed, and by how many CPU threads."""

    precision: Precision
    threads: int


@dataclass(frozen=True)
class DryRun:
    """``loss`` of the untrained model on the first micro-batch, in fp32; ``mean``: the loss returned a plain mean.

    ``seconds`` holds the time of forward and backward of the batch by mode: the median over the newer half of the
    rounds, so that what the machine does besides is in it as in the run, and the first calls, which are slower, are
    not. ``thread_s`` is the shortest processor time of the calling thread, which does not count that it waits: all the
    work of a mode of one thread. ``update_s`` is that of the optimizer's update, 0 where it was not measured, and
    ``optimizer_bytes`` what it keeps since. ``activation_bytes`` is what autograd saves for the backward pass of one
    micro-batch, without the weights and the batch. ``outputs`` is the last dimension of the model's output.
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
def _traceless(state: TrainState, *used: object) -> Iterator[None]:
    """Restores what a forward and backward pass can change, and clears gradients. Nothing inside acts elsewhere.

    ``used`` are the functions and objects that are called beside the model and its loss. Weights that take more than
    ``COPIED_BYTES`` are not copied: a model that writes into these in its forward pass is not supported.

    Raises:
        NotIsolated: If something can be reached, or was touched, that cannot be restored.
    """
    parameters = [p for root in (state.model, state.loss) if root is not None for p in root.parameters()]
    optimizers = parts_of(state.optimizer)
    known = [*(parameters if sum(p.nbytes for p in parameters) > COPIED_BYTES else ()), *(o.state for o in optimizers)]
    used = (state.model, state.loss, *optimizers, *used)
    roots = [(type(root).__name__, root) for root in used if root is not None]
    hooks = [*hooks_of_the_process(), *hooks_of_tensors(parameters)]
    with preserved_rng(), isolated(ReachableState([*roots, *hooks], known)):
        try:
            yield
        finally:
            clear_grads(state.optimizer)


def _storages(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor; a sparse tensor has one for its indices and one for its values.

    Of a tensor around others (a rank's part, or what a collective has not filled yet) those of the others.
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
    """Runs ``batch`` in all modes in turn and times it, until ``budget_s`` have passed or it is known well.

    At least four times of each of several modes are taken, three of an only one; two where that takes two seconds. A
    batch that does not fit into memory is halved until it does, and its times are scaled up; then only the first mode
    is tried, for each keeps memory of its own in the kernels, and no update. Raises OutOfMemoryError when one sample
    does not fit, UsageError where the batch does not fit the model, NotIsolated where it would leave a trace.

    Where the ranks of ``world`` divide the weights, all must call it at the same time, with as many samples each or
    fewer, and the first that runs out of memory ends it.
    """
    device = state.optimizer.param_groups[0]["params"][0].device
    part = batch
    reports: list[OomReport] = []
    while True:
        try:
            with explaining(state.model):
                timed = _timed(state, part, loss, modes, budget_s, updates=not reports, world=world)
            scale = batch.size / part.size if part.size else 1.0  # a rank may have had no sample left
            seconds, work = (
                {mode: least_s * scale for mode, least_s in each.items()} for each in (timed.seconds, timed.thread_s)
            )
            return replace(timed, seconds=seconds, thread_s=work)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            snapshot = oom_snapshot(error, state, part, device)
        modes = modes[:1]
        reports.append(make_room(snapshot, part, part.size // 2 or None, state, device))
        if part.size <= 1 or world.size > 1:
            raise given_up(reports, ONE_IS_TOO_MUCH if world.size == 1 else "the ranks cannot try again together")
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
    in_a_row, rounds, least = (IN_A_ROW, 2, 1) if len(modes) > 1 else (1, 3, 2)
    loss_fn = as_loss_fn(loss)
    unscaled = replace(state, scaler=NoScaler())
    times: dict[tuple[PrecisionName, int], list[float]] = {(mode.precision.name, mode.threads): [] for mode in modes}
    of_thread: dict[tuple[PrecisionName, int], list[float]] = {mode: [] for mode in times}
    with _traceless(state, loss):
        first = _look_inside(state, batch, loss_fn)
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
            is_known = elapsed_s >= budget_s and done >= (rounds if elapsed_s < SLOW_S else least)
            if world.least(int(is_known or done >= ENOUGH)):
                break
        update_s, kept = _update(state) if updates and world.size == 1 else (0.0, None)
    seconds = {mode: statistics.median(each[-max(1, len(each) // 2) :]) for mode, each in times.items()}
    work = {mode: min(each) for mode, each in of_thread.items()}
    return replace(first, seconds=seconds, thread_s=work, update_s=update_s, optimizer_bytes=kept)


def time_evaluation(
    state: TrainState,
    batches: Iterable[MicroBatch],
    loss: Callable[..., Loss | Tensor],
    mode: Mode,
    world: World = SOLO,
    metrics: MetricSet = NO_METRICS,
) -> float | None:
    """Seconds that an evaluation takes for each batch, reading included; None where there is no batch.

    Raises NotIsolated where it would leave a trace.

    The first batch counts only where it is alone, or takes two seconds. ``world`` as in ``dry_run``.
    """
    stream, times = iter(batches), list[float]()
    with _traceless(state, loss, metrics):
        torch.set_num_threads(mode.threads)
        while world.least(int(len(times) < 4 and sum(times) < SLOW_S)):
            begin_s = time.perf_counter()
            micro = next(stream, None)
            if micro is None:
                break
            evaluate(state.model, loss, [micro], precision=mode.precision, metrics=metrics)
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:] or times) if times else None


def _update(state: TrainState) -> tuple[float, int | None]:
    """Times gradient norm and update on a copy of the weights, and weighs what the optimizer keeps then.

    0 and None where the weights are large, or cannot be copied.
    """
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    if sum(p.nbytes for p in parameters) > COPIED_BYTES:  # beside them, forward and backward take most of the time
        return 0.0, None
    try:
        optimizer = copy.deepcopy(state.optimizer)
        copies = [p for group in optimizer.param_groups for p in group["params"]]
        for each in copies:
            each.grad = torch.zeros_like(each)
        times = []
        for _ in range(4):  # the first one makes the optimizer's state
            started_s = time.perf_counter()
            global_norm([each.grad for each in copies if each.grad is not None])
            optimizer.step()
            float(copies[0].detach().flatten()[0])  # waits for the device
            times.append(time.perf_counter() - started_s)
    except Exception:  # an optimizer of the user's that cannot be copied, or that takes more than gradients
        return 0.0, None
    kept = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, Tensor)]
    return min(times), sum(each.nbytes for each in kept)


def _look_inside(state: TrainState, batch: StepBatch, loss_fn: LossFn) -> DryRun:
    """What one forward pass of the first micro-batch shows; nothing is timed yet."""
    held = (*state.model.parameters(), *state.model.buffers(), *batch.tensors)
    own = {storage.data_ptr() for tensor in held for storage in _storages(tensor)}
    storages: dict[int, int] = {}
    outputs: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # gathered for a while
        for storage in _storages(tensor):
            if storage.data_ptr() not in own and not is_weight:
                storages[storage.data_ptr()] = storage.nbytes()
        # Never the tensor itself: an operator that saves its own result (tanh, relu, exp, softmax) would then hold a
        # tensor that holds the operator, a cycle through C++ that nothing collects.
        return tensor.detach()

    def watch(module: nn.Module, inputs: object, kwargs: dict[str, object], output: object) -> None:
        logits = getattr(output, "logits", output)
        if kwargs.get("hidden"):  # what the head reads: the loss makes the logits a part at a time
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
    """The mean; NaN where nothing was counted."""
    if isinstance(output, Tensor):
        return float(output.detach())
    weight = float(output.weight)
    return float(output.total.detach()) / weight if weight else math.nan
